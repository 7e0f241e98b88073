"""Earlier text and its matches with the end of a sequence (`TokenIndex`), also in earlier answers (`Answers`); the
continuation at such matches (`TextLookup`), and how often continuations were right, by class (`LookupRates`, for one
sequence `TextRates`): every emitted token shows whether the token looked up there was right.

A dictionary finds earlier places of one or two tokens; longer matches grow from shorter ones, token by token. So
reading a token and finding all its matches takes a few microseconds, however long the text is."""

from __future__ import annotations

import json
import math
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from hf_specdecpp.files import read_json, save_text

LENGTHS = (2, 3, 4, 5, 7, 10, 15, 25)  # match lengths at which a new class begins; matches of 1 token are class 0
SHARES = 4  # classes: 0 less than half of the places agree, 1 at least half, 2 there is one place, 3 several, all agree
NUM_CLASSES = (len(LENGTHS) + 1) * SHARES

# Prior log-odds by class of length and of share, which count as `PRIOR_COUNT` judged candidates.
PRIOR_OF_LENGTH = (-0.9, 0.5)  # of the first class, and the step to each further one
PRIOR_OF_SHARE = (-1.0, -0.6, 0.0, 0.2)
PRIOR_COUNT = 6.0
MOST_COUNTED = 400.0  # judged candidates of a class at which its counts are halved
OF_TEXT = 0.97  # factor of earlier counts in `TextRates` at each token
TEXT_PRIOR = 2.0  # right candidates, and wrong ones, that `TextRates` assumes at first


def classes_of(lengths: range, agree: int, total: int) -> list[int]:
    """The classes of consecutive candidates after matches of these `lengths`, if `agree` of `total` places continue
    with them.

    Example: after matches of 5 and 6 tokens, if 3 of 4 places agree, they are 4 * 4 + 1 = 17, twice."""
    share = (2 if total == 1 else 3) if agree == total else int(2 * agree >= total)
    return [bisect_right(LENGTHS, length) * SHARES + share for length in lengths]


class LookupRates:
    """Number of right and of judged candidates by class, in all sequences; older ones fade.

    Attributes:
        odds: for each class, the odds that a candidate is right.
    """

    def __init__(self) -> None:
        first, further = PRIOR_OF_LENGTH
        classes = [first + further * length + share for length in range(len(LENGTHS) + 1) for share in PRIOR_OF_SHARE]
        self.odds = [math.exp(each) for each in classes]
        self._prior = [odds / (1.0 + odds) for odds in self.odds]
        self.right, self.judged = [0.0] * NUM_CLASSES, [0.0] * NUM_CLASSES

    def record(self, of: int, was_right: bool) -> None:
        """Record whether a candidate of class `of` was, or would have been, right."""
        if self.judged[of] >= MOST_COUNTED:
            self.judged[of] *= 0.5
            self.right[of] *= 0.5
        self.judged[of] += 1.0
        self.right[of] += was_right
        right, wrong, prior = self.right[of], self.judged[of] - self.right[of], self._prior[of]
        self.odds[of] = (right + PRIOR_COUNT * prior) / (wrong + PRIOR_COUNT * (1.0 - prior))


class TextRates:
    """Estimates for one sequence, in which lookups may be right more or less often than usual. `record` also updates
    the common `rates`."""

    def __init__(self, rates: LookupRates) -> None:
        self.rates = rates
        self._right = self._expected = self._count = 0.0
        self._factor = 1.0  # of odds, relative to other sequences

    def estimates(self, classes: Sequence[int]) -> list[float]:
        """The probability that each of these candidates is right, if those before it are."""
        known, factor = self.rates.odds, self._factor
        return [(odds := known[each] * factor) / (1.0 + odds) for each in classes]

    def record(self, of: int, was_right: bool) -> None:
        self._right = OF_TEXT * self._right + was_right
        odds = self.rates.odds[of]
        self._expected = OF_TEXT * self._expected + odds / (1.0 + odds)
        self._count = OF_TEXT * self._count + 1.0
        self.rates.record(of, was_right)
        right, wrong = self._right + TEXT_PRIOR, self._count - self._right + TEXT_PRIOR
        as_usual, not_as_usual = self._expected + TEXT_PRIOR, self._count - self._expected + TEXT_PRIOR
        self._factor = right / wrong * not_as_usual / as_usual


