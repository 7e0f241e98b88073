"""How a token tree grows: DySpec (arXiv 2410.11744), Algorithms 1 and 2, and given shapes. No model inside.

Explained with an example in `docs/dyspec.md`.

In the paper's notation: Tr is the tree, D(.|x) the draft's distribution after x, R the rest of D after siblings were
drawn, v the value of a slot (the probability that verification reaches it), t the threshold. A node whose D is known
has one open slot, its next child. Drawing y, whose acceptance probability is a(y), at a slot of value v opens two
slots: y's first child, v * a(y), and y's next sibling, v * (1 - a(y)). With a(y) = R(y) this is DySpec.

The output is exact: whether to draw at a slot depends on its value, which is known before the draw, and drawn nodes
stay. For a greedy target nothing is drawn: the next sibling is the next likeliest token, known in advance. So its slots
are ranked by v * a(y), the probability that y adds a token, instead of the paper's v."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush

import torch
from torch import Tensor

from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import AcceptanceRates, Estimator
from hf_specdecpp.sampling.randomness import Randomness, Siblings, likeliest
from hf_specdecpp.trees.head_siblings import AHEAD, HeadJudgedSiblings
from hf_specdecpp.trees.shapes import Shape
from hf_specdecpp.trees.tree import DraftTree

# Factor of h in `ThresholdSchedule`, which raises t: a later level can use budget that is left, but drawn nodes stay.
# With it, expected acceptance is 0 to 3 % below Algorithm 1's, without it up to 4 % (tests/trees/test_growth.py).
CAUTION = 0.85
LATEST = 0.1  # share of the latest round in the running means of `ThresholdSchedule`, once there are many


def grow_exactly(growth: Growth, budget: int, threshold: float = 0.0) -> None:
    """Algorithm 1: draw at the slot of the highest value, until the tree has `budget` candidates or all values are
    below `threshold`. One draft pass for each node that gets a child."""
    while len(growth.tree) < budget:
        leaf = max(growth.leaves, key=growth.leaves.__getitem__, default=0)
        promised = growth.leaves.get(leaf, -1.0)
        if max(promised, growth.best) < max(threshold, 0.0):
            break
        if promised >= growth.best:  # no child of a leaf has a higher value
            growth.expand([leaf])
        else:
            growth.draw_best()


def grow_by_level(growth: Growth, budget: int, pace: ThresholdSchedule, threshold: float = 0.0) -> None:
    """Algorithm 2: one draft pass per level, then a draw at every slot of value t or more, best first.

    With the paper's fixed t most of the budget is unused if the draft is unsure. Here `pace` chooses t for each level,
    at least `threshold`. The rest of the budget is drawn after the last level, at the best slots from `threshold` on.
    """
    tree, done = growth.tree, False
    usual = pace.estimate if growth.greedy else 1.0  # expected a(y) of a leaf's child
    while not done and len(tree) < budget:
        level = {node: v * usual for node, v in growth.leaves.items() if tree.depths[node] == tree.levels}
        t = max(threshold, pace.threshold([*level.values(), *growth.open.values()], budget - len(tree)))
        worth = [node for node, v in level.items() if v >= t]
        if worth:
            growth.expand(worth)
            values = {node: growth.open.get(node, -1.0) for node in worth}
            growth.draw(max(values, key=values.__getitem__))  # so that every pass has a draw
        done = not worth and growth.best < t
        while len(tree) < budget and growth.best >= t:
            growth.draw_best()
    while len(tree) < budget and growth.best >= max(threshold, SMALLEST):
        growth.draw_best()
    pace.record_tree([growth.calibrated(a) for a in tree.estimates[1:]])


class ThresholdSchedule:
    """Chooses the thresholds of `grow_by_level` so that the whole budget is used for the best slots.

    The best tree of a budget holds all slots above one threshold t, at which Algorithm 1 ends. Level by level, t must
    be chosen before deeper slots are known. A draw splits a slot of value v into v a and v (1 - a), so about 1 + (v / t
    - 1) / h draws bring all parts below t, where h is the mean entropy of a split (renewal theory: exact in the limit
    of small t if a does not depend on v). t is chosen so that these draws add up to the budget. For greedy targets v is
    replaced by v times the mean a.

    Attributes:
        split_entropy: h in nats, a running mean over rounds (`LATEST`). The initial value counts as a round.
        estimate: the mean a, a running mean in the same way.
    """

    def __init__(self) -> None:
        self.split_entropy, self.estimate, self.rounds = 0.3, 0.7, 1

    def threshold(self, values: list[float], budget: int) -> float:
        """Return t of a level, at most the highest of the slots' `values`. `budget`: candidates still to draw."""
        ranked = sorted(values, reverse=True)[:budget]
        h = CAUTION * self.split_entropy
        total, t = 0.0, math.inf
        for k, v in enumerate(ranked, 1):
            if v < t and k > 1:
                break
            total += v
            t = min(total / (h * (budget - k) + k), ranked[0])
        return t

    def record_tree(self, estimates: list[float]) -> None:
        """Update the running means with the calibrated estimates of a finished tree's nodes."""
        if estimates:
            self.rounds += 1
            share = max(1.0 / self.rounds, LATEST)
            entropy = sum(-x * math.log(x) for a in estimates for x in (a, 1.0 - a) if x > 0.0)
            self.split_entropy += share * (entropy / len(estimates) - self.split_entropy)
            self.estimate += share * (sum(estimates) / len(estimates) - self.estimate)


