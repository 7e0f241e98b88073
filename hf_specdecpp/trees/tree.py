"""What a round submits: a token tree, or a chain, which is a tree of one branch. Flat arrays, no model inside."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class DraftTree:
    """Nodes in the order in which they were drawn. Node 0 is the root: the last emitted token, not a candidate.

    Example: the text ends with 6, and the chain 7 8 was drafted after it. `tokens` are [6, 7, 8], `parents` [-1, 0, 1]
    and `children` [[1], [2], []]; `scores[0]` is what 7 was drawn from, `scores[1]` what 8 was.

    Args:
        root: the last emitted token. Nobody asks a chain for it.

    Attributes:
        tokens, parents, depths: of each node; the root has parent -1 and depth 0.
        ranks: how many siblings were drawn before each node.
        values: value of the slot that each node was drawn at: the estimated chance that the verifier gets there, known
            before the draw (the root's is 1).
        estimates: chance that the node is accepted once the verifier got there.
        children: of each node, in the order drawn.
        looked_up: further nodes, by parent and token (`follow`). They were not drawn, and are no `children`.
        scores: for each node that the draft was asked about, `[vocab]` logits: its first child was drawn from their
            softmax q, each further one from q without the earlier ones, renormalised.
        distributions: q of such nodes, where drawing has computed it.
        is_chain: whether it was drafted as a chain.
        passes: draft passes that it took.
        levels: how often the draft was asked.
    """

    def __init__(self, root: int = -1) -> None:
        self.tokens, self.parents, self.depths, self.ranks = [root], [-1], [0], [0]
        self.values, self.estimates = [1.0], [1.0]
        self.children: list[list[int]] = [[]]
        self.looked_up: dict[tuple[int, int], int] = {}
        self.scores: dict[int, Tensor] = {}
        self.distributions: dict[int, Tensor] = {}
        self.is_chain = False
        self.passes = self.levels = 0
        self._ids: Tensor | None = None  # the candidates of a chain, where they were drawn

    @classmethod
    def chain(
        cls, tokens: Sequence[int] = (), scores: Sequence[Tensor] = (), q: Sequence[Tensor] = (),
        ids: Tensor | None = None, root: int = -1,
    ) -> DraftTree:  # fmt: skip
        """A chain as a tree of one branch.

        Args:
            tokens: k candidates.
            scores: for each candidate that was drawn, `[vocab]` float32 logits whose softmax q it was drawn from.
                Further tokens were looked up.
            q: these distributions, where drawing has computed them.
            ids: the candidates `[k]` int64 where they were drawn, so that they need no upload to that device.
        """
        tree, count = cls(root), len(scores)
        if count:
            tree.tokens += tokens[:count]
            tree.parents, tree.depths = list(range(-1, count)), list(range(count + 1))
            tree.ranks, tree.values, tree.estimates = [0] * (count + 1), [1.0] * (count + 1), [1.0] * (count + 1)
            tree.children = [[node + 1] for node in range(count)] + [[]]
            tree.scores, tree.distributions = dict(enumerate(scores)), dict(enumerate(q))
        tree.is_chain, tree._ids, tree.passes, tree.levels = True, ids, count, count
        return tree.followed_by(tokens[count:])

    def followed_by(self, tokens: Sequence[int]) -> DraftTree:
        """The chain itself, with candidates at its end that were looked up."""
        if tokens:
            self._ids = None
        for token in tokens:
            self.follow(len(self), token)
        return self

    @property
    def candidates(self) -> list[int]:
        """Tokens of all nodes but the root."""
        return self.tokens[1:]

    @property
    def drawn_from(self) -> list[Tensor]:
        """Of a chain: for each candidate that was drawn the `[vocab]` logits whose softmax it was drawn from."""
        return list(self.scores.values())

    @property
    def num_drawn(self) -> int:
        """Candidates that were drawn."""
        return len(self) - len(self.looked_up)

    def ids(self, device: torch.device) -> Tensor:
        """The candidates `[k]` on a device."""
        if self._ids is None and not len(self):
            return torch.empty(0, dtype=torch.long, device=device)
        if self._ids is None:
            self._ids = torch.tensor(self.candidates, dtype=torch.long)
        self._ids = self._ids.to(device)  # the pass and its verification ask for them
        return self._ids

    def __len__(self) -> int:
        """Number of candidates: all nodes but the root."""
        return len(self.tokens) - 1

    def add(self, parent: int, token: int, value: float = 0.0, estimate: float = 0.0) -> int:
        """Append a child of `parent` after its other children; the new node."""
        node = self._append(parent, token, value, estimate)
        self.ranks.append(len(self.children[parent]))
        self.children[parent].append(node)
        return node

    def follow(self, parent: int, token: int, value: float = 0.0, estimate: float = 0.0) -> int:
        """Append a token that was looked up below `parent`; the new node. None of its children has this token."""
        node = self._append(parent, token, value, estimate)
        self.ranks.append(0)
        self.looked_up[parent, token] = node
        return node

    def _append(self, parent: int, token: int, value: float, estimate: float) -> int:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.values.append(value)
        self.estimates.append(estimate)
        self.children.append([])
        return node

    def below(self, parent: int) -> list[int]:
        """All nodes right below one: its children, then those that were looked up."""
        if not self.looked_up:
            return self.children[parent]
        return self.children[parent] + [node for (above, _), node in self.looked_up.items() if above == parent]

    def q(self, node: int) -> Tensor:
        """`[vocab]`, what the node's first child was drawn from."""
        found = self.distributions.get(node)
        return self.scores[node].softmax(dim=-1) if found is None else found

    def path(self, node: int) -> list[int]:
        """Tokens from below the root down to `node`."""
        return [self.tokens[each] for each in self.nodes_to(node)]

    def nodes_to(self, node: int) -> list[int]:
        """The nodes from below the root down to `node`."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def depth_first(self) -> list[int]:
        """All nodes, parents before children and each subtree in one piece: the order in which the target reads them.

        (Rows of attention then fall into few blocks; DySpec, appendix C.)
        """
        below = [list(children) for children in self.children]
        for (parent, _), node in self.looked_up.items():
            below[parent].append(node)
        order, stack = [], [0]
        while stack:
            node = stack.pop()
            order.append(node)
            stack += reversed(below[node])
        return order

    def forget(self) -> None:
        """Let go of what candidates were drawn from, which is large."""
        self.scores.clear()
        self.distributions.clear()
        self._ids = None

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def width(self) -> int:
        """Most nodes of one depth."""
        return max(self.widths, default=0)

    @property
    def widths(self) -> list[int]:
        """Number of nodes of each depth, from 1 on."""
        counts = [0] * self.depth
        for depth in self.depths[1:]:
            counts[depth - 1] += 1
        return counts

    def judged(self, path: Sequence[int]) -> Iterator[tuple[list[float], int | None]]:
        """For the root and each drawn node of the accepted `path`: its children's estimates, and the rank of the
        accepted."""
        drawn = self.drawn(path)
        for node, after in zip((0, *drawn), (*drawn, None), strict=True):
            yield [self.estimates[child] for child in self.children[node]], None if after is None else self.ranks[after]

    def drawn(self, path: Sequence[int]) -> Sequence[int]:
        """The part of a path that was drawn: what was looked up comes after it."""
        if not self.looked_up:
            return path
        looked_up = set(self.looked_up.values())
        return [node for node in path if node not in looked_up]

    @property
    def expected_accepted(self) -> float:
        """Number of candidates that will be accepted if the estimates are right."""
        return sum(value * estimate for value, estimate in zip(self.values[1:], self.estimates[1:], strict=True))


class Lineage:
    """Who descends from whom among nodes that are fed to a model piece by piece.

    Attributes:
        nodes: fed so far, in this order.
        ancestors: bool `[n, n]`: row i marks the nodes that node i sees, itself included.
    """

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.places: dict[int, int] = {}
        self.ancestors = torch.zeros((0, 0), dtype=torch.bool)

    def feed(self, tree: DraftTree, nodes: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Append `nodes`, each after its parent, at most the first of them the root.

        Returns:
            `ancestors` `[n_query, n]` of the new nodes and `depths` `[n]` of all, as `tree_inputs` takes them.
        """
        before = len(self.nodes)
        for node in nodes:
            self.places[node] = len(self.nodes)
            self.nodes.append(node)
        parents = [self.places.get(tree.parents[node], -1) for node in nodes]
        self.ancestors, depths = relations(parents, self.ancestors)
        return self.ancestors[before:], depths


def relations(parents: Sequence[int], known: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Who descends from whom, and how deep each node lies.

    A root with two children, the first of which has a child, has parents [-1, 0, 0, 1]. Its rows of ancestors are
    1000, 1100, 1010 and 1101, its depths 0, 1, 1, 2.

    Args:
        parents: place of each node's parent, -1 for a root; parents come first.
        known: bool `[m, m]`, `ancestors` of m nodes that come before these; none by default.

    Returns:
        `ancestors`, bool `[n, n]`: row i marks the nodes that node i sees, itself included; and `depths` `[n]`.
    """
    known = torch.zeros((0, 0), dtype=torch.bool) if known is None else known
    before, count = len(known), len(known) + len(parents)
    ancestors = torch.zeros((count, count), dtype=torch.bool)
    ancestors[:before, :before] = known
    rows = ancestors.numpy()
    for place, parent in enumerate(parents, before):
        if parent >= 0:
            rows[place] = rows[parent]
        rows[place, place] = True
    return ancestors, ancestors.sum(dim=1) - 1
