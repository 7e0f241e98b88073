"""What followed where the end of a text stood before: `TextLookup`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hf_specdecpp.lookup.rates import classes_of
from hf_specdecpp.lookup.seen import MOST_ID, NOTHING, Matches, Seen

CONTEXT = 64  # tokens of the prompt's end that matches are looked for with, which is the longest match there
EQUAL = 8  # matches of this many tokens and more count as equally good


@dataclass
class Continuation:
    """What is expected after a text.

    Attributes:
        tokens: candidates, each after those before it.
        classes: what each rests on (`rates.classes_of`).
    """

    tokens: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class TextLookup:
    """A text as it grows, and its continuation by what was seen.

    Example: after 5 6 7 8 9 5 6 7 8 5 6 the latest earlier 5 6 is at its sixth and seventh token, and 7 8 5 followed
    there; after the first one 7 8 9. Both have 7 8 (two of two), then one of two has 5, the later one.

    Args:
        never: ids that are not proposed; a continuation ends before them.
        vocab_size: nor are ids from here on.
        earlier: other texts to look in.
    """

    def __init__(self, never: Collection[int] = (), vocab_size: int | None = None, earlier: Seen | None = None) -> None:
        self.never, self.vocab_size = frozenset(never), MOST_ID if vocab_size is None else vocab_size
        self.sources = [Seen()] if earlier is None or not len(earlier) else [Seen(), earlier]
        self._matches: list[Matches] = [{} for _ in self.sources]

    def __len__(self) -> int:
        return len(self.sources[0])

    def read_prompt(self, tokens: Sequence[int]) -> None:
        """Begin with these."""
        self.sources[0].extend(tokens[:-CONTEXT])
        for token in tokens[-CONTEXT:]:
            self.read(token)

    def read(self, token: int) -> None:
        """Take note of the next token of the text."""
        self._matches = self._after((token,))
        self.sources[0].append(token)

    def ahead(self, most: int, after: Sequence[int] = ()) -> Continuation:
        """At most `most` tokens that are expected after the text, and after these further ones."""
        matches = self._after(after) if after else self._matches
        longest = max([length for each in matches for length in each.values()], default=0)
        alive = self._pieces(matches, min(longest, EQUAL), most, after) if most > 0 else []
        tokens: list[int] = []
        classes: list[int] = []
        while alive and (place := len(tokens)) < most:
            total = agree = len(alive)
            if total == 1 and place < len(alive[0]):
                tokens += alive[0][place:]
            else:
                # Beyond the end of the text stands what was found.
                next_ones = [each[place] if place < len(each) else tokens[place - len(each)] for each in alive]
                best = next_ones[0]
                if (agree := next_ones.count(best)) < total:
                    best = max(dict.fromkeys(next_ones), key=next_ones.count)  # of equally many the latest
                    agree = next_ones.count(best)
                    alive = [each for each, token in zip(alive, next_ones, strict=True) if token == best]
                tokens.append(best)
            classes += classes_of(range(longest + place, longest + len(tokens)), agree, total)
        count = self._sayable(tokens)
        return Continuation(tokens[:count], classes[:count])

    def _pieces(self, matches: list[Matches], least: int, most: int, after: Sequence[int]) -> list[list[int]]:
        """What follows each place of which at least so many tokens match, the latest first: at most `most` tokens.

        Pieces of the text end where it ends; those of other texts end with `NOTHING`.
        """
        pieces = []
        for seen, each in zip(self.sources, matches, strict=True):
            for place, length in each.items():
                if length >= least:
                    piece = seen.tokens[place + 1 : place + 1 + most].tolist()
                    if len(piece) < most:
                        piece = [*piece, *after][:most] if seen is self.sources[0] else [*piece, NOTHING]
                    pieces.append(piece)
        return pieces

    def _after(self, tokens: Sequence[int]) -> list[Matches]:
        """What matches once these have followed the text."""
        matches, own = self._matches, self.sources[0].tokens
        last = own[-1] if own else NOTHING
        for token in tokens:
            matches = [seen.matches(last, token, each) for seen, each in zip(self.sources, matches, strict=True)]
            last = token
        return matches

    def _sayable(self, tokens: list[int]) -> int:
        """How many of the tokens may be said, from the first on."""
        if not tokens or (min(tokens) >= 0 and max(tokens) < self.vocab_size and self.never.isdisjoint(tokens)):
            return len(tokens)
        is_allowed = (0 <= token < self.vocab_size and token not in self.never for token in tokens)
        return next((count for count, allowed in enumerate(is_allowed) if not allowed), len(tokens))
