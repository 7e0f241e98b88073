"""A growing token tree and its open slots: what `algorithms` decides about. No model inside."""

from __future__ import annotations

from collections.abc import Callable, Collection
from heapq import heappop, heappush

import torch
from torch import Tensor

from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.sampling.randomness import TreeRandomness
from hf_specdecpp.sampling.without_replacement import likeliest
from hf_specdecpp.trees.siblings import AHEAD, HeadJudgedSiblings, JudgedSiblings, Level, judged_siblings
from hf_specdecpp.trees.tree import DraftTree

# Nobody gets to a slot of a smaller value: q has no token left but for rounding.
SMALLEST = 1e-12

Expand = Callable[[DraftTree, list[int]], Level]


class Growth:
    """A growing tree, its open slots, and its leaves: nodes that may get children but whose q is not known yet.

    Args:
        expand: what the draft says after nodes of the tree (the root first, then any whose parents it was asked about):
            by node, with a pass of the draft, or by depth, from the marginals of a block.
        estimator: judges what is drawn.
        randomness: draws siblings without replacement; `None` takes the likeliest tokens (greedy targets).
        root: token of the root.
        max_depth: nodes of this depth get no children.
        eos_token_ids: nor do these tokens.
        ahead: see `siblings.judged_siblings`.
        buffer: for their q; trees that are grown one after another may share it.
        valuation: what estimates and slots count for.

    Attributes:
        tree: Tr.
        open: what the open slot of each node whose q is known competes with: v, or v * a(y) for a greedy target.
        leaves: value v of the first child's slot of each other node that may have children.
        greedy: whether the target is.
    """

    def __init__(
        self,
        expand: Expand,
        estimator: Estimator,
        randomness: TreeRandomness | None,
        root: int,
        max_depth: int,
        eos_token_ids: Collection[int] = (),
        ahead: int = AHEAD,
        buffer: SoftmaxBuffer | None = None,
        valuation: SlotValuation | None = None,
    ) -> None:
        self.tree = DraftTree(root)
        self.open: dict[int, float] = {}
        self.leaves: dict[int, float] = {0: 1.0} if max_depth > 0 else {}
        self.max_depth, self.greedy = max_depth, randomness is None
        self._slots: dict[int, tuple[float, tuple[int, float] | None]] = {}  # v of `open`, with y and a(y) if known
        self._expand, self._estimator, self._randomness = expand, estimator, randomness
        self._eos, self._ahead = eos_token_ids, ahead
        self._buffer = buffer or SoftmaxBuffer(0)
        self._buffer.clear()
        self._valuation = valuation or SlotValuation()
        self.usual = self._valuation.expected(None)
        self._heap: list[tuple[float, int]] = []  # `open` as (-v, node), with entries that are out of date
        self._siblings: dict[int, tuple[JudgedSiblings | HeadJudgedSiblings, int]] = {}

    def expand(self, nodes: list[int]) -> None:
        """Learn D(.|path to node) for `nodes`, with a draft pass or from an earlier one: their first slots open."""
        level = self._expand(self.tree, nodes)
        self.tree.passes += level.passes
        self.tree.levels += 1
        q = self._buffer.softmax(level.scores)
        draw = likeliest if self._randomness is None else self._randomness.siblings
        depths = [self.tree.depths[node] for node in nodes]
        judged = judged_siblings(q, draw, self._estimator, level, depths, self.greedy, self._ahead)
        for row, node in enumerate(nodes):
            self.tree.scores[node] = level.scores[row]
            self._siblings[node] = judged, row
            self._open(node, self.leaves.pop(node))

    @property
    def best(self) -> float:
        """The highest value of an open slot, -1 if there is none."""
        while self._heap and self.open.get(self._heap[0][1]) != -self._heap[0][0]:
            heappop(self._heap)
        return -self._heap[0][0] if self._heap else -1.0

    def draw_best(self) -> int | None:
        """Draw at the open slot of the highest value; the new node, or `None` if no token was left there."""
        if self.best < 0.0:  # also clears what is out of date from the top of the heap
            return None
        return self.draw(self._heap[0][1])

    def draw(self, parent: int) -> int | None:
        """Draw at the slot of `parent`; the new node, or `None` if no token is left there."""
        if self.open.pop(parent, None) is None:  # a greedy target's next sibling is known before, and there is none
            return None
        v, drawn = self._slots.pop(parent)
        if (drawn := drawn or self._next(parent)) is None:  # R is all zero
            return None
        y, estimate = drawn
        a = self._valuation.calibrated(estimate)
        child = self.tree.add(parent, y, v, estimate)
        if self.tree.depths[child] < self.max_depth and y not in self._eos:
            self.leaves[child] = v * a
        self._open(parent, v * (1.0 - a))
        return child

    def slots(self) -> list[tuple[float, float]]:
        """v of each open slot, and what it competes with."""
        return [(self._slots[node][0], value) for node, value in self.open.items()]

    def last_estimate(self, node: int) -> float | None:
        """Of the node's last child, if it has any."""
        children = self.tree.children[node]
        return self.tree.estimates[children[-1]] if children else None

    def _next(self, node: int) -> tuple[int, float] | None:
        judged, row = self._siblings[node]
        return judged.next(row)

    def _open(self, node: int, v: float) -> None:
        known = self._next(node) if self.greedy else None
        if self.greedy and known is None:  # no token is left
            return
        self._slots[node] = v, known
        valuation = self._valuation
        self.open[node] = v * (
            valuation.calibrated(known[1]) if known else valuation.expected(self.last_estimate(node))
        )
        heappush(self._heap, (-self.open[node], node))


class SlotValuation:
    """What estimates and slots count for. Here as in the paper: an estimate for itself, a slot for its value v."""

    def calibrated(self, estimate: float) -> float:
        """a(y)."""
        return estimate

    def expected(self, _last: float | None, /) -> float:
        """Priority of an open slot per unit of v, before its token is known, given the estimate of the last sibling."""
        return 1.0


class CalibratedSlots(SlotValuation):
    """Estimates count for what rounds have taught of them."""

    def __init__(self, rates: AcceptanceRates) -> None:
        self.rates = rates

    def calibrated(self, estimate: float) -> float:
        return self.rates.calibrated(estimate)


class SoftmaxBuffer:
    """Memory for the q of a tree's nodes, used again by the next tree.

    On a CPU a softmax that has to ask the system for memory takes four times as long.

    Args:
        num_rows: how many q find room; further ones get memory of their own.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.used = num_rows, 0
        self.rows: Tensor | None = None

    def clear(self) -> None:
        """Nobody needs what is in the memory any more."""
        self.used = 0

    def softmax(self, scores: Tensor) -> Tensor:
        """Of `[n, vocab]` logits, always of one width. Rows of nothing but -inf, where no token is left, become 0, on a
        device nan."""
        begin, self.used = self.used, self.used + scores.shape[0]
        if scores.device.type != "cpu":
            return scores.softmax(dim=-1)
        if self.used > self.num_rows:
            q = scores.softmax(dim=-1)
        else:
            if self.rows is None:
                self.rows = scores.new_empty((self.num_rows, scores.shape[-1]))
            q = torch.softmax(scores, dim=-1, out=self.rows[begin : self.used])
        if bool((nothing := q[:, 0].isnan()).any()):
            q[nothing] = 0.0
        return q