def grow_shape(growth: Growth, shape: Shape) -> None:
    """Grow a tree of a given shape, one draft pass per level. Nodes are missing below the maximum depth, after
    end-of-sequence tokens and where D has no token left."""
    tree = growth.tree
    ranks: dict[int, tuple[int, ...]] = {0: ()}
    while level := [node for node in growth.leaves if tree.depths[node] == tree.levels and shape.get(ranks[node])]:
        growth.expand(level)
        for node in level:
            for rank in range(shape[ranks[node]]):
                if (child := growth.draw(node)) is None:
                    break
                ranks[child] = (*ranks[node], rank)


# The tree, its open slots and the siblings drawn there. --------------------------------------------------------------


# Slots of a smaller value are never reached: apart from rounding, q has no token left.
SMALLEST = 1e-12

Expand = Callable[[DraftTree, list[int]], tuple[Tensor, Tensor]]


class Growth:
    """A growing tree, its open slots, and its leaves: nodes that may get children but whose q is not known yet.

    Args:
        expand: gives the draft's logits `[n, vocab]` float32 after all processors, whose softmax is q, and its hidden
            states `[n, hidden_size]`, after n nodes of the tree (the root first, then any whose parents were expanded).
        root: the last token of the sequence; `max_depth`: nodes of this depth get no children.

    Attributes:
        open: by node whose q is known, the priority of its open slot: v * `expected`, for a greedy target v * a(y).
        leaves: value v of the first child's slot of each other node that may have children.
        forgone: priorities of slots of further siblings that were not opened, if `Slots.branches` is `False`.
    """

    def __init__(self, expand: Expand, how: Slots, root: int, max_depth: int) -> None:
        self.tree = DraftTree(root)
        self.open: dict[int, float] = {}
        self.leaves: dict[int, float] = {0: 1.0} if max_depth > 0 else {}
        self.forgone: list[float] = []
        self.max_depth, self.greedy = max_depth, how.randomness is None
        self._slots: dict[int, tuple[float, tuple[int, float] | None]] = {}  # v of `open`, with y and a(y) if known
        self._expand, self._how, self.calibrated = expand, how, how.calibrated
        self._heap: list[tuple[float, int]] = []  # `open` as (-priority, node), with outdated entries
        self._siblings: dict[int, Iterator[tuple[int, float]]] = {}  # draws a node's further children, with estimates

    def expand(self, nodes: list[int]) -> None:
        """Get D(.|path to node) for `nodes`, from a draft pass or an earlier one, and open their first slots."""
        how, (scores, hidden) = self._how, self._expand(self.tree, nodes)
        self.tree.passes += 1
        self.tree.levels += 1
        q = scores.softmax(dim=-1)  # nan if all scores are -inf: no token is drawn then
        drawing = likeliest(q) if how.randomness is None else how.randomness.siblings(q)
        depths, head = [self.tree.depths[node] for node in nodes], how.estimator
        chances: list[float | None] = [None] * len(nodes)
        if isinstance(head, AcceptanceHead) and head.inputs == "before":
            judged = HeadJudgedSiblings(how, drawing, q, scores, hidden, depths)
            below = map(judged.of_node, range(len(nodes)))
        else:
            if isinstance(head, AcceptanceHead):
                chances = head.probability(head(hidden), torch.tensor(depths), self.greedy).tolist()
            below = map(partial(judged_siblings, drawing), range(len(nodes)), chances)
        for row, (node, siblings) in enumerate(zip(nodes, below, strict=True)):
            self.tree.scores[node] = scores[row]
            self._siblings[node] = siblings
            self._open(node, self.leaves.pop(node), chances[row])

    @property
    def best(self) -> float:
        """The highest priority of an open slot, -1 if there is none."""
        while self._heap and self.open.get(self._heap[0][1]) != -self._heap[0][0]:
            heappop(self._heap)
        return -self._heap[0][0] if self._heap else -1.0

    def draw_best(self) -> int | None:
        """Draw at the open slot of the highest priority. Returns the new node, or `None` if no token was left there."""
        if self.best < 0.0:  # also removes outdated entries from the top of the heap
            return None
        return self.draw(self._heap[0][1])

    def draw(self, parent: int) -> int | None:
        """Draw the next child of `parent`. Returns the new node, or `None` if there is no open slot or token left."""
        if self.open.pop(parent, None) is None:  # for a greedy target: no further sibling
            return None
        v, drawn = self._slots.pop(parent)
        if (drawn := drawn or next(self._siblings[parent], None)) is None:  # R is all zero
            return None
        y, estimate = drawn
        a = self.calibrated(estimate)
        child = self.tree.add(parent, y, v, estimate)
        if self.tree.depths[child] < self.max_depth and y not in self._how.eos_token_ids:
            self.leaves[child] = v * a
        if self._how.branches:
            self._open(parent, v * (1.0 - a))
        else:
            self.forgone.append(v * (1.0 - a) * self._how.expected(None, estimate, None))
        return child

    def slots(self) -> list[tuple[float, float]]:
        """Value v and priority of each open slot."""
        return [(self._slots[node][0], value) for node, value in self.open.items()]

    def _open(self, node: int, v: float, chance: float | None = None) -> None:
        """Open the slot of `node`, of value v; `chance`: the next child's estimate, if known before the draw."""
        known = next(self._siblings[node], None) if self.greedy else None
        if self.greedy and known is None:  # no token is left
            return
        self._slots[node] = v, known
        if known is not None:
            value = v * self.calibrated(known[1])
        else:
            children = self.tree.children[node]
            last = self.tree.estimates[children[-1]] if children else None
            value = v * self._how.expected(self.tree.estimates[node] if node else None, last, chance)
        self.open[node] = value
        heappush(self._heap, (-value, node))


