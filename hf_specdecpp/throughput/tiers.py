"""Which shape captured rounds have (`Tiers`): few of them, each captured by itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Protocol

import numpy as np

from hf_specdecpp.drafting.captured_draft import RoundShape
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates

CHAINS = (0, 1, 3, 5, 7, 11, 15)
TREES = (RoundShape(5, 3), RoundShape(6, 5))  # passes of 16 and of 31 tokens
TIMED = (0, 3, 7)  # whose rounds are timed before the first choice; a chain's seconds grow evenly between them
FIRST = 5  # candidates of a rule's first rounds
FOLLOWS = 0.2  # weight of a round in what is expected of the next
KEPT = 31  # rounds whose seconds are remembered
PROBES = 16, 1024  # rounds without a probe until one is made, at first and at most: each costs half a round more
PROBED = 4  # rounds of a shape of trees in a row, of which the first is captured and the others are timed
SPARE = 8  # tokens of rounds without candidates, until the draft reads them


def chains_up_to(most: int) -> list[RoundShape]:
    """Those that may be chosen, the longest of them `most` itself where it lies between two."""
    return [RoundShape(count) for count in sorted({each for each in CHAINS if each <= most} | {min(most, CHAINS[-1])})]


class RoundSeconds:
    """What rounds of each shape take on a device, by what they took: medians of the latest.

    Example: chains of 0, 3 and 7 candidates took 4, 5 and 7 ms, so one of 5 is expected to take 6, one of 11 9.
    """

    def __init__(self) -> None:
        self._taken: dict[RoundShape, deque[float]] = {}
        self._typical: dict[RoundShape, float] = {}

    def note(self, shape: RoundShape, seconds: float) -> None:
        taken = self._taken.setdefault(shape, deque(maxlen=KEPT))
        taken.append(seconds)
        self._typical[shape] = median(taken)

    def time(self, shapes: Sequence[RoundShape], run: Callable[[RoundShape], float]) -> None:
        """Time rounds that are not known and of which others follow."""
        for shape in shapes:
            if shape.width == 1 and shape.levels in TIMED and shape not in self._typical:
                self.note(shape, run(shape))

    def of(self, shapes: Sequence[RoundShape]) -> np.ndarray:
        """Seconds of a round of each shape; infinite for trees that were not tried."""
        known = sorted(shape.levels for shape in self._typical if shape.width == 1)
        seconds = [self._typical[RoundShape(levels)] for levels in known]
        most = max(shape.levels for shape in shapes)
        if len(known) > 1 and most > known[-1]:
            slope = max((seconds[-1] - seconds[0]) / (known[-1] - known[0]), 0.0)
            known, seconds = [*known, most], [*seconds, seconds[-1] + slope * (most - known[-1])]
        chains = np.interp([shape.levels for shape in shapes], known, seconds)
        trees = [self._typical.get(shape, np.inf) for shape in shapes]
        return np.where([shape.width == 1 for shape in shapes], chains, trees)


class Tiers(Protocol):
    """Chooses the shape of the next round by what earlier ones brought.

    Attributes:
        shapes: that it may choose, chains by their length, then trees.
    """

    shapes: list[RoundShape]

    def next(self) -> RoundShape:
        """Of the next round."""

    def note(self, shape: RoundShape, submitted: int, tokens: float) -> None:
        """Told how many candidates a round submitted, and what it brought."""


class Always:
    """One shape."""

    def __init__(self, shape: RoundShape) -> None:
        self.shapes = [shape]

    def next(self) -> RoundShape:
        return self.shapes[0]

    def note(self, shape: RoundShape, submitted: int, tokens: float) -> None:
        """Nothing follows from it."""


class Followed:
    """For a rule that ends rounds by itself: the shortest chain that it mostly does not reach.

    Example: the rule stops after 2, 3 and 2 candidates: rounds of 3. It does not stop within 3: rounds of 5, then of 7.
    """

    def __init__(self, shapes: list[RoundShape]) -> None:
        self.shapes = shapes
        self._expected = float(min(FIRST, shapes[-1].levels) - 1)

    def next(self) -> RoundShape:
        return next((shape for shape in self.shapes if shape.levels > self._expected), self.shapes[-1])

    def note(self, shape: RoundShape, submitted: int, tokens: float) -> None:  # noqa: ARG002
        reached = submitted + 1 if submitted == shape.levels else submitted
        self._expected += FOLLOWS * (reached - self._expected)


class MostTokens:
    """`rule="throughput"`: the shape that promises most tokens a second, by what was accepted and what rounds take.

    A chain promises what is known of estimates, a tree what its rounds brought lately. What has not been tried for long
    is tried now and then, ever more seldom, since a text may change: trees one after the other, and a chain where
    nothing is drafted.

    Attributes:
        rates: what is known of the estimates of a text's chains; set before each.
        gains: of shapes of trees, tokens of a round lately.
    """

    rates: AcceptanceRates

    def __init__(self, shapes: list[RoundShape], seconds: RoundSeconds) -> None:
        self.shapes, self.seconds = shapes, seconds
        self.gains: dict[RoundShape, float] = {}
        self._trees = [shape for shape in shapes if shape.width > 1]
        self._probing: list[RoundShape] = []
        self._since, self._until_probe, self._next_tree = 0, PROBES[0], 0

    def next(self) -> RoundShape:
        if self._probing:
            return self._probing.pop()
        best = self.shapes[int(self._promised().argmax())]
        self._since += 1
        if self._since >= self._until_probe and len(self.shapes) > 1:
            self._since, self._until_probe = 0, min(2 * self._until_probe, PROBES[1])
            self._probing = self._probe(best)
            return self._probing.pop() if self._probing else best
        return best

    def _promised(self) -> np.ndarray:
        """Tokens a second of each shape."""
        known = self.rates.expected_tokens(max(shape.levels for shape in self.shapes))
        tokens = [known[shape.levels] if shape.width == 1 else self.gains.get(shape, 0.0) for shape in self.shapes]
        return np.array(tokens) / self.seconds.of(self.shapes)

    def _probe(self, best: RoundShape) -> list[RoundShape]:
        """Rounds to try something else than the best."""
        chains = [shape for shape in self.shapes if shape.width == 1 and shape.levels]
        options = [*self._trees, *([] if best.levels or not chains else chains[:1])]
        options = [shape for shape in options if shape != best]
        if not options:
            return []
        self._next_tree += 1
        shape = options[self._next_tree % len(options)]
        return [shape] * (PROBED if shape.width > 1 else 1)

    def note(self, shape: RoundShape, submitted: int, tokens: float) -> None:  # noqa: ARG002
        """Of chains nothing: `rates` are told of them."""
        if shape.width > 1:
            known = self.gains.get(shape, tokens)
            self.gains[shape] = known + FOLLOWS * (tokens - known)