MOST_MATCHES = 64  # number of matches that are used, the latest
MOST_SINGLE = 4  # the same for matches of one token, which are used if there are no others
NOTHING = -1  # no token: separates sequences
MOST_ID = 1 << 31  # all token ids are smaller

# Index of the last token of each earlier match with the end of a sequence, and its number of tokens; latest first.
Matches = dict[int, int]


class TokenIndex:
    """Tokens in order, with the earlier places of each token and of each pair, which `matches` compares with the end of
    this or of another sequence.

    Example: in 5 6 7 8 5 6 7 the last token matches place 2, by three tokens; the token after that place is 8."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._latest: dict[int, int] = {}  # latest place of each token, and of the second of each pair (key: `_pair`)
        # By place: where the same token, and the same pair, ended before, or -1.
        self._earlier, self._earlier_pair = array("i"), array("i")
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        place, latest = len(self.tokens), self._latest
        pair = _pair(self.tokens[-1] if place else NOTHING, token)
        self._earlier.append(latest.get(token, -1))
        self._earlier_pair.append(latest.get(pair, -1))
        latest[token] = latest[pair] = place
        self.tokens.append(token)

    def matches(self, last: int, token: int, before: Matches) -> Matches:
        """Matches with a sequence that ends with `last` and `token`. `before`: those before `token` was added."""
        place, earlier = self._latest.get(_pair(last, token), -1), self._earlier_pair
        found: Matches = {}
        while place >= 0 and len(found) < MOST_MATCHES:
            found[place] = before.get(place - 1, 1) + 1
            place = earlier[place]
        if not found:
            place, earlier = self._latest.get(token, -1), self._earlier
            while place >= 0 and len(found) < MOST_SINGLE:
                found[place] = 1
                place = earlier[place]
        return found


def _pair(last: int, token: int) -> int:
    """A pair of tokens as one number, larger than any token id."""
    return (last + 2) * MOST_ID + token


class Answers:
    """Earlier answers, which lookups may search. Kept in memory only, unless saved.

    Args:
        most: maximum number of tokens; if there are more, the oldest answers are dropped.

    Attributes:
        seen: all answers one after another, `NOTHING` after each.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.clear()

    def clear(self) -> None:
        self.seen = TokenIndex()

    def add(self, answer: Sequence[int]) -> None:
        """Add an answer, of which at most the last `most - 1` tokens are kept."""
        if not (answer := list(answer)[-max(self.most - 1, 0) :]) or self.most < 1:
            return
        self.seen.extend((*answer, NOTHING))
        if (count := len(self.seen)) > self.most:
            # Down to half of the limit, so that this is rare: all other answers are indexed again.
            tokens = self.seen.tokens
            begins = [0, *(place + 1 for place, token in enumerate(tokens) if token == NOTHING)][:-1]  # of the answers
            first = next((each for each in begins if count - each <= self.most // 2), begins[-1])
            self.seen = TokenIndex(tokens[first:])

    def save(self, file: str | Path) -> None:
        """Write all answers as JSON."""
        answers = [list(each) for is_end, each in groupby(self.seen.tokens, NOTHING.__eq__) if not is_end]
        save_text(json.dumps({"answers": answers}), Path(file))

    def load(self, file: str | Path) -> None:
        """Add the answers in a file of `save`; `ValueError` if the file has another form."""
        found = read_json(Path(file))
        answers: Any = found.get("answers") if isinstance(found, dict) else None
        is_list = isinstance(answers, list) and all(isinstance(answer, list) for answer in answers)
        if not is_list or not all(isinstance(each, int) and 0 <= each < MOST_ID for one in answers for each in one):
            raise ValueError(f"{file} holds no answers: a list of lists of token ids. It was not written by save().")
        for answer in answers:
            self.add(answer)


CONTEXT = 64  # number of tokens at the prompt's end that are matched with earlier text
EQUAL = 8  # matches of this many tokens and more count as equally good


@dataclass
class Continuation:
    """Candidates that are expected after a sequence, each after the earlier ones, and their classes (`classes_of`)."""

    tokens: list[int] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.tokens)


class TextLookup:
    """A growing sequence, and its expected continuation from earlier text.

    Example: in 5 6 7 8 9 5 6 7 8 5 6 the final 5 6 occurs twice earlier: at first it is followed by 7 8 9, later by 7 8
    5. Both agree on 7 and 8; of 9 and 5, the later one is taken. So the continuation starts with 7 8 5.

    Args:
        never: ids that are not proposed; a continuation ends before them.
        vocab_size: ids from here on are not proposed either.
        earlier: other text that is searched, too (`Answers.seen`).
    """

    def __init__(
        self, never: Collection[int] = (), vocab_size: int | None = None, earlier: TokenIndex | None = None
    ) -> None:
        self.never, self.vocab_size = frozenset(never), MOST_ID if vocab_size is None else vocab_size
        self.sources = [TokenIndex()] if earlier is None or not len(earlier) else [TokenIndex(), earlier]
        self._matches: list[Matches] = [{} for _ in self.sources]

    def __len__(self) -> int:
        return len(self.sources[0])

    def read_prompt(self, tokens: Sequence[int]) -> None:
        self.sources[0].extend(tokens[:-CONTEXT])
        for token in tokens[-CONTEXT:]:
            self.read(token)

    def read(self, token: int) -> None:
        self._matches = self._after((token,))
        self.sources[0].append(token)

    def ahead(self, most: int, after: Sequence[int] = ()) -> Continuation:
        """At most `most` tokens that are expected after the sequence, or after the sequence followed by `after`."""
        matches = self._after(after) if after else self._matches
        if most < 1 or not any(matches):
            return Continuation()
        longest = max([length for each in matches for length in each.values()])
        alive = self._pieces(matches, min(longest, EQUAL), most, after)
        tokens: list[int] = []
        classes: list[int] = []
        while alive and (place := len(tokens)) < most:
            total = agree = len(alive)
            if total == 1 and place < len(alive[0]):
                tokens += alive[0][place:]
            else:
                # The sequence continues with the tokens found so far.
                next_ones = [each[place] if place < len(each) else tokens[place - len(each)] for each in alive]
                best = next_ones[0]
                if (agree := next_ones.count(best)) < total:
                    best = max(dict.fromkeys(next_ones), key=next_ones.count)  # of equally many the latest
                    agree = next_ones.count(best)
                    alive = [each for each, token in zip(alive, next_ones, strict=True) if token == best]
                tokens.append(best)
            classes += classes_of(range(longest + place, longest + len(tokens)), agree, total)
        # Ends before the first token that is in `never` or not in the target's vocabulary.
        tokens = list(takewhile(lambda token: 0 <= token < self.vocab_size and token not in self.never, tokens))
        return Continuation(tokens, classes[: len(tokens)])

    def _pieces(self, matches: list[Matches], least: int, most: int, after: Sequence[int]) -> list[list[int]]:
        """The `most` tokens after each match of `least` tokens or more, latest first; `NOTHING` ends other text."""
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
        """The matches after `tokens` have followed the sequence."""
        matches, own = self._matches, self.sources[0].tokens
        last = own[-1] if own else NOTHING
        for token in tokens:
            matches = [seen.matches(last, token, each) for seen, each in zip(self.sources, matches, strict=True)]
            last = token
        return matches
