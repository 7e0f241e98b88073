"""What followed where the end of a text stood before: `TextLookup`."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from hf_specdecpp.lookup.rates import class_of
from hf_specdecpp.lookup.seen import Matches, Seen

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
        self.never, self.vocab_size = frozenset(never), vocab_size
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
        self._matches = self._after([token])
        self.sources[0].append(token)

    def ahead(self, most: int, after: Sequence[int] = ()) -> Continuation:
        """At most `most` tokens that are expected after the text, and after these further ones."""
        found = Continuation()
        matches = self._after(after) if after else self._matches
        longest = max((length for each in matches for length in each.values()), default=0)
        # Which sources have matches of that length, and the places after them: the latest first.
        groups = [
            (seen.tokens, [place + 1 for place, length in each.items() if min(length, EQUAL) == min(longest, EQUAL)])
            for seen, each in zip(self.sources, matches, strict=True)
        ]
        while len(found) < most:
            if sum(len(places) for _, places in groups) == 1:
                self._copy(found, groups, longest, most)
            if len(found) == most or not self._step(found, groups, longest, list(after)):
                break
        return found

    def _after(self, tokens: Sequence[int]) -> list[Matches]:
        """What matches once these have followed the text."""
        matches, own = self._matches, self.sources[0].tokens
        last = own[-1] if own else None
        for token in tokens:
            if last is not None:
                matches = [seen.matches(last, token, each) for seen, each in zip(self.sources, matches, strict=True)]
            last = token
        return matches

    def _copy(
        self, found: Continuation, groups: list[tuple[array[int], list[int]]], longest: int, most: int
    ) -> None:
        """Where one place is left: what stands there, up to its end."""
        tokens, places = next((tokens, places) for tokens, places in groups if places)
        copied = tokens[places[0] : places[0] + most - len(found)].tolist()
        end = next((place for place, token in enumerate(copied) if not self._may_say(token)), len(copied))
        first = longest + len(found)
        found.tokens += copied[:end]
        found.classes += [class_of(length, 1, 1) for length in range(first, first + end)]
        places[0] += end

    def _step(
        self, found: Continuation, groups: list[tuple[array[int], list[int]]], longest: int, after: list[int]
    ) -> bool:
        """One more token, by what most places have; of equally many the latest. Whether there was one."""
        own, beyond = self.sources[0].tokens, after + found.tokens
        following = [
            [tokens[place] if place < len(tokens) else beyond[place - len(own)] for place in places]
            for tokens, places in groups
        ]
        counts: dict[int, int] = {}
        for each in following:
            for token in each:
                counts[token] = counts.get(token, 0) + 1
        if not counts:
            return False
        best = max(counts, key=counts.__getitem__)
        if not self._may_say(best):
            return False
        found.tokens.append(best)
        found.classes.append(class_of(longest + len(found) - 1, counts[best], sum(counts.values())))
        for (_, places), tokens in zip(groups, following, strict=True):
            places[:] = [place + 1 for place, token in zip(places, tokens, strict=True) if token == best]
        return True

    def _may_say(self, token: int) -> bool:
        return token >= 0 and token not in self.never and (self.vocab_size is None or token < self.vocab_size)
