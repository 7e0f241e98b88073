"""Trees that maximise tokens a second: `rule="throughput"` with `tree="dyspec"`. Derived in `docs/throughput.md`.

The marginal node decides: each level, and each candidate, must raise the tokens expected by more than its seconds are
worth. What is expected is learned from the rounds (`AcceptanceRates`) and looked up (`tree_outlook.SlotExpectations`).
Nothing here reads a clock, so with the same costs the same calls draft the same trees.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from hf_specdecpp.config.costs import Costs, Floats
from hf_specdecpp.throughput.acceptance_rates import FIRST_FITS, AcceptanceRates
from hf_specdecpp.throughput.exploration import LEAST_GAIN, ExplorationBudget
from hf_specdecpp.throughput.tree_expectations import LEVELS, PLACES, RATIO, SlotExpectations, row_of
from hf_specdecpp.trees.algorithms import Step
from hf_specdecpp.trees.slots import SMALLEST, Growth, SlotValuation
from hf_specdecpp.trees.tree import DraftTree

CAUTION = 0.95  # share of the expected tokens that is counted on: what looks best of many mostly looks too good
RATE_MEMORY = 0.995  # what is left of a round's tokens and seconds a round later
FIRST_NODES = 6  # most in the first round, and twice as many in each later one: early mistakes stay small
TRUSTED = 8.0  # rounds that a promised rate counts for, before it has been seen


@dataclass(frozen=True)
class Prospect:
    """What is expected of further levels and draws.

    Attributes:
        threshold: that so many draws are expected above.
        tokens, seconds: more than without them.
    """

    levels: int
    draws: int
    threshold: float
    tokens: float
    seconds: float


class TreeThroughput(SlotValuation):
    """What the rule knows about one draft and target, and how it grows trees.

    Args:
        costs: of a round.
        most_nodes: of a tree.
        greedy: whether the target is.
        law: what earlier generations have taught.

    Attributes:
        credit: for probes, while speculation does not pay.
    """

    def __init__(self, costs: Costs, most_nodes: int, greedy: bool, law: AcceptanceRates | None = None) -> None:
        self.settings = (costs, most_nodes, greedy)
        self.costs, self.verify = costs, costs.verify_seconds(most_nodes)
        self.plain = float(self.verify[0]) + costs.overhead
        self.law, self.outlook = law or AcceptanceRates(), SlotExpectations(greedy)
        self.rounds, self.credit = 0, ExplorationBudget(self.plain)
        self.tokens = self.seconds = 0.0
        self._fit()

    @property
    def rate(self) -> float:
        """Tokens a second of the rounds that speculated, later ones counting more."""
        return self.tokens / self.seconds

    @property
    def most(self) -> int:
        """Nodes that the next tree may have."""
        return min(FIRST_NODES << min(self.rounds, 10), len(self.verify) - 1)

    @property
    def pays(self) -> bool:
        """Whether speculating beats plain decoding."""
        return self.rate * self.plain >= LEAST_GAIN

    def may_start(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        if self.pays:
            return True
        price = self.costs.read * unread + self.costs.draft + float(self.verify[1] - self.verify[0])
        return self.credit.seconds >= price

    def calibrated(self, estimate: float) -> float:
        return self.law.calibrated(estimate)

    def expected(self, last: float | None, /) -> float:
        return self.outlook.usual[row_of(last)]

    def plan(self, growth: Growth) -> Step | None:
        """The levels and size that promise most tokens, less what their seconds are worth; `None` if none do."""
        tree = growth.tree
        if len(tree) >= self.most or not (growth.leaves or growth.open):
            return None
        levels, rate = min(LEVELS, growth.max_depth - tree.passes), max(self.rate, 1.0 / self.plain)
        # Whether to start at all has been decided before.
        choice = range(tree.passes == 0, levels + 1)
        best = self._best(self.outlook.of(growth, self.law), choice, len(tree), self.most, rate)
        if best.tokens <= rate * best.seconds and tree.passes > 0:
            return None
        # Before a level t keeps room for it. In the end all slots may be filled that are worth their seconds.
        price = rate * float(self.verify[len(tree) + best.draws] - self.verify[len(tree)]) / best.draws
        return Step(best.threshold if best.levels else max(price, SMALLEST), len(tree) + best.draws, best.levels)

    def _best(self, expected: Floats, choice: range, size: int, most: int, rate: float) -> Prospect:
        """Of a choice of levels, and any number of draws, those of the most tokens - rate * seconds.

        Args:
            expected: as `SlotExpectations.of` returns it.
            size: of the tree so far.
            most: that it may have.
        """
        levels, counts = np.array(choice)[:, None], np.arange(1, most + 1 - size)
        draws, tokens, reads = expected
        places = np.stack([draws[level].searchsorted(counts) for level in choice])  # where so many draws are reached
        upper = np.minimum(places, PLACES)
        low, high = draws[levels, upper - 1], draws[levels, upper]
        share = (counts - low) / np.maximum(high - low, 1e-12)

        def at_counts(values: Floats) -> Floats:
            low, high = values[levels, upper - 1], values[levels, upper]
            return low + share * (high - low)

        gained, branches = CAUTION * at_counts(tokens), np.maximum(at_counts(reads) - levels, 0.0)
        seconds = (
            self.costs.draft * levels + self.costs.branch * branches + self.verify[size + counts] - self.verify[size]
        )
        net = np.where(places <= PLACES, gained - rate * seconds, -math.inf)
        best = np.unravel_index(int(net.argmax()), net.shape)
        threshold = math.exp(-RATIO * (int(upper[best]) - 0.5))
        return Prospect(choice[int(best[0])], int(best[1]) + 1, threshold, float(gained[best]), float(seconds[best]))

    def observe(self, tree: DraftTree, path: list[int], unread: int) -> None:
        """Learn the outcome of a round.

        Args:
            tree: of the round; without passes the round drafted nothing.
            path: the accepted nodes.
            unread: tokens that the draft read first.
        """
        if tree.passes == 0:
            self.credit.rest()
            return
        drafting = self.costs.draft * tree.passes + self.costs.branch * (len(tree.scores) - tree.passes)
        seconds = drafting + float(self.verify[len(tree)]) + self.costs.overhead
        self.credit.settle(self.pays, (len(path) + 1) * self.plain - seconds - self.costs.read * unread)
        self.tokens = RATE_MEMORY * self.tokens + len(path) + 1
        self.seconds = RATE_MEMORY * self.seconds + seconds
        for node, after in zip((0, *path), (*path, None), strict=True):
            estimates = [tree.estimates[child] for child in tree.children[node]]
            self.law.observe_siblings(estimates, None if after is None else tree.ranks[after])
        self.rounds += 1
        if self.law.due(self.rounds):
            self._fit()

    def _fit(self) -> None:
        self.law.fit()
        self.outlook.fit(self.law)
        if self.rounds <= FIRST_FITS[-1]:
            # Earlier rounds were planned for another law, and say little of the rate of those to come.
            tokens = seconds = 0.0
            for _ in range(4):  # each is at least as fast as the one before
                rate = max((1.0 + tokens) / (self.plain + seconds), 1.0 / self.plain)
                best = self._best(self.outlook.root, range(1, LEVELS + 1), 0, len(self.verify) - 1, rate)
                tokens, seconds = best.tokens, best.seconds
            self.tokens, self.seconds = TRUSTED * (1.0 + tokens), TRUSTED * (self.plain + seconds)
