"""How often what was looked up was right, by what it rested on: `LookupRates`, and in one text `TextRates`.

The target's own text says so for every token that could have been looked up, whether it was proposed or not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

LENGTHS = (3, 4, 5, 7, 10, 15, 25)  # of matches, where classes begin; the first class has 2
LONGEST = 64
SHARES = 4  # fewer than half of the places agree, at least half, there is one place, there are several and all agree
NUM_CLASSES = (len(LENGTHS) + 1) * SHARES

# Before anything is known: log-odds by the class of length and of share. They count as so many tokens.
PRIOR_OF_LENGTH = (-1.0, 0.5)  # of the first class, and what each further one adds
PRIOR_OF_SHARE = (-0.7, 0.0, 0.3, 0.8)
PRIOR_COUNT = 6.0
MOST_COUNTED = 400.0  # tokens of a class; of more, older ones fade
OF_TEXT = 0.97  # what is left, a token later, of a token's weight in how the text at hand differs
TEXT_PRIOR = 2.0

_CLASS_OF_LENGTH = [bisect_right(LENGTHS, length) * SHARES for length in range(LONGEST + 1)]


def class_of(length: int, count: int, total: int) -> int:
    """The class of a candidate.

    Example: a match of 5 tokens, after which 3 of 4 places go on like this, is in class 3 * 4 + 1 = 13.

    Args:
        length: tokens that match.
        count: places that go on with the candidate.
        total: places.
    """
    share = (2 if total == 1 else 3) if count == total else int(2 * count >= total)
    return _CLASS_OF_LENGTH[min(length, LONGEST)] + share


class LookupRates:
    """What is known of candidates by class, in whatever text.

    Attributes:
        right, judged: by class, tokens; older ones fade.
    """

    def __init__(self) -> None:
        first, further = PRIOR_OF_LENGTH
        classes = [first + further * length + share for length in range(len(LENGTHS) + 1) for share in PRIOR_OF_SHARE]
        self._prior = [_sigmoid(each) for each in classes]
        self.right, self.judged = [0.0] * NUM_CLASSES, [0.0] * NUM_CLASSES

    def usual(self, of: int) -> float:
        """The chance that a candidate of this class is right."""
        return (self.right[of] + PRIOR_COUNT * self._prior[of]) / (self.judged[of] + PRIOR_COUNT)

    def observe(self, of: int, was_right: bool) -> None:
        """Take note of what a token was for which one of this class could have been looked up."""
        if self.judged[of] >= MOST_COUNTED:
            self.judged[of] *= 0.5
            self.right[of] *= 0.5
        self.judged[of] += 1.0
        self.right[of] += was_right


class TextRates:
    """The same for one text, in which all of them may be right more often than usual, or less.

    Args:
        rates: what is usual, which learns from this text, too.
    """

    def __init__(self, rates: LookupRates) -> None:
        self.rates = rates
        self._right = self._expected = self._count = self._shift = 0.0

    def estimates(self, classes: Sequence[int]) -> list[float]:
        """The chance that each of these candidates is right, if those before it are."""
        return [_sigmoid(_log_odds(self.rates.usual(each)) + self._shift) for each in classes]

    def observe(self, of: int, was_right: bool) -> None:
        """As `LookupRates.observe`."""
        self._right = OF_TEXT * self._right + was_right
        self._expected = OF_TEXT * self._expected + self.rates.usual(of)
        self._count = OF_TEXT * self._count + 1.0
        self.rates.observe(of, was_right)
        right, wrong = self._right + TEXT_PRIOR, self._count - self._right + TEXT_PRIOR
        as_usual, not_as_usual = self._expected + TEXT_PRIOR, self._count - self._expected + TEXT_PRIOR
        self._shift = math.log(right / wrong * not_as_usual / as_usual)


def _log_odds(probability: float) -> float:
    return math.log(probability / (1.0 - probability))


def _sigmoid(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
