"""Which shape captured rounds have: few of them, each captured by itself. `next` chooses, by what `note` is told."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from hf_specdecpp.cuda_graphs.captured_draft import RoundShape
from hf_specdecpp.estimation.estimators import AcceptanceRates
from hf_specdecpp.estimation.ledger import RECENT, Ledger
from hf_specdecpp.trees.tree import DraftTree

CHAINS = (0, 1, 3, 5, 7, 11, 15)
TREES = (RoundShape(5, 3), RoundShape(6, 5))  # passes of 16 and of 31 tokens
TIMED = (0, 3, 7)  # whose rounds are timed before the first choice; a chain's seconds grow evenly between them
FIRST = 5  # candidates of a rule's first rounds
FOLLOWS = 0.2  # weight of a round in how long the next is expected to become
KEPT = 31  # rounds whose seconds are remembered
PROBES = 16, 1024  # rounds without a probe until one is made, at first and at most: each costs half a round more
PROBED = 12, 4  # rounds of a shape of trees in a row, at first and later; the very first is captured
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


class Followed:
    """For a rule that ends rounds by itself: the shortest chain that it mostly does not reach. Of one shape, that one.

    Example: the rule stops after 2, 3 and 2 candidates: rounds of 3. It does not stop within 3: rounds of 5, then of 7.
    """

    def __init__(self, shapes: list[RoundShape]) -> None:
        self.shapes = shapes
        self._expected = float(min(FIRST, shapes[-1].levels) - 1)

    def next(self) -> RoundShape:
        """Of the next round."""
        return next((shape for shape in self.shapes if shape.levels > self._expected), self.shapes[-1])

    def note(self, shape: RoundShape, reports: Sequence[Any]) -> None:
        """Told of a round: for each text a `cuda_graphs.captured_rounds.Report`."""
        if len(self.shapes) > 1:
            submitted = max(len(each.tree) for each in reports)
            reached = submitted + 1 if submitted == shape.levels else submitted
            self._expected += FOLLOWS * (reached - self._expected)


class MostTokens:
    """`rule="throughput"`: the shape that promises most tokens a second, by what was accepted and what rounds take.

    A chain promises what is known of estimates. A tree promises as many times the tokens of a chain of its depth as its
    own rounds brought: its first branch is the chain that would have been drafted, so each round says what both bring
    to the text at hand. What has not been tried for long is tried now and then, ever more seldom, since a text may
    change: trees one after the other, and a chain where nothing is drafted.

    Example: rounds of a tree five levels deep brought 4.5 tokens, the first branches alone 3.6. A chain of five is
    expected to bring 2.8 of the text at hand, so the tree promises 4.5 / 3.6 * 2.8 = 3.5.

    Attributes:
        rates: what is known of the estimates of a text's chains; set before each.
        gains: by shape of a tree, tokens of its rounds, and of their first branches in the place of seconds.
    """

    rates: AcceptanceRates

    def __init__(self, shapes: list[RoundShape], seconds: RoundSeconds) -> None:
        self.shapes, self.seconds = shapes, seconds
        self.gains: dict[RoundShape, Ledger] = {}
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
        gains = np.array([self.gains[shape].rate if shape in self.gains else 1.0 for shape in self.shapes])
        tokens = known[[shape.levels for shape in self.shapes]] * gains
        promised: np.ndarray = tokens / self.seconds.of(self.shapes)
        return promised

    def _probe(self, best: RoundShape) -> list[RoundShape]:
        """Rounds to try something else than the best."""
        chains = [shape for shape in self.shapes if shape.width == 1 and shape.levels]
        options = [*self._trees, *([] if best.levels or not chains else chains[:1])]
        options = [shape for shape in options if shape != best]
        if not options:
            return []
        self._next_tree += 1
        shape = options[self._next_tree % len(options)]
        return [shape] * (PROBED[shape in self.gains] if shape.width > 1 else 1)

    def note(self, shape: RoundShape, reports: Sequence[Any]) -> None:
        if not shape.levels:
            return
        firsts = [first_branch(each.tree, each.path) for each in reports]
        for each, first in zip(reports, firsts, strict=True):
            self.rates.observe(each.estimates, min(len(each.tree), shape.levels), first)
        if shape.width > 1:
            of_all = self.gains.setdefault(shape, Ledger(RECENT, trusted=0.0))
            of_all.note(sum(len(each.path) + 1 for each in reports), sum(firsts) + len(reports))


Tiers: TypeAlias = Followed | MostTokens


def first_branch(tree: DraftTree, path: Sequence[int]) -> int:
    """How many candidates of an accepted path are on the branch of first children: a chain would have had only them."""
    return next((place for place, node in enumerate(path) if tree.ranks[node]), len(path))
