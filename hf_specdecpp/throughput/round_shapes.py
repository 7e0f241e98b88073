"""The choice among the shapes of captured rounds, each of which has its own CUDA graphs: `choose_shape` before a round,
`record_round` after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from math import inf
from operator import mul
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from hf_specdecpp.cuda_graphs.captured_draft import RoundShape
from hf_specdecpp.estimation.estimators import AcceptanceRates
from hf_specdecpp.estimation.ledger import RECENT, Ledger
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.trees.tree import DraftTree

CHAINS = (0, 1, 3, 5, 7, 11, 15)
LOOKUPS = (3, 7, 15, 31)  # looked-up candidates: passes of 4, 8, 16 and 32 tokens
TREES = (RoundShape(5, 3), RoundShape(6, 5))  # passes of 16 and of 31 tokens
TIMED = (0, 3, 7)  # candidates of chains that are timed before the first choice; the seconds of others are interpolated
FIRST = 5  # candidates of the first rounds, if a rule ends chains
FOLLOWS = 0.2  # weight of the latest round in the expected chain length
KEPT = 31  # rounds of a shape in its median
PROBES = 16, 1024  # rounds until the next probe, at first and at most
PROBED = 12, 4  # rounds of a probe of a tree, first and later; the very first captures
SPARE = 8  # room for tokens of rounds without candidates, which the draft reads later


def chains_up_to(most: int) -> list[RoundShape]:
    """Shapes of chains of at most `most` candidates: those of `CHAINS`, with 0, and `most` itself (at most 15)."""
    return [RoundShape(count) for count in sorted({each for each in CHAINS if each <= most} | {min(most, CHAINS[-1])})]


def lookups_up_to(most: int) -> list[RoundShape]:
    """Shapes of chains of at most `most` looked-up candidates: those of `LOOKUPS`, and `most` itself (at most 31)."""
    counts = {each for each in LOOKUPS if each <= most} | {min(most, LOOKUPS[-1])}
    return [RoundShape(0, given=count) for count in sorted(counts)]


class RoundSeconds:
    """Seconds of a round of each shape on a device: medians of the latest rounds, interpolated for drafted chains and
    for looked-up ones.

    Example: chains of 0, 3 and 7 candidates took 4, 5 and 7 ms; 6 ms are expected for 5 candidates, 10 for 14."""

    def __init__(self) -> None:
        self._taken: dict[RoundShape, deque[float]] = {}
        self._typical: dict[RoundShape, float] = {}

    def record_round(self, shape: RoundShape, seconds: float) -> None:
        taken = self._taken.setdefault(shape, deque(maxlen=KEPT))
        taken.append(seconds)
        self._typical[shape] = median(taken)

    def time(self, shapes: Iterable[RoundShape], run: Callable[[RoundShape], float]) -> None:
        """Time those `shapes` that are chains of `TIMED` lengths without a time. `run`: runs one, returns seconds."""
        for shape in shapes:
            if shape.width == 1 and shape.nodes in TIMED and shape not in self._typical:
                self.record_round(shape, run(shape))

    def of(self, shape: RoundShape) -> float:
        """Return the expected seconds of a round of this shape; infinite for trees that have not run."""
        if shape in self._typical or shape.width > 1:
            return self._typical.get(shape, inf)
        chains = (each for each in self._typical if each.width == 1)
        alike = (each for each in chains if not each.nodes or (each.given > 0) == (shape.given > 0))
        nodes, seconds = zip(*sorted((each.nodes, self._typical[each]) for each in alike), strict=True)
        slope = max((seconds[-1] - seconds[0]) / max(nodes[-1] - nodes[0], 1), 0.0)
        further = max(shape.nodes - nodes[-1], 0)  # than the longest known one
        return float(np.interp(shape.nodes, nodes, seconds)) + slope * further


class RuleShapes:
    """Chooses for a stopping rule the shortest chain longer than the average round; with one shape, always this one. If
    at least half of the sequences should look up candidates (`LookingUp.count_alone`), all do.

    Example: if the rule stops after 2.3 candidates on average, chains of 3; after some rounds without a stop, of 5."""

    def __init__(self, shapes: Sequence[RoundShape]) -> None:
        self.shapes, self.given = _by_origin(shapes)
        self._expected = float(min(FIRST, self.shapes[-1].levels) - 1)

    def choose_shape(self, lookups: Sequence[LookingUp] = ()) -> RoundShape:
        """Return the shape of the next round. `lookups`: of each sequence, or none."""
        counts = sorted(each.count_alone() for each in lookups)
        if counts and (count := counts[len(counts) // 2]):
            return next((shape for shape in self.given if shape.given >= count), self.given[-1])
        return next((shape for shape in self.shapes if shape.levels > self._expected), self.shapes[-1])

    def record_round(self, shape: RoundShape, reports: Sequence[Any]) -> None:
        """Update the average length of rounds with a `cuda_graphs.captured_rounds.RoundReport` of each sequence."""
        if len(self.shapes) > 1 and not shape.given:
            submitted = max(len(each.tree) for each in reports)
            reached = submitted + 1 if submitted == shape.levels else submitted
            self._expected += FOLLOWS * (reached - self._expected)


class FastestShapes:
    """Chooses for `rule="throughput"` the shape with the most expected tokens per second.

    The tokens of a chain follow from `rates`. Those of a tree are the tokens of a chain of its depth, times the gain of
    the tree in its own rounds: its tokens divided by those of its first branch, the chain that would have been drafted.
    Looked-up candidates are preferred if more tokens per second are expected of them, by their estimates in this round.
    Another shape is probed after 16 rounds, then after 32, 64, ..., at most 1024 further ones: trees in turn, and the
    shortest chain if the best shape has no candidates.

    Example: rounds of a tree of five levels generated 4.5 tokens, their first branches alone 3.6. A chain of five is
    expected to generate 2.8 tokens now, so the tree is expected to generate 4.5 / 3.6 * 2.8 = 3.5.

    Attributes:
        shapes, given: the shapes of drafted and of looked-up rounds, each by size.
        rates: acceptance of the chains of a sequence; set before each sequence.
        gains: for each shape of a tree a ledger whose `rate` is this gain (seconds are tokens of first branches).
    """

    rates: AcceptanceRates

    def __init__(self, shapes: Sequence[RoundShape]) -> None:
        self.shapes, self.given = _by_origin(shapes)
        self.seconds, self.gains = RoundSeconds(), dict[RoundShape, Ledger]()
        self._trees = [shape for shape in shapes if shape.width > 1]
        self._deepest = max(shape.levels for shape in shapes)
        self._probing: list[RoundShape] = []
        self._since, self._until_probe, self._next_tree = 0, PROBES[0], 0

    def choose_shape(self, lookups: Sequence[LookingUp] = ()) -> RoundShape:
        if any(each.estimates for each in lookups):
            looked_up = partial(self._rate_of_lookups, lookups)
            if looked_up(best := max(self.given, key=looked_up)) > max(map(self._expected_rate, self.shapes)):
                return best
        if not self._probing:
            self._probing = [best := max(self.shapes, key=self._expected_rate)]
            self._since += 1
            if self._since >= self._until_probe and len(self.shapes) > 1:
                self._since, self._until_probe = 0, min(2 * self._until_probe, PROBES[1])
                self._probing = self._probe(best) or self._probing
        return self._probing.pop()

    def _expected_rate(self, shape: RoundShape) -> float:
        """Expected tokens per second of rounds of this shape."""
        tokens = self.rates.expected_tokens(self._deepest)[shape.levels]
        gain = self.gains[shape].rate if shape in self.gains else 1.0
        return float(tokens) * gain / self.seconds.of(shape)

    def _rate_of_lookups(self, lookups: Sequence[LookingUp], shape: RoundShape) -> float:
        """Expected tokens per second of a sequence, if all sequences look up as many candidates as `shape` has."""
        tokens = sum(sum(accumulate(each.estimates[: shape.given], mul, initial=1.0)) for each in lookups)
        return tokens / len(lookups) / self.seconds.of(shape)

    def _probe(self, best: RoundShape) -> list[RoundShape]:
        """The shapes of the next rounds, which probe another shape than the best; empty if there is none."""
        chains = [shape for shape in self.shapes if shape.width == 1 and shape.levels]
        options = [*self._trees, *([] if best.levels or not chains else chains[:1])]
        options = [shape for shape in options if shape != best]
        if not options:
            return []
        self._next_tree += 1
        shape = options[self._next_tree % len(options)]
        return [shape] * (PROBED[shape in self.gains] if shape.width > 1 else 1)

    def record_round(self, shape: RoundShape, reports: Sequence[Any]) -> None:
        if not shape.levels:
            return
        firsts = [first_branch(each.tree, each.path) for each in reports]
        for each, first in zip(reports, firsts, strict=True):
            self.rates.record_chain(each.estimates, min(len(each.tree), shape.levels), first)
        if shape.width > 1:
            of_all = self.gains.setdefault(shape, Ledger(RECENT, trusted=0.0))
            of_all.record_round(sum(len(each.path) + 1 for each in reports), sum(firsts) + len(reports))


def _by_origin(shapes: Sequence[RoundShape]) -> tuple[list[RoundShape], list[RoundShape]]:
    """The shapes of rounds with drafted candidates, and those of rounds with looked-up candidates."""
    return [shape for shape in shapes if not shape.given], [shape for shape in shapes if shape.given]


ShapeChooser: TypeAlias = RuleShapes | FastestShapes


def first_branch(tree: DraftTree, path: Sequence[int]) -> int:
    """Number of accepted nodes (`path`) on the branch of first children, the chain that would have been drafted."""
    return next((place for place, node in enumerate(path) if tree.ranks[node]), len(path))
