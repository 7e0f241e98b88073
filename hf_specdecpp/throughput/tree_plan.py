"""The growth of trees with `rule="throughput"` (`TreePlan`). Derived in `docs/throughput.md`.

A level is read, and a candidate drawn, if its expected tokens exceed the rate (tokens per second) times its seconds."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from hf_specdecpp.config.costs import Floats
from hf_specdecpp.estimation.estimators import NO_VERDICT, PRIOR_COUNT, AcceptanceRates, bin_of
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.trees.growth import Growth
from hf_specdecpp.trees.tree import DraftTree

SHAPE_MEMORY = 0.98  # weight of a round relative to the next, in the statistics of tree shapes
FIRST_NODES = 6  # most nodes of the first tree; doubled with each round, so that early mistakes stay small
THRESHOLDS = np.exp(-0.12 * np.arange(50))  # values tried for t, relative to the best slot's gain; down to 0.003


class TreePlan(Plan):
    """The plan of trees, which also values slots (`Slots.expected`) and grows the trees.

    The gain of a slot is the expected number of tokens that a draw adds: the slot's value v times the acceptance a.

    Attributes:
        splits: learned s: a slot of value v takes about 1 + s (v a / t - 1) draws until all gains in it are below t.
        mean_estimate: learned mean of a, 0.5 before the first draws.
        limit: the most nodes in this round.
        saved: plain passes that siblings would have saved in rounds without siblings (`Slots.branches`).
        refused: the reason if a test showed that the target or the draft cannot read trees.
    """

    tries_to = 12  # the longest path of trees (`Decisions.tree_depth`)

    def __init__(self, known: KnownCosts, most: int, rates: AcceptanceRates | None = None) -> None:
        self._shape = np.array([4.0, 2.0, 4.0, 2.0])  # sums: further draws, 1 / t - 1, all draws, their a
        self.splits, self.mean_estimate = 2.0, 0.5
        self.limit, self.saved, self.refused = most, 0.0, ""
        super().__init__(known, most, rates=rates or AcceptanceRates(bin_count=PRIOR_COUNT))

    @property
    def most_now(self) -> int:
        """The most nodes of the next tree: `FIRST_NODES`, doubled with each round with candidates, up to `limit`."""
        return min(FIRST_NODES << min(self.rounds, 10), self.limit)

    def expected(self, parent: float | None, last: float | None, chance: float | None = None) -> float:
        """Expected acceptance at a slot before its draw; arguments as in `Slots`."""
        if chance is not None:
            return self.rates.calibrated(chance)
        if last is not None:
            return self._of_siblings[bin_of(last)]
        return self._of_children[NO_VERDICT if parent is None else bin_of(parent)]

    def grow(self, growth: Growth, threshold: float = 0.0) -> None:
        """Grow a tree by DySpec's Algorithm 2, or in a trial a chain. Gain and time decide its depth and t, the least
        gain of a slot at which a candidate is drawn. `threshold`: lower bound of t."""
        tree = growth.tree
        if self.trial is not None:
            while len(tree) < self.trial and growth.leaves:
                growth.expand([node := next(iter(growth.leaves))])
                growth.draw(node)
            return
        while len(tree) < self.most_now:
            level = {node: v for node, v in growth.leaves.items() if tree.depths[node] == tree.levels}
            gains = {node: v * self.expected(tree.estimates[node] if node else None, None) for node, v in level.items()}
            firsts = [(v, gains[node]) for node, v in level.items()]
            t = max(threshold, self.threshold([*firsts, *growth.slots()], len(tree)))
            # The first level was decided by `should_draft`.
            worth = {node: gain for node, gain in gains.items() if tree.levels == 0 or gain >= t}
            if not (leaves := self.reads(growth, worth) if tree.levels else list(worth)):
                break
            growth.expand(leaves)
            while len(tree) < self.most_now and growth.best >= t:
                growth.draw_best()
        while growth.best >= threshold and self.best_draws(growth.open.values(), len(tree))[0] > 0:
            growth.draw_best()
        self.saved += self.best_draws(growth.forgone, len(tree))[1] / (self.price * self.plain)
        if self.learns and not len(tree) and tree.levels and growth.best >= threshold:
            growth.draw_best()  # the draft pass is done, and without a candidate nothing would be learned

    def threshold(self, slots: Collection[tuple[float, float]], size: int) -> float:
        """Return the t with the largest net gain, tokens less the price of their seconds, of draws at all slots of gain
        t or more; infinite if no draw is worth its time.

        A draw leaves slots of value v a and v (1 - a). Until all gains are below t a slot of value v takes about 1 + s
        (v a / t - 1) draws, which add v a (1 + s log(v a / t)) tokens (renewal theory; s = `splits`, and a is
        `mean_estimate` for the draws after the first).

        Args:
            slots: value and gain of each slot.
            size: nodes of the tree so far.
        """
        if not slots:
            return math.inf
        v, gain = np.array(slots).T[:, :, None]
        t = gain.max() * THRESHOLDS
        drawn, ratio = gain >= t, np.maximum(v * self.mean_estimate / t, 1.0)
        draws = (drawn * (1.0 + self.splits * (ratio - 1.0))).sum(0)
        tokens = (drawn * (gain + self.splits * self.mean_estimate * v * np.log(ratio))).sum(0)
        seconds = np.interp(size + draws, np.arange(len(self.verify)), self.verify) - self.verify[size]
        net = tokens - self.price * seconds
        net[1:][size + draws[1:] > self.most_now] = -math.inf
        best = int(net.argmax())
        return float(t[best]) if net[best] > 0.0 else math.inf

    def reads(self, growth: Growth, gains: Mapping[int, float]) -> list[int]:
        """Return the leaves of the deepest level over which a draft pass is worth its seconds: all of them by the draws
        below, or else each by several further candidates, as in a chain. `gains`: by leaf, the gain of its first child.
        """
        tree, others = growth.tree, growth.open.values()
        level, size = tree.levels, len(tree)
        steps = int(level % self.costs.block == 0)  # within a block candidates are only ranked
        seconds = self.costs.draft * steps + self.costs.branch * (len(gains) - steps)
        added = self.best_draws([*gains.values(), *others], size)[1] - self.best_draws(others, size)[1]
        if added > self.price * seconds:
            return list(gains)
        ahead = self._ahead[min(level if self.costs.block > 1 else size, len(self._ahead) - 1)]
        return [node for node in gains if growth.leaves[node] > self.price * ahead[bin_of(tree.estimates[node])]]

    def best_draws(self, gains: Collection[float], size: int) -> tuple[int, float]:
        """Return how many of the slots with these `gains` are worth a draw, and the tokens gained there less the price
        of the seconds. `size`: nodes of the tree so far."""
        best = sorted(gains, reverse=True)[: max(self.most_now - size, 0)]
        seconds = self.verify[size : size + len(best) + 1] - self.verify[size]
        net = np.cumsum([0.0, *best]) - self.price * seconds
        count = int(net.argmax())
        return count, float(net[count])

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        if tree.levels == 0:
            self.record_empty_round()
            return
        self._settle(len(path) + 1, len(tree), tree.passes, len(tree.scores) - tree.passes)
        self._learn_shape(tree)
        if self.rates.observe_tree(tree.judged(path)):
            self._fit()

    def _learn_shape(self, tree: DraftTree) -> None:
        if len(tree) > 1:
            acceptance = sum(map(self.rates.calibrated, tree.estimates[1:]))
            found = [len(tree) - 1, 1.0 / max(min(tree.values[1:]), 1e-3) - 1.0, len(tree), acceptance]
            self._shape = SHAPE_MEMORY * self._shape + found
            further, thresholds, draws, acceptance = self._shape.tolist()
            self.splits, self.mean_estimate = further / max(thresholds, 1e-3), acceptance / draws

    def _fit(self) -> None:
        acceptance = self.rates.acceptance
        self._of_children: list[float] = (self.rates.following @ acceptance).tolist()
        self._of_siblings: list[float] = (self.rates.following_siblings @ acceptance).tolist()
        super()._fit()

    def tokens(self) -> Floats:
        return super().tokens()[np.minimum(np.arange(self.most + 1), self.tries_to)]
