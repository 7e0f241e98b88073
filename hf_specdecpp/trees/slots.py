"""A growing token tree, its open slots and the siblings drawn there: what `algorithms` decides about. No models."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import NUM_SCALARS, Estimator
from hf_specdecpp.sampling.randomness import Siblings, TreeRandomness, likeliest
from hf_specdecpp.trees.tree import DraftTree

# Nobody gets to a slot of a smaller value: q has no token left but for rounding.
SMALLEST = 1e-12
# How many siblings of a node a head judges at once. A forward of the head costs the same for one as for a few.
AHEAD = 4

Draw = Callable[[Tensor], Siblings]
Expand = Callable[[DraftTree, list[int]], "Level"]


class Growth:
    """A growing tree, its open slots, and its leaves: nodes that may get children but whose q is not known yet.

    Args:
        expand: what the draft says after nodes of the tree (the root first, then any whose parents it was asked about):
            by node, with a pass of the draft, or by depth, from the marginals of a block.
        max_depth: nodes of this depth get no children.

    Attributes:
        open: what the open slot of each node whose q is known competes with: v, or v * a(y) for a greedy target.
        leaves: value v of the first child's slot of each other node that may have children.
        forgone: what the slots of further siblings would compete with, where `Slots.branches` is `False`.
    """

    def __init__(self, expand: Expand, how: Slots, root: int, max_depth: int) -> None:
        self.tree = DraftTree(root)
        self.open: dict[int, float] = {}
        self.leaves: dict[int, float] = {0: 1.0} if max_depth > 0 else {}
        self.forgone: list[float] = []
        self.max_depth, self.greedy = max_depth, how.randomness is None
        self._slots: dict[int, tuple[float, tuple[int, float] | None]] = {}  # v of `open`, with y and a(y) if known
        self._expand, self._how, self._valuation = expand, how, how.valuation
        how.buffer.used = 0  # nobody needs the q of an earlier tree any more
        self._heap: list[tuple[float, int]] = []  # `open` as (-v, node), with entries that are out of date
        self._next: dict[int, Callable[[], tuple[int, float] | None]] = {}  # of a node, its next child and a(y)

    def expand(self, nodes: list[int]) -> None:
        """Learn D(.|path to node) for `nodes`, with a draft pass or from an earlier one: their first slots open."""
        level = self._expand(self.tree, nodes)
        self.tree.passes += level.passes
        self.tree.levels += 1
        q = self._how.buffer.softmax(level.scores)
        judged = self._how.judged(q, level, [self.tree.depths[node] for node in nodes])
        for row, node in enumerate(nodes):
            self.tree.scores[node] = level.scores[row]
            self._next[node] = partial(judged.next, row)
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
        if (drawn := drawn or self._next[parent]()) is None:  # R is all zero
            return None
        y, estimate = drawn
        a = self._valuation.calibrated(estimate)
        child = self.tree.add(parent, y, v, estimate)
        if self.tree.depths[child] < self.max_depth and y not in self._how.eos_token_ids:
            self.leaves[child] = v * a
        if self._how.branches:
            self._open(parent, v * (1.0 - a))
        else:
            self.forgone.append(v * (1.0 - a) * self._valuation.expected(estimate))
        return child

    def slots(self) -> list[tuple[float, float]]:
        """v of each open slot, and what it competes with."""
        return [(self._slots[node][0], value) for node, value in self.open.items()]

    def _open(self, node: int, v: float) -> None:
        known = self._next[node]() if self.greedy else None
        if self.greedy and known is None:  # no token is left
            return
        self._slots[node] = v, known
        if known is not None:
            value = v * self._valuation.calibrated(known[1])
        else:
            children = self.tree.children[node]
            value = v * self._valuation.expected(self.tree.estimates[children[-1]] if children else None)
        self.open[node] = value
        heappush(self._heap, (-value, node))


class SlotValuation:
    """What estimates and slots count for; `rates` has what rounds taught of estimates, as the paper has not."""

    def __init__(self, rates: AcceptanceRates | None = None) -> None:
        self._learned = rates

    def calibrated(self, estimate: float) -> float:
        """a(y)."""
        return estimate if self._learned is None else self._learned.calibrated(estimate)

    def expected(self, _last: float | None, /) -> float:
        """Priority of an open slot per unit of v, before its token is known, given the estimate of the last sibling."""
        return 1.0


class SoftmaxBuffer:
    """Memory for the q of `num_rows` nodes of a tree, used again by the next tree; further ones get their own.

    On a CPU a softmax that has to ask the system for memory takes four times as long.
    """

    def __init__(self, num_rows: int = 0) -> None:
        self.num_rows, self.used = num_rows, 0  # the latter: rows that are needed
        self.rows: Tensor | None = None

    def softmax(self, scores: Tensor) -> Tensor:
        """Of logits `[n, vocab]`. Rows of nothing but -inf, where no token is left, become 0, on a device nan."""
        begin, self.used = self.used, self.used + scores.shape[0]
        if scores.device.type != "cpu":
            return scores.softmax(dim=-1)
        if self.used > self.num_rows:
            q = scores.softmax(dim=-1)
        else:
            if self.rows is None:
                self.rows = scores.new_empty((self.num_rows, scores.shape[-1]))
            q = torch.softmax(scores, dim=-1, out=self.rows[begin : self.used])
        if np.isnan(q[:, 0].numpy()).any():
            q[q[:, 0].isnan()] = 0.0
        return q


@dataclass
class Slots:
    """How the slots of one text's trees are valued and filled.

    Args:
        estimator: judges the tokens that are drawn.
        randomness: draws siblings without replacement; `None` takes the likeliest tokens (greedy targets).
        eos_token_ids: these tokens get no children.
        valuation: what estimates and slots count for.
        buffer: for q; trees that are grown one after another share it.
        ahead: how many siblings of a node a head may judge before they are asked for.
        branches: whether nodes may have siblings.
    """

    estimator: Estimator
    randomness: TreeRandomness | None = None
    eos_token_ids: Collection[int] = ()
    valuation: SlotValuation = field(default_factory=SlotValuation)
    buffer: SoftmaxBuffer = field(default_factory=SoftmaxBuffer)
    ahead: int = AHEAD
    branches: bool = True

    def judged(self, q: Tensor, level: Level, depths: list[int]) -> JudgedSiblings | HeadJudgedSiblings:
        """The siblings below nodes of these depths, drawn by q `[n, vocab]` and judged one after another."""
        draw = likeliest if self.randomness is None else self.randomness.siblings
        if isinstance(self.estimator, AcceptanceHead):
            return HeadJudgedSiblings(q, draw, self.estimator, self, level, depths)
        return JudgedSiblings(draw(q), len(depths))


# The siblings of a level. --------------------------------------------------------------------------------------------


@dataclass
class Level:
    """What the draft says after some nodes of a tree: scores `[n, vocab]` float32 after all processors, whose softmax
    is q; for a head the hidden states `[n, hidden_size]` that they are of and the map from token ids to input
    embeddings; and the passes of the draft that this took: none where an earlier one has answered for these places,
    too."""

    scores: Tensor
    hidden: Tensor
    embed: Callable[[Tensor], Tensor]
    passes: int = 1


class JudgedSiblings:
    """The siblings of each node of a level, drawn one by one, judged by the draft: a(y) = q(y) / (1 - q of earlier)."""

    def __init__(self, siblings: Siblings, num_rows: int) -> None:
        self.siblings = siblings
        self.mass = [0.0] * num_rows

    def next(self, row: int) -> tuple[int, float] | None:
        """The next sibling and its estimate, `None` when no token is left."""
        drawn = self.siblings.next(row)
        if drawn is None:
            return None
        token, q = drawn
        left = 1.0 - self.mass[row]
        self.mass[row] += q
        return token, min(q / left, 1.0) if left > 0.0 else 1.0


class HeadJudgedSiblings:
    """The same, judged by a head with `inputs="before"`.

    A few siblings are drawn ahead for every node, so that one pass of the head serves a level. That is harmless: the
    growth does not see a sibling before it has decided to take it, and those that it does not take are forgotten.
    """

    def __init__(
        self, q: Tensor, draw: Draw, head: AcceptanceHead, how: Slots, level: Level, depths: Sequence[int]
    ) -> None:
        greedy, ahead = how.randomness is None, how.ahead
        self.head, self.level, self.greedy = head, level, greedy
        self.depths = torch.tensor(depths, device=q.device)
        self.left = [SiblingDistribution(entropy, greedy) for entropy in _entropies(q, level.scores).tolist()]
        self.tops = _likeliest(q, ahead + 1)
        self.siblings = draw(q)  # from here on q may be overwritten
        self.ahead = [ahead] * len(depths)
        self.judged: list[list[tuple[int, float]]] = [[] for _ in depths]
        self.taken = [0] * len(depths)

    def next(self, row: int) -> tuple[int, float] | None:
        place = self.taken[row]
        if place == len(self.judged[row]):
            self._judge(range(len(self.judged)) if place == 0 else range(row, row + 1))
        if place == len(self.judged[row]):
            return None
        self.taken[row] += 1
        return self.judged[row][place]

    @torch.inference_mode()
    def _judge(self, rows: range) -> None:
        """Draw and judge some siblings in each of `rows`, all of which have as many already."""
        ahead, span = self.ahead[rows[0]], slice(rows.start, rows.stop)
        tops = self.tops
        if (num_judged := len(self.judged[rows[0]])) > 0:
            tops = _likeliest(self.level.scores[span].softmax(dim=-1), num_judged + ahead + 1)
        scalars = torch.zeros((len(rows), ahead, NUM_SCALARS))
        tokens = torch.zeros((len(rows), ahead), dtype=torch.long)
        drawn: list[list[int]] = []
        for place, row in enumerate(rows):
            found = [each for each in (self.siblings.next(row) for _ in range(ahead)) if each is not None]
            drawn.append([token for token, _ in found])
            if found:
                tokens[place, : len(found)] = torch.tensor(drawn[-1])
                scalars[place, : len(found)] = torch.tensor(self.left[row].scalars_of(found, tops[place]))
            self.ahead[row] = 2 * ahead
        hidden = self.level.hidden[span, None]
        log_odds = self.head(hidden, self.level.embed(tokens.to(hidden.device)), scalars.to(hidden.device))
        judged = self.head.probability(log_odds, self.depths[span, None], self.greedy)
        for row, row_tokens, estimates in zip(rows, drawn, judged.tolist(), strict=True):
            self.judged[row] += zip(row_tokens, estimates, strict=False)


class SiblingDistribution:
    """What a head is told about q without the siblings drawn so far, kept up to date; `entropy`: of q, in nats."""

    def __init__(self, entropy: float, greedy: bool) -> None:
        self.entropy, self.greedy = entropy, float(greedy)
        self.gone: set[int] = set()
        self.mass, self.part = 0.0, 0.0  # of the drawn siblings: the sums of q and of -q log q

    def scalars_of(
        self, drawn: list[tuple[int, float]], likeliest: Sequence[tuple[float, float]]
    ) -> list[tuple[float, ...]]:
        """`scalar_features` of further siblings, each for the q without those before it, of tokens with their q:
        `drawn`, in order, and the `likeliest` first, two more than will have been drawn by the last sibling."""
        rows: list[tuple[float, ...]] = []
        place = 0
        for token, q in drawn:
            while place < len(likeliest) and likeliest[place][0] in self.gone:
                place += 1
            left = list(islice((q_of for other, q_of in islice(likeliest, place, None) if other not in self.gone), 2))
            margin = sum(left[:1]) - sum(left[1:])  # the only token left has no rival
            rest = max(1.0 - self.mass, 1e-12)
            entropy = max((self.entropy - self.part) / rest + math.log(rest), 0.0)
            log_q = math.log(min(max(q / rest, 1e-30), 1.0))
            rows.append((log_q, entropy, margin / rest, self.mass, float(len(self.gone)), self.greedy))
            self.gone.add(token)
            self.mass += q
            self.part -= q * math.log(q)
        return rows


def _entropies(q: Tensor, scores: Tensor) -> Tensor:
    """`[n]`, of each row in nats, q being the softmax of `scores`: log of the normaliser, less the mean score."""
    log_normaliser = scores.amax(-1) - q.amax(-1).log()
    # Scores of -inf have q = 0 and add nothing, but 0 * -inf would be nan.
    finite = scores.clamp_min(torch.finfo(scores.dtype).min)
    return log_normaliser - torch.linalg.vecdot(q, finite)


def _likeliest(q: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """For each row of `q`, the likeliest tokens and their q, as `SiblingDistribution.scalars_of` takes them."""
    ranked = likeliest(q.clone())
    rows = [[ranked.next(row) for _ in range(count)] for row in range(q.shape[0])]
    return [[each for each in row if each is not None] for row in rows]


def check_estimator(estimator: Estimator) -> None:
    """Raise `ValueError` if `estimator` cannot value slots."""
    if estimator.inputs != "before":
        raise ValueError(
            'This acceptance head judges a candidate after the draft has read it (inputs="after"), but a tree must '
            'know what a slot is worth before it draws there. Use a head with inputs="before", tree="static", or '
            "assistant.head = None to value slots with the draft's own probability."
        )
