"""A token tree as the target reads it in one pass, and all that its device is told about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor, nn

from hf_specdecpp.models.causal_lm import upload
from hf_specdecpp.trees.tree import DraftTree, Lineage


@dataclass
class Families:
    """The nodes of a depth that have children, those with the most children first, by their rows in the pass.

    Example: nodes 3 and 5, the second of which has a child fewer: their first children, then the other one of node 3.
    `counts` are 2 and 1, `places` 0, 1 and 0.

    Attributes:
        parents: `[n]`.
        children, tokens, places: `[c]`, all first children, then all second ones and so on, their tokens, and the place
            of the parent of each among `parents`.
        counts: how many there are of each rank.
        scores: `[n, vocab]`, logits whose softmax the first children were drawn from.
    """

    parents: Tensor
    children: Tensor
    tokens: Tensor
    places: Tensor
    counts: list[int]
    scores: Tensor


class TreePass:
    """The rows of a pass over a tree: which node is read in which.

    A tree whose root has the children 1 and 2, of which 1 has the child 3, is read as the nodes 0, 1, 3, 2: node 2 is
    in row 3.

    Args:
        tree: its shape is taken as it is now.
        order: of the nodes; by default depth first.

    Attributes:
        order: node of each row.
        rows: row of each node.
    """

    def __init__(self, tree: DraftTree, order: Sequence[int] | None = None) -> None:
        self.tree = tree
        self.order: Sequence[int]
        self.rows: Sequence[int] | dict[int, int]
        if tree.is_chain:
            self.order = self.rows = range(len(tree) + 1)
        else:
            self.order = tree.depth_first() if order is None else list(order)
            self.rows = {node: row for row, node in enumerate(self.order)}
        self._lists: list[Tensor] | None = None  # of `_family_lists`, on a device

    def rows_of(self, path: Sequence[int]) -> list[int]:
        """The rows of the root and of an accepted path."""
        return [self.rows[node] for node in (0, *path)]

    def upload(self, device: torch.device, families: bool = False, width: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """What the pass needs, with one copy to the device; the shape of the `families`, too, if they are asked for.

        Args:
            width: rows of the pass, if there are more than nodes. Dummies fill them up, which stand where the root
                stands, and see and are seen by none of the nodes.

        Returns:
            Tokens `[n]` of all nodes but the root, and `ancestors` `[width, width]` and `depths` `[width]` as
            `tree_inputs` takes them.
        """
        fed = torch.tensor([self.tree.tokens[node] for node in self.order[1:]], dtype=torch.long)
        ancestors, depths = Lineage().feed(self.tree, self.order)
        if dummies := max(width - len(self.order), 0):
            ancestors = torch.block_diag(ancestors, torch.eye(dummies, dtype=torch.bool))
            depths = nn.functional.pad(depths, (0, dummies))
        parts = [fed, ancestors, depths, *(self._family_lists() if families else ())]
        tokens, ancestors, depths, *lists = upload(parts, device)
        self._lists = lists or None
        return tokens, ancestors, depths

    def families(self, device: torch.device) -> tuple[list[Families], Tensor]:
        """The families of each depth from the root down, and the rows `[n + 1]` of `parents_first`."""
        lists = upload(self._family_lists(), device) if self._lists is None else self._lists
        parents_first_rows, *rest = lists
        parts, families = iter(rest), []
        for nodes in self._parents:
            scores = torch.stack([self.tree.scores[node] for node in nodes]).to(device)
            parents, children, tokens, places = islice(parts, 4)
            families.append(Families(parents, children, tokens, places, self._counts(nodes), scores))
        return families, parents_first_rows

    @cached_property
    def _parents(self) -> list[list[int]]:
        """For each depth the nodes that have children, those with the most children first."""
        tree = self.tree
        depths: list[list[int]] = [[] for _ in range(tree.depth + 1)]
        for node, children in enumerate(tree.children):
            if children:
                depths[tree.depths[node]].append(node)
        return [sorted(nodes, key=lambda node: -len(tree.children[node])) for nodes in depths if nodes]

    def _counts(self, parents: Sequence[int]) -> list[int]:
        """How many of them, of which the first has the most children, have one child or more, two or more and so on."""
        numbers = [len(self.tree.children[node]) for node in parents]
        return [sum(number > rank for number in numbers) for rank in range(numbers[0])]

    def _family_lists(self) -> list[Tensor]:
        """What `families` are made of, on the host."""
        tree, rows = self.tree, self.rows
        lists = [[rows[node] for node in parents_first(tree)]]
        for parents in self._parents:
            ranked = [
                (place, tree.children[parents[place]][rank])
                for rank, count in enumerate(self._counts(parents))
                for place in range(count)
            ]
            lists += [
                [rows[node] for node in parents],
                [rows[child] for _, child in ranked],
                [tree.tokens[child] for _, child in ranked],
                [place for place, _ in ranked],
            ]
        return [torch.tensor(each) for each in lists]


def parents_first(tree: DraftTree) -> list[int]:
    """All nodes, each before its subtree, and last children before first ones: the reverse of the order in which
    `verify_tree_block` tests them.

    A root with two children, the first of which has a child: [0, 3, 1, 2], if they are numbered depth first.
    """
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += tree.children[node]
    return order
