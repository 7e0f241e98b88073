"""Trees that maximise tokens a second: `rule="throughput"` with `tree="dyspec"`. Derived in `docs/throughput.md`.

The marginal node decides: a level is read, and a candidate drawn, if the tokens that it is expected to add exceed the
rate, in tokens a second, times its seconds. Nothing here reads a clock, so with the same costs the same calls draft the
same trees.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.acceptance_rates import FIRST_FITS, NO_VERDICT, AcceptanceRates, bin_of
from hf_specdecpp.throughput.exploration import LEAST_GAIN, ExplorationBudget
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.round_times import RoundTimes
from hf_specdecpp.throughput.solver import solve
from hf_specdecpp.trees.slots import CalibratedSlots, Growth
from hf_specdecpp.trees.tree import DraftTree

SELECTION_DISCOUNT = 0.95  # of the tokens expected at the best of many thresholds (winner's curse)
RATE_MEMORY = 0.995  # what is left of a round's tokens and seconds a round later
SHAPE_MEMORY = 0.98  # the same for what is learned of the trees' shapes
FIRST_NODES = 6  # most in the first round, and twice as many in each later one: early mistakes stay small
TRUSTED = 8.0  # plain rounds that a promised rate counts for, before it has been seen
THRESHOLDS = np.exp(-0.12 * np.arange(50))  # tried, as shares of the best slot's gain; down to 0.003
LONGEST_CHAIN = 20  # that the first promise is computed for


class TreeThroughput(CalibratedSlots):
    """What the rule knows about one draft and target, and how it grows trees.

    The gain of a slot is the expected number of tokens that a draw there adds: v times the chance a that what is drawn
    there is accepted.

    Args:
        costs: of a round; `KnownCosts` follow the rounds.
        most_nodes: of a tree.
        rates: what is known of the estimates.

    Attributes:
        credit: for probes, while speculation does not pay.
        tokens: of the rounds that speculated, later ones counting more.
        splits: s, by which a slot of value v takes about 1 + s (v / t - 1) draws until all that is left is below t.
        mean_estimate: mean a of the draws so far, and what it is before any.
    """

    def __init__(self, costs: Costs | KnownCosts, most_nodes: int, rates: AcceptanceRates | None = None) -> None:
        super().__init__(rates or AcceptanceRates())
        self.settings, self.most_nodes = (costs, most_nodes), most_nodes
        self.known = costs if isinstance(costs, KnownCosts) else None
        self.rounds, self.tokens = 0, 0.0
        self._promised = 0.0  # seconds of the tokens that were promised before there were rounds
        self._passes = self._branches = 0.0  # of the draft in these rounds, and nodes that they read beside the first
        self._widths = np.zeros(most_nodes + 1)  # how many of these rounds had so many candidates
        self.credit = ExplorationBudget(1.0)
        self._reckon_with(costs.at(0) if isinstance(costs, KnownCosts) else costs)
        self._shape = np.array([4.0, 2.0, 4.0, 2.0])  # further draws, sum of 1 / t - 1; draws, sum of their a
        self.splits, self.mean_estimate = 2.0, 0.5
        self._is_stale = True  # whether there is something new to `_fit`
        self._catch_up()

    def _reckon_with(self, costs: Costs) -> None:
        self.costs, self.verify = costs, costs.verify_seconds(self.most_nodes)
        plain = float(self.verify[0]) + costs.overhead
        self._promised *= plain / self.credit.plain
        self.plain = self.credit.plain = plain

    def begin_text(self) -> None:
        """The rounds that follow are of another text."""

    def follow(self, length: int) -> None:
        """Reckon with what rounds cost at this length of the text, where that is known."""
        if self.known is not None and (costs := self.known.at(length)) is not self.costs:
            self._reckon_with(costs)
        self._catch_up()  # now, and not when the round is timed: it takes a while

    def learn(self, times: RoundTimes) -> None:
        """Let the costs follow the rounds of a text that is over."""
        if self.known is not None:
            was_assumed = self.known.is_assumed
            self.known.learn(times)
            if was_assumed:  # what was reckoned with passes is seconds now
                self._reckon_with(self.known.at(0))

    @property
    def rate(self) -> float:
        """Tokens a second of the rounds that speculated, by what they would cost now."""
        drafting = self._passes * self.costs.draft + self._branches * self.costs.branch
        rounds = float(self._widths @ self.verify) + self._widths.sum() * (self.costs.overhead + self.costs.start)
        return self.tokens / (self._promised + drafting + rounds)

    @property
    def price(self) -> float:
        """Of a second, in tokens."""
        return max(self.rate, 1.0 / self.plain)

    @property
    def most(self) -> int:
        """Nodes that the next tree may have."""
        return min(FIRST_NODES << min(self.rounds, 10), len(self.verify) - 1)

    @property
    def pays(self) -> bool:
        """Whether speculating beats plain decoding."""
        return self.rate * self.plain >= LEAST_GAIN

    @property
    def learns(self) -> bool:
        """Whether a round is to teach something: it is a probe, or what speculation promises has hardly been seen."""
        return not self.pays or self.rounds <= FIRST_FITS[-1]

    def rests(self, length: int) -> bool:
        """Whether a text of this length, which the draft has not read, is left to the target."""
        self.follow(length)
        return not (self.pays or self.credit.is_worth_following(self._price(length)))

    def may_start(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        self._catch_up()
        return self.pays or self.credit.seconds >= self._price(unread)

    def _price(self, unread: int) -> float:
        """Of the next probe."""
        return self.costs.read * unread + self.costs.start + self.costs.draft + float(self.verify[1] - self.verify[0])

    def expected(self, last: float | None, /) -> float:
        return self._next_acceptance[NO_VERDICT if last is None else bin_of(last)]

    def grow(self, growth: Growth, threshold: float = 0.0) -> None:
        """Algorithm 2, level by level, with t and the depth chosen by their price.

        Args:
            threshold: lower bound of t.
        """
        tree = growth.tree
        while len(tree) < self.most:
            level = {node: v for node, v in growth.leaves.items() if tree.depths[node] == tree.levels}
            first_children = [(v, v * growth.usual) for v in level.values()]
            t = max(threshold, self.threshold([*first_children, *growth.slots()], len(tree)))
            worth = [node for node, v in level.items() if tree.levels == 0 or v * growth.usual >= t]
            gains = [level[node] * growth.usual for node in worth]
            # Whether to draft at all has been decided before.
            if not worth or (tree.levels > 0 and not self.reads(gains, growth.open.values(), len(tree), tree.levels)):
                break
            growth.expand(worth)
            while len(tree) < self.most and growth.best >= t:
                growth.draw_best()
        while growth.best >= threshold and self.best_draws(growth.open.values(), len(tree))[0] > 0:
            growth.draw_best()
        if self.learns and not len(tree) and tree.levels and growth.best >= threshold:
            growth.draw_best()  # the draft has been asked, and without candidates nothing would be learned of it

    def threshold(self, slots: Collection[tuple[float, float]], size: int) -> float:
        """t, for which drawing wherever the gain is at least t promises most; infinite where no draw is worth it.

        A draw leaves slots of value v a and v (1 - a), so draws go on below the first. Until all gains are below t a
        slot of value v takes about 1 + s (v a / t - 1) draws, which add v a (1 + s log(v a / t)) tokens (renewal
        theory; s = `splits`, and a, for the draws after the first, `mean_estimate`).

        Args:
            slots: value and gain of each.
            size: of the tree so far.
        """
        if not slots:
            return math.inf
        v, gain = np.array(slots).T[:, :, None]
        t = gain.max() * THRESHOLDS
        drawn, ratio = gain >= t, np.maximum(v * self.mean_estimate / t, 1.0)
        draws = (drawn * (1.0 + self.splits * (ratio - 1.0))).sum(0)
        tokens = (drawn * (gain + self.splits * self.mean_estimate * v * np.log(ratio))).sum(0)
        seconds = np.interp(size + draws, np.arange(len(self.verify)), self.verify) - self.verify[size]
        net = SELECTION_DISCOUNT * tokens - self.price * seconds
        net[1:][size + draws[1:] > self.most] = -math.inf
        best = int(net.argmax())
        return float(t[best]) if net[best] > 0.0 else math.inf

    def reads(self, gains: Collection[float], others: Collection[float], size: int, level: int) -> bool:
        """Whether asking the draft about some leaves is worth its seconds.

        Args:
            gains: of their first children's slots.
            others: gains of the open slots, where the same nodes could be drawn.
            size: of the tree so far.
            level: how often the draft was asked before.
        """
        seconds = self.costs.level_seconds(level, len(gains))
        added = self.best_draws([*gains, *others], size)[1] - self.best_draws(others, size)[1]
        return added > self.price * seconds

    def best_draws(self, gains: Collection[float], size: int) -> tuple[int, float]:
        """How many of the best slots are worth drawing at, and the tokens that this adds, less those of its seconds."""
        best = sorted(gains, reverse=True)[: max(self.most - size, 0)]
        seconds = self.verify[size : size + len(best) + 1] - self.verify[size]
        net = np.cumsum([0.0, *best]) - self.price * seconds
        count = int(net.argmax())
        return count, float(net[count])

    def observe(self, tree: DraftTree, path: list[int], unread: int) -> None:
        """Learn the outcome of a round.

        Args:
            tree: of the round; without passes the round drafted nothing.
            path: the accepted nodes.
            unread: tokens that the draft read first.
        """
        if tree.levels == 0:
            self.credit.rest()
            return
        seconds = self.costs.tree_seconds(tree.passes, len(tree.scores), float(self.verify[len(tree)]))
        self.credit.settle(self.pays, (len(path) + 1) * self.plain - seconds - self.costs.read * unread)
        self.tokens = RATE_MEMORY * self.tokens + len(path) + 1
        self._promised *= RATE_MEMORY
        self._passes = RATE_MEMORY * self._passes + tree.passes
        self._branches = RATE_MEMORY * self._branches + len(tree.scores) - tree.passes
        self._widths *= RATE_MEMORY
        self._widths[len(tree)] += 1.0
        self._learn_shape(tree)
        self.rounds += 1
        self._is_stale |= self.rates.observe_tree(tree.judged(path))

    def _learn_shape(self, tree: DraftTree) -> None:
        if len(tree) > 1:
            acceptance = sum(map(self.calibrated, tree.estimates[1:]))
            found = [len(tree) - 1, 1.0 / max(min(tree.values[1:]), 1e-3) - 1.0, len(tree), acceptance]
            self._shape = SHAPE_MEMORY * self._shape + found
            further, thresholds, draws, acceptance = self._shape.tolist()
            self.splits, self.mean_estimate = further / max(thresholds, 1e-3), acceptance / draws

    def _catch_up(self) -> None:
        if self._is_stale:
            self._fit()
            self._is_stale = False

    def _fit(self) -> None:
        rates = self.rates
        self._next_acceptance: list[float] = (rates.following @ rates.acceptance).tolist()
        if self.rounds <= FIRST_FITS[-1]:
            # Earlier rounds were drafted with other estimates, and say little of the rate of those to come. A tree does
            # at least as well as the best chain.
            independent = np.tile(rates.following[NO_VERDICT], (len(rates.following), 1))
            chains = self.costs.round_seconds(min(len(self.verify) - 1, LONGEST_CHAIN))
            self._passes = self._branches = 0.0
            self._widths[:] = 0.0
            self._promised = TRUSTED * self.plain
            self.tokens = self._promised * solve(rates.acceptance, independent, chains).rate
