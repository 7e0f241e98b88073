"""How often what was looked up was right, by what it rested on: `LookupRates`, and in one text `TextRates`.

The target's own text says so for every token that could have been looked up, whether it was proposed or not.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

LENGTHS = (2, 3, 4, 5, 7, 10, 15, 25)  # of matches, where classes begin; the first class has 1
LONGEST = 64
SHARES = 4  # fewer than half of the places agree, at least half, there is one place, there are several and all agree
NUM_CLASSES = (len(LENGTHS) + 1) * SHARES

# Before anything is known: log-odds by the class of length and of share. They count as so many tokens.
PRIOR_OF_LENGTH = (-0.9, 0.5)  # of the first class, and what each further one adds
PRIOR_OF_SHARE = (-1.0, -0.6, 0.0, 0.2)
PRIOR_COUNT = 6.0
MOST_COUNTED = 400.0  # tokens of a class; of more, older ones fade
OF_TEXT = 0.97  # what is left, a token later, of a token's weight in how the text at hand differs
TEXT_PRIOR = 2.0

_CLASS_OF_LENGTH = [bisect_right(LENGTHS, length) * SHARES for length in range(LONGEST + 1)]


def classes_of(lengths: range, agree: int, total: int) -> list[int]:
    """The classes of candidates that follow one another.

    Example: after matches of 5 and 6 tokens, where 3 of 4 places go on like this, they are 4 * 4 + 1 = 17, twice.

    Args:
        lengths: tokens that match, for each of them.
        agree: places that go on with them.
        total: places.
    """
    share = (2 if total == 1 else 3) if agree == total else int(2 * agree >= total)
    return [_CLASS_OF_LENGTH[min(length, LONGEST)] + share for length in lengths]


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

    def odds(self, of: int) -> float:
        """Of a candidate of this class to be right."""
        right, wrong, prior = self.right[of], self.judged[of] - self.right[of], self._prior[of]
        return (right + PRIOR_COUNT * prior) / (wrong + PRIOR_COUNT * (1.0 - prior))

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
        self._right = self._expected = self._count = 0.0
        self._factor = 1.0  # of odds, by which this text differs

    def estimates(self, classes: Sequence[int]) -> list[float]:
        """The chance that each of these candidates is right, if those before it are."""
        odds = [self.rates.odds(each) * self._factor for each in classes]
        return [each / (1.0 + each) for each in odds]

    def observe(self, of: int, was_right: bool) -> None:
        """As `LookupRates.observe`."""
        self._right = OF_TEXT * self._right + was_right
        odds = self.rates.odds(of)
        self._expected = OF_TEXT * self._expected + odds / (1.0 + odds)
        self._count = OF_TEXT * self._count + 1.0
        self.rates.observe(of, was_right)
        right, wrong = self._right + TEXT_PRIOR, self._count - self._right + TEXT_PRIOR
        as_usual, not_as_usual = self._expected + TEXT_PRIOR, self._count - self._expected + TEXT_PRIOR
        self._factor = right / wrong * not_as_usual / as_usual


def _sigmoid(log_odds: float) -> float:
    return 1.0 / (1.0 + math.exp(-log_odds))
