"""How a token tree grows: DySpec (arXiv 2410.11744), Algorithms 1 and 2, and given shapes. No model inside.

Explained with an example in `docs/dyspec.md`.

In the paper's notation: Tr the tree, D(.|x) the draft's distribution after x, R what is left of it once siblings have
been drawn, v the value of a slot, t the threshold. A node whose D is known has one open slot, its next child. A slot of
value v where y is drawn, y having the chance a(y) of acceptance, opens two: y's first child, v * a(y), and y's next
sibling, v * (1 - a(y)). With a(y) = R(y) this is DySpec.

Losslessness: whether to draw at a slot depends on its value, which is known before the draw. What was drawn stays.
For a greedy target nothing is drawn: the next sibling is the next likeliest token, known before it is taken. So there
the slots compete with v * a(y), the chance that taking y adds a token, instead of the paper's v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from hf_specdecpp.trees.slots import SMALLEST, Growth
from hf_specdecpp.trees.tree import DraftTree

# A level that takes too little of the budget leaves it to the next one; one that takes too much cannot give it back.
# With it, expected acceptance is 0 to 3 % below Algorithm 1's, without it up to 4 % (tests/trees/test_algorithms.py).
CAUTION = 0.85
LATEST = 0.1  # share of the latest round in the running means of `ThresholdSchedule`, once there are many


def grow_exactly(growth: Growth, budget: int, threshold: float = 0.0) -> None:
    """Algorithm 1: always draw at the slot of the highest value. A draft pass for every node that gets a child."""
    leaves = [(-v, node) for node, v in growth.leaves.items()]
    while len(growth.tree) < budget:
        promised = -leaves[0][0] if leaves else -1.0  # no child of a leaf competes with more
        if max(promised, growth.best) < max(threshold, 0.0):
            break
        if promised >= growth.best:
            growth.expand([heappop(leaves)[1]])
        elif (child := growth.draw_best()) in growth.leaves:
            heappush(leaves, (-growth.leaves[child], child))


def grow_by_level(growth: Growth, budget: int, pace: ThresholdSchedule, threshold: float = 0.0) -> None:
    """Algorithm 2: one draft pass a level, then a draw at every slot above t, best first.

    The paper fixes t, and where the draft is unsure most of the budget stays unused. Here `pace` chooses t anew for
    each level, above `threshold`, and what is left in the end goes to the best open slots above that; 0 uses it all.
    """
    tree, done = growth.tree, False
    usual = pace.estimate if growth.greedy else 1.0  # a(y) of a leaf's child, which is not known yet
    while not done and len(tree) < budget:
        level = {node: v * usual for node, v in growth.leaves.items() if tree.depths[node] == tree.levels}
        t = max(threshold, pace.threshold([*level.values(), *growth.open.values()], budget - len(tree)))
        worth = [node for node, v in level.items() if v >= t]
        if worth:
            growth.expand(worth)
            values = {node: growth.open.get(node, -1.0) for node in worth}
            growth.draw(max(values, key=values.__getitem__))  # so that no pass is in vain
        done = not worth and growth.best < t
        while len(tree) < budget and growth.best >= t:
            growth.draw_best()
    while len(tree) < budget and growth.best >= max(threshold, SMALLEST):
        growth.draw_best()
    pace.learn(tree)


class ThresholdSchedule:
    """Chooses the thresholds of `grow_by_level` so that the budget is used up, and used well.

    The best tree of a budget holds every slot above one threshold t, the one that Algorithm 1 ends at. Level by level,
    t must be known before the deeper slots are. A slot of value v is split by a draw, v = v a + v (1 - a), so it takes
    about 1 + (v / t - 1) / h draws until all its parts are below t, h being the mean entropy of a split (renewal
    theory: exact in the limit of small t where a does not depend on v). t is where these add up to the budget. For
    greedy targets the same holds with v times the mean a in the place of v.

    Attributes:
        split_entropy: h in nats, a running mean over the draws of all rounds. What it begins with counts as a round.
        estimate: the mean a, likewise.
    """

    def __init__(self, split_entropy: float = 0.3, estimate: float = 0.7) -> None:
        self.split_entropy, self.estimate, self.rounds = split_entropy, estimate, 1

    def threshold(self, values: list[float], budget: int) -> float:
        """t, given the values of the slots and what is left of the budget. The best slot always passes."""
        ranked = sorted(values, reverse=True)[:budget]
        h = CAUTION * self.split_entropy
        total, t = 0.0, math.inf
        for k, v in enumerate(ranked, 1):
            if v < t and k > 1:
                break
            total += v
            t = min(total / (h * (budget - k) + k), ranked[0])
        return t

    def learn(self, tree: DraftTree) -> None:
        """Take note of a finished tree."""
        if len(tree):
            self.rounds += 1
            share = max(1.0 / self.rounds, LATEST)
            entropy = 0.0
            for a in tree.estimates[1:]:
                for x in (a, 1.0 - a):
                    entropy -= x * math.log(x) if x > 0.0 else 0.0
            self.split_entropy += share * (entropy / len(tree) - self.split_entropy)
            self.estimate += share * (sum(tree.estimates[1:]) / len(tree) - self.estimate)


def grow_shape(growth: Growth, shape: Shape) -> None:
    """A given shape, one draft pass a level, as far as depth, ends of sequences and the supports of D allow."""
    tree = growth.tree
    ranks: dict[int, tuple[int, ...]] = {0: ()}
    while level := [node for node in growth.leaves if tree.depths[node] == tree.levels and shape.get(ranks[node])]:
        growth.expand(level)
        for node in level:
            for rank in range(shape[ranks[node]]):
                if (child := growth.draw(node)) is None:
                    break
                ranks[child] = (*ranks[node], rank)


Shape = dict[tuple[int, ...], int]
MOST_IN_A_LEVEL = 1024


def from_expansions(counts: Sequence[int]) -> Shape:
    """SpecInfer (arXiv 2305.09781): every node of depth i has `counts[i]` children. `[1, 1, 1]` is a chain.
    `ValueError` if a number is not positive, or a level is too large."""
    shape: Shape = {}
    level: list[tuple[int, ...]] = [()]
    for count in counts:
        if count < 1 or len(level) * count > MOST_IN_A_LEVEL:
            raise ValueError(
                f"tree={list(counts)} must hold whole numbers of at least 1, and no level more than "
                f"{MOST_IN_A_LEVEL} nodes: it says how many children every node of each depth gets."
            )
        shape |= dict.fromkeys(level, count)
        level = [(*node, rank) for node in level for rank in range(count)]
    return shape


def from_nodes(nodes: Sequence[Sequence[int]]) -> Shape:
    """A shape from the names of all nodes but the root; `ValueError` where parents or earlier siblings are missing."""
    listed = {tuple(node) for node in nodes}
    shape: Shape = {}
    for node in listed:
        *parent, rank = node
        if (parent and tuple(parent) not in listed) or (rank and (*parent, rank - 1) not in listed) or rank < 0:
            raise ValueError(
                f"tree lists node {list(node)} without its parent or the sibling before it. A node is named by "
                "the ranks of the siblings on the way to it: [0] is the root's first child, [0, 1] its second child."
            )
        shape[tuple(parent)] = max(shape.get(tuple(parent), 0), rank + 1)
    return shape


def size(shape: Shape) -> int:
    """Number of candidates."""
    return sum(shape.values())


def make_shape(description: Sequence[int] | Sequence[Sequence[int]]) -> Shape:
    """A shape from an expansion vector or a list of nodes."""
    if all(isinstance(item, int) for item in description):
        return from_expansions(description)  # type: ignore[arg-type]
    return from_nodes(description)  # type: ignore[arg-type]


def best_shape(rates: Sequence[float], budget: int, max_depth: int) -> Shape:
    """The shape with the most expected accepted candidates (Sequoia, arXiv 2402.12374, section 3.1).

    Args:
        rates: chance that the child of each rank is the accepted one, first child first, as measured
            (`SpeculationStats.acceptance_by_rank`), taken to be the same at every node.
        budget: number of candidates.
        max_depth: longest path.

    Below a node that is reached, F_d(n) is the most that n candidates in d levels can bring, and G_k(n) what the
    children from rank k on can bring with n candidates in all:
        G_k(n) = max(0, max_m rates[k] (1 + F_{d-1}(m - 1)) + G_{k+1}(n - m)),    F_d = G_0,    F_0 = 0.
    """
    below = np.zeros(budget + 1)
    choices: list[list[np.ndarray]] = []  # by level from the lowest up, by rank: the best m for every n
    for _ in range(max_depth):
        best, chosen = np.zeros(budget + 1), []
        for rate in reversed(rates):
            gain = rate * (1.0 + below)  # gain[m - 1] of m candidates at and below this child
            improved, counts = np.zeros(budget + 1), np.zeros(budget + 1, dtype=int)
            for n in range(1, budget + 1):
                totals = gain[:n] + best[n - 1 :: -1]
                m = int(totals.argmax())
                if totals[m] > improved[n]:
                    improved[n], counts[n] = totals[m], m + 1
            best = improved
            chosen.append(counts)
        below = best
        choices.append(chosen[::-1])
    shape: Shape = {}
    todo: list[tuple[tuple[int, ...], int]] = [((), budget)]
    while todo:
        node, n = todo.pop()
        if len(node) == max_depth:
            continue
        for rank, counts in enumerate(choices[max_depth - 1 - len(node)]):
            if (m := int(counts[n])) == 0:
                break
            shape[node] = rank + 1
            todo.append(((*node, rank), m - 1))
            n -= m
    return shape
