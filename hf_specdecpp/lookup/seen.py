"""Text that was seen before, and the places in it that match the end of a text (`Seen`); earlier answers (`Answers`).

Where one or two tokens stood before is found in a dictionary; longer matches grow from shorter ones, a token at a time.
So reading a token and finding all that matches after it take a few microseconds, however long the text is.
"""

from __future__ import annotations

import json
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path

from hf_specdecpp.files import read_json, save_text

MOST_MATCHES = 64  # the latest
MOST_SINGLE = 4  # the same of matches of one token, which are looked at where there are no others
NOTHING = -1  # no token: it stands between texts
MOST_ID = 1 << 31

# The last token of each earlier place that matches the end of a text, and how many tokens match; the latest first.
Matches = dict[int, int]


class Seen:
    """Tokens in order, and where each of them and each pair of them stood.

    Example: in 5 6 7 8 5 6 7 the last token matches place 2, by three tokens; what followed there is 8.

    Attributes:
        tokens: all of them.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("i")
        self._latest: dict[int, int] = {}  # place of a token, by itself, and of the second one of a pair, by `_pair`
        # By place: where the same token, and the same pair, ended before, or -1.
        self._earlier, self._earlier_pair = array("i"), array("i")
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Read a token."""
        place, latest = len(self.tokens), self._latest
        pair = _pair(self.tokens[-1] if place else NOTHING, token)
        self._earlier.append(latest.get(token, -1))
        self._earlier_pair.append(latest.get(pair, -1))
        latest[token] = latest[pair] = place
        self.tokens.append(token)

    def matches(self, last: int, token: int, before: Matches) -> Matches:
        """What matches the end of a text once `token` follows `last`; `before` is what matched there."""
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
    """Two tokens as one number, which is no token itself."""
    return (last + 2) * MOST_ID + token


class Answers:
    """Earlier answers, which lookups may search, too. Kept in memory only, unless they are saved.

    Args:
        most (tokens): the oldest answers go when there are more.

    Attributes:
        seen: all of them, `NOTHING` after each.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.clear()

    def __len__(self) -> int:
        """Tokens."""
        return len(self.seen)

    def clear(self) -> None:
        """Forget them."""
        self._answers: deque[Sequence[int]] = deque()
        self.seen = Seen()

    def add(self, answer: Sequence[int]) -> None:
        """Remember one, of which the last `most` tokens count."""
        if not (answer := list(answer)[-max(self.most - 1, 0) :]) or self.most < 1:
            return
        self._answers.append(array("i", answer))
        self.seen.extend((*answer, NOTHING))
        if len(self.seen) > self.most:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Down to half of the room, so that this is seldom: all others are read again."""
        kept = sum(len(answer) + 1 for answer in self._answers)
        while len(self._answers) > 1 and kept > self.most // 2:
            kept -= len(self._answers.popleft()) + 1
        self.seen = Seen()
        for answer in self._answers:
            self.seen.extend((*answer, NOTHING))

    def save(self, file: str | Path) -> None:
        """Write them as JSON."""
        save_text(json.dumps({"answers": [list(answer) for answer in self._answers]}), Path(file))

    def load(self, file: str | Path) -> None:
        """Add those of a file.

        Raises:
            ValueError: it holds no answers.
        """
        found = read_json(Path(file))
        answers = found.get("answers") if isinstance(found, dict) else None
        if not isinstance(answers, list) or not all(map(_is_answer, answers)):
            raise ValueError(f"{file} holds no answers: a list of lists of token ids. It was not written by save().")
        for answer in answers:
            self.add(answer)


def _is_answer(answer: object) -> bool:
    return isinstance(answer, list) and all(isinstance(token, int) and 0 <= token < MOST_ID for token in answer)