@dataclass
class Slots:
    """How the slots of one sequence's trees are valued, and how children are drawn there."""

    estimator: Estimator  # estimates the acceptance of drawn tokens
    randomness: Randomness | None = None  # draws siblings; `None` takes the likeliest tokens (greedy targets)
    eos_token_ids: Collection[int] = ()  # these tokens get no children
    rates: AcceptanceRates | None = None  # calibrate estimates (not in the paper)
    # Factor of v in the priority of a slot before its draw: of the estimates of the node above and of the sibling
    # before, and of that of the slot's own token. `None` if there is none, or it is not known yet.
    expected: Callable[[float | None, float | None, float | None], float] = lambda *_: 1.0
    ahead: int = AHEAD  # number of siblings of a node that a head judges in advance
    branches: bool = True  # whether nodes may have siblings
    embed: Callable[[Tensor], Tensor] | None = None  # for a head: maps token ids to the draft's input embeddings

    def calibrated(self, estimate: float) -> float:
        """The acceptance probability a(y) of a token with this estimate."""
        return estimate if self.rates is None else self.rates.calibrated(estimate)


# The siblings of a level. --------------------------------------------------------------------------------------------


def judged_siblings(siblings: Siblings, row: int, chance: float | None) -> Iterator[tuple[int, float]]:
    """Draw tokens from a row of `siblings` until none is left. Yields (y, a(y)), with a(y) = q(y) / (1 - q of earlier
    siblings). `chance`: a(y) of the first instead, if an acceptance head has given it before the draw."""
    mass = 0.0
    while (drawn := siblings.draw_next(row)) is not None:
        token, q = drawn
        left, mass = 1.0 - mass, mass + q
        yield token, chance if chance is not None else min(q / left, 1.0) if left > 0.0 else 1.0
        chance = None


def check_estimator(estimator: Estimator) -> None:
    """Raise `ValueError` for an acceptance head that judges a candidate only after the draft has read it."""
    if estimator.inputs == "after":
        raise ValueError(
            'This acceptance head judges a candidate after the draft has read it (inputs="after"), but a tree must '
            'know what a slot is worth before it draws there. Use a head with other inputs, tree="static", or '
            "assistant.head = None to value slots with the draft's own probability."
        )
