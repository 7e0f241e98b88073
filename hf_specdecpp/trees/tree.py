"""The candidates of a round (`DraftTree`): a token tree, or a chain, which is a tree of one branch; and the rows of a
tree in the target's pass (`TreePass`). No model inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor, nn


class DraftTree:
    """Nodes in the order in which they were drawn. Node 0 is the root: the last emitted token, not a candidate.

    Example: the sequence ends with 6, and the chain 7 8 was drafted after it. `tokens` are [6, 7, 8], `parents` [-1, 0,
    1] and `children` [[1], [2], []]; 7 was drawn from `scores[0]`, 8 from `scores[1]`.

    Args:
        root: the last emitted token; unused for chains.

    Attributes:
        tokens, parents, depths: of each node; the root has parent -1 and depth 0.
        ranks: number of siblings drawn before each node.
        values: value of the slot that each node was drawn at: the estimated probability that verification reaches the
            slot, known before the draw (the root's is 1).
        estimates: for each node, the estimated probability that it is accepted once verification reaches it.
        children: of each node, in the order drawn.
        looked_up: nodes that were looked up instead of drawn, by (parent, token). They are not in `children`.
        scores: `[vocab]` logits after each node that the draft has expanded. The first child was drawn from their
            softmax q, each further child from q without the earlier children, renormalised.
        distributions: q of such nodes, if drawing has computed it.
        passes, levels: number of draft passes, and of calls that expanded nodes.
    """

    def __init__(self, root: int = -1) -> None:
        self.tokens, self.parents, self.depths, self.ranks = [root], [-1], [0], [0]
        self.values, self.estimates = [1.0], [1.0]
        self.children: list[list[int]] = [[]]
        self.looked_up: dict[tuple[int, int], int] = {}
        self.scores: dict[int, Tensor] = {}
        self.distributions: dict[int, Tensor] = {}
        self.passes = self.levels = 0

    @classmethod
    def of(cls, parents: list[int], tokens: list[int], estimates: list[float]) -> DraftTree:
        """Make a tree. The lists have an entry for each node after the root: index of its parent, token, estimate."""
        tree, children = cls(), [list[int]() for _ in range(len(tokens) + 1)]
        tree.tokens, tree.parents = tree.tokens + tokens, tree.parents + parents
        tree.values, tree.estimates = tree.values + [0.0] * len(tokens), tree.estimates + estimates
        depths, ranks, tree.children = tree.depths, tree.ranks, children
        for node, parent in enumerate(parents, 1):
            siblings = children[parent]
            depths.append(depths[parent] + 1)
            ranks.append(len(siblings))
            siblings.append(node)
        return tree

    @property
    def candidates(self) -> list[int]:
        """Tokens of all nodes but the root."""
        return self.tokens[1:]

    @property
    def num_drawn(self) -> int:
        """Number of candidates that were drawn, not looked up."""
        return len(self.tokens) - 1 - len(self.looked_up)

    def __len__(self) -> int:
        """Number of candidates: all nodes but the root."""
        return len(self.tokens) - 1

    def add(self, parent: int, token: int, value: float = 0.0, estimate: float = 0.0, looked_up: bool = False) -> int:
        """Append a node below `parent` and return its index. A `looked_up` token must differ from the tokens of the
        parent's children, and is not added to them."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.values.append(value)
        self.estimates.append(estimate)
        self.children.append([])
        if looked_up:
            self.ranks.append(0)
            self.looked_up[parent, token] = node
        else:
            self.ranks.append(len(self.children[parent]))
            self.children[parent].append(node)
        return node

    def child(self, parent: int, token: int) -> int | None:
        """The index of the node below `parent` with this token, drawn or looked up, or `None`."""
        for child in self.children[parent]:
            if self.tokens[child] == token:
                return child
        return self.looked_up.get((parent, token))

    def below(self, parent: int) -> list[int]:
        """All nodes directly below `parent`: its children, then looked-up nodes."""
        if not self.looked_up:
            return self.children[parent]
        return self.children[parent] + [node for (above, _), node in self.looked_up.items() if above == parent]

    def q(self, node: int) -> Tensor:
        """`[vocab]`, the distribution that the node's first child was drawn from."""
        found = self.distributions.get(node)
        return self.scores[node].softmax(dim=-1) if found is None else found

    def path(self, node: int) -> list[int]:
        """Tokens on the way from the root, which is left out, down to `node`, included."""
        return [self.tokens[each] for each in self.nodes_to(node)]

    def nodes_to(self, node: int) -> list[int]:
        """The nodes on the way from the root, which is left out, down to `node`, included."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def depth_first(self) -> list[int]:
        """All nodes, parents before children and each subtree contiguous: the order of rows in the target's pass.
        Attention masks then have few blocks (DySpec, appendix C)."""
        order, stack = [], [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += reversed(self.below(node))
        return order

    def as_chain(self) -> DraftTree:
        """Return a `Chain`, which is verified differently, if the tree has one branch; otherwise the tree itself."""
        if self.parents != list(range(-1, len(self))):
            return self
        chain = Chain.__new__(Chain)
        vars(chain).update(vars(self))
        return chain

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def widths(self) -> list[int] | None:
        """Number of nodes of each depth, from 1 on; `None` for chains."""
        counts = Counter(self.depths)
        return [counts[depth] for depth in range(1, len(counts))]

    def judged(self, path: Sequence[int]) -> Iterator[tuple[list[float], int | None]]:
        """For the root and each drawn node of `path`, the accepted nodes without the root, yield the estimates of its
        drawn children, and the rank of the accepted one among them, `None` if none was accepted."""
        drawn = self.drawn(path)
        for node, after in zip((0, *drawn), (*drawn, None), strict=True):
            yield [self.estimates[child] for child in self.children[node]], None if after is None else self.ranks[after]

    def drawn(self, path: Sequence[int]) -> Sequence[int]:
        """The drawn nodes of a path, which precede its looked-up nodes."""
        looked_up = set(self.looked_up.values())
        return [node for node in path if node not in looked_up]


class Chain(DraftTree):
    """A `DraftTree` of one branch.

    Args:
        tokens: k candidates.
        scores: for each drawn candidate the `[vocab]` float32 logits whose softmax q it was drawn from. Further tokens
            were looked up.
        q: these distributions, if drawing has computed them.
    """

    widths = None

    def __init__(self, tokens: Sequence[int] = (), scores: Sequence[Tensor] = (), q: Sequence[Tensor] = ()) -> None:
        count = len(scores)
        self.tokens, self.parents, self.depths = [-1, *tokens[:count]], list(range(-1, count)), list(range(count + 1))
        self.ranks, self.values, self.estimates = [0] * (count + 1), [1.0] * (count + 1), [1.0] * (count + 1)
        self.children, self.looked_up = [[node] for node in range(1, count + 1)] + [[]], {}
        self.scores, self.distributions = dict(enumerate(scores)), dict(enumerate(q))
        self.passes = self.levels = count
        if len(tokens) > count:
            self.followed_by(tokens[count:])

    def followed_by(self, tokens: Sequence[int]) -> Chain:
        """Append candidates that were looked up, and return this chain."""
        for token in tokens:
            self.add(len(self), token, looked_up=True)
        return self

    @property
    def drawn_from(self) -> list[Tensor]:
        """For each drawn candidate the `[vocab]` logits whose softmax it was drawn from."""
        return [self.scores[node] for node in range(self.num_drawn)]


def relations(parents: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return ancestors, bool `[n, n]`, and depths `[n]` of nodes. Row i of the ancestors marks the nodes that node i
    sees, itself included. `parents`: index of each node's parent, -1 for a root; parents come first.

    Example: a root with two children, the first of which has a child, has parents [-1, 0, 0, 1]. Its rows of ancestors
    are 1000, 1100, 1010 and 1101, its depths 0, 1, 1, 2."""
    rows = np.zeros((len(parents),) * 2, dtype=bool)  # torch takes several times as long
    for place, parent in enumerate(parents):
        if parent >= 0:
            rows[place] = rows[parent]
        rows[place, place] = True
    return torch.from_numpy(rows), torch.from_numpy(rows.sum(axis=1) - 1)


class TreePass:
    """Which node each row of a forward pass over a tree reads: `order`, by default depth first, as the target does.

    Example: a root has the children 1 and 2, and 1 has the child 3. The rows are the nodes 0, 1, 3, 2: node 2 is in row
    3."""

    def __init__(self, tree: DraftTree, order: Sequence[int] | None = None) -> None:
        self.tree = tree
        self.order: Sequence[int] = tree.depth_first() if order is None else order  # node of each row
        self.rows = dict(zip(self.order, range(len(self.order)), strict=True))  # row of each node

    def upload(self, device: torch.device, width: int = 0, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Return inputs of the pass, with one copy to the device: tokens `[n]` of all nodes but the root; for
        `tree_inputs` `ancestors` `[w, w]` and `depths` `[w]` of w = n + 1 nodes. If `width` is larger, w is `width`:
        dummies follow, at the root's position, which see only themselves and are seen by no node. If earlier passes
        have read the nodes before row `first`, their tokens and rows of `ancestors` are left out."""
        read = [self.tree.tokens[node] for node in self.order[max(first, 1) :]]
        parents = self.tree.parents
        ancestors, depths = relations([-1, *(self.rows[parents[node]] for node in self.order[1:])])
        if dummies := max(width - len(self.order), 0):
            ancestors = torch.block_diag(ancestors, torch.eye(dummies, dtype=torch.bool, device="cpu"))
            depths = nn.functional.pad(depths, (0, dummies))
        on_host = torch.tensor(read, dtype=torch.long, device="cpu"), ancestors[first:], depths
        tokens, ancestors, depths = upload(on_host, device)
        return tokens, ancestors, depths


def upload(parts: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Copy integer and bool tensors from the host to a device, in one transfer; on a CPU return the same tensors."""
    if device.type == "cpu":
        return list(parts)
    together = torch.cat([part.flatten().long() for part in parts]).to(device)
    pieces = together.split([part.numel() for part in parts])
    return [piece.view(part.shape).to(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
