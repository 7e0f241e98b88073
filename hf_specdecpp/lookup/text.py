"""What followed where the end of a text stood before: `TextLookup`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hf_specdecpp.lookup.rates import class_of
from hf_specdecpp.lookup.seen import MOST_ID, NOTHING, Matches, Seen

CONTEXT = 64  # tokens of the prompt's end that matches are looked for with, which is the longest match there
EQUAL = 8  # matches of this many tokens and more count as equally good


@dataclass
class Continuation:
    """What is expected after a text.

    Attributes:
        tokens: candidates, each after those before it.
        classes: what each rests on (`rates.class_of`).
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
        found = Continuation()
        while alive and len(found) < most:
            place = len(found)
            if len(alive) == 1 and place < len(alive[0]):
                further, agree = alive[0][place:], 1
            else:
                # Beyond the end of the text stands what was found.
                next_ones = [each[place] if place < len(each) else found.tokens[place - len(each)] for each in alive]
                further, agree = [best := _most_frequent(next_ones)], next_ones.count(best)
            total = len(alive)
            said = self._sayable(further)
            found.tokens += further[:said]
            first = longest + place
            found.classes += [class_of(length, agree, total) for length in range(first, first + said)]
            if said < len(further):
                break
            if agree < total:
                alive = [each for each, token in zip(alive, next_ones, strict=True) if token == best]
        return found

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
        if min(tokens) >= 0 and max(tokens) < self.vocab_size and self.never.isdisjoint(tokens):
            return len(tokens)
        is_allowed = (0 <= token < self.vocab_size and token not in self.never for token in tokens)
        return next((count for count, allowed in enumerate(is_allowed) if not allowed), len(tokens))


def _most_frequent(tokens: list[int]) -> int:
    """Of equally many, the one that comes first."""
    first = tokens[0]
    return first if tokens.count(first) == len(tokens) else max(dict.fromkeys(tokens), key=tokens.count)
