"""Verification of a sampled tree without waiting for the device in between: all tests first, then one read.

The readable versions are in `verification.py`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import TreeRandomness
from hf_specdecpp.sampling.verification import Verification, residual
from hf_specdecpp.trees.tree import DraftTree


def verify_tree_at_once(
    tree: DraftTree,
    p: Tensor,
    randomness: TreeRandomness,
    verification: Verification,
    order: Sequence[int] | None = None,
) -> tuple[list[int], int]:
    """The same distribution of results as `verify_tree_block` or `verify_tree`: the last accepted node is drawn by the
    chance of each, then the token after it.

    What is left of p at a node does not depend on what its subtrees decide. So all nodes of a depth are tested
    together, their first children at once, then their second ones, and so on.

    Args:
        p: `[nodes, vocab]`, the target's distribution after each node; overwritten by what is left of it.
        order: node of each row of p; by default row i is node i.
    """
    order = range(len(p)) if order is None else order
    weights = ending_chances(tree, p, verification, order)
    row, token = randomness.outcome(weights, lambda chosen: p.index_select(0, chosen), p.shape[-1])
    node, path = order[row], []
    while node > 0:
        path.append(node)
        node = tree.parents[node]
    return path[::-1], token


def ending_chances(tree: DraftTree, p: Tensor, verification: Verification, order: Sequence[int]) -> Tensor:
    """`[nodes]` float64, the chance that each node is the last accepted one; `p` is overwritten as above.

    For p = [0.5, 0.3, 0.2] at the root and its child 1 from q = [0.2, 0.6, 0.2]: [0.5, 0.5].
    """
    levels, last_first = _upload(tree, p.device, order)
    own = torch.ones(len(p), dtype=torch.float64, device=p.device)
    test = _test_block if verification == "block" else _test_siblings
    for level in levels:
        test(level, p, own)
    if verification == "token":
        return own
    tested = own.index_select(0, last_first)
    rejected = torch.cat((tested.new_ones(1), (1.0 - tested).cumprod(0)[:-1]))
    return own.index_copy(0, last_first, tested * rejected)


@dataclass
class RankedNodes:
    """The nodes of a depth that have children, those with the most children first.

    Attributes:
        nodes: `[n]`, by their rows in p.
        children, tokens: for each rank the children of that rank (rows) and their tokens, `[m]` with m <= n.
        scores: `[n, vocab]`, logits whose softmax the first children were drawn from.
    """

    nodes: Tensor
    children: list[Tensor]
    tokens: list[Tensor]
    scores: Tensor


def _test_block(level: RankedNodes, p: Tensor, own: Tensor) -> None:
    """`own` `[nodes]`, what a node is owed, becomes what is left of it after its children; theirs is entered."""
    owed = own.index_select(0, level.nodes)
    mass = p.index_select(0, level.nodes) * owed[:, None].to(p.dtype)
    q = level.scores.softmax(dim=-1)
    for children, tokens in zip(level.children, level.tokens, strict=True):
        rows, drawn_from, due = mass[: len(children)], q[: len(children)], owed[: len(children)]
        own.index_copy_(0, children, _ratios(rows, drawn_from, tokens))
        left = (rows - drawn_from).clamp_min_(0.0)
        sums = left.sum(-1).double()
        total = sums + 1.0 - due
        rows.copy_(torch.where(total[:, None] > 0.0, left / total[:, None].to(left.dtype), rows))
        due.copy_(torch.where(total > 0.0, sums / total, due))
        _remove(drawn_from, tokens)
    own.index_copy_(0, level.nodes, owed)
    p.index_copy_(0, level.nodes, mass)


def _test_siblings(level: RankedNodes, p: Tensor, own: Tensor) -> None:
    """`own` `[nodes]`, the chance that a node is accepted, becomes that of ending there; its children's is entered."""
    reached = own.index_select(0, level.nodes)
    rest = p.index_select(0, level.nodes)
    q = level.scores.softmax(dim=-1)
    for children, tokens in zip(level.children, level.tokens, strict=True):
        rows, drawn_from, tested = rest[: len(children)], q[: len(children)], reached[: len(children)]
        accepts = _ratios(rows, drawn_from, tokens)
        own.index_copy_(0, children, tested * accepts)
        tested.mul_(1.0 - accepts)
        rows.copy_(residual(rows, drawn_from))
        _remove(drawn_from, tokens)
    own.index_copy_(0, level.nodes, reached)
    p.index_copy_(0, level.nodes, rest)


def _ratios(rows: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """min(1, rows(y) / q(y)), `[m]` float64, of `rows` and `q` `[m, vocab]` and the tokens y `[m]`."""
    of_rows, of_q = (probs.gather(-1, tokens[:, None])[:, 0].double() for probs in (rows, q))
    return (of_rows / of_q).clamp_max(1.0)


def _remove(q: Tensor, tokens: Tensor) -> None:
    """Take the tokens `[m]` out of `q` `[m, vocab]` and renormalise it."""
    q.scatter_(-1, tokens[:, None], 0.0)
    q.div_(q.sum(-1, keepdim=True))


def _upload(tree: DraftTree, device: torch.device, order: Sequence[int]) -> tuple[list[RankedNodes], Tensor]:
    """The levels of the tree from the root down, and `_subtrees_first`, by the rows of nodes that stand in `order`: one
    copy to the device for all of them."""
    rows = {node: row for row, node in enumerate(order)}
    depths: list[list[int]] = [[] for _ in range(tree.depth + 1)]
    for node, children in enumerate(tree.children):
        if children:
            depths[tree.depths[node]].append(node)
    lists, parents = (
        [[rows[node] for node in _subtrees_first(tree)]],
        [sorted(nodes, key=lambda node: -len(tree.children[node])) for nodes in depths if nodes],
    )
    for nodes in parents:
        lists.append([rows[node] for node in nodes])
        for rank in range(len(tree.children[nodes[0]])):
            children = [tree.children[node][rank] for node in nodes if len(tree.children[node]) > rank]
            lists += [[rows[child] for child in children], [tree.tokens[child] for child in children]]
    parts = iter(torch.tensor(sum(lists, []), device=device).split([len(each) for each in lists]))
    last_first, levels = next(parts), []
    for nodes in parents:
        ranks = RankedNodes(next(parts), [], [], torch.stack([tree.scores[node] for node in nodes]).to(device))
        for _ in range(len(tree.children[nodes[0]])):
            ranks.children.append(next(parts))
            ranks.tokens.append(next(parts))
        levels.append(ranks)
    return levels, last_first


def _subtrees_first(tree: DraftTree) -> list[int]:
    """All nodes, each after its subtree, which is the order of `verify_tree_block`.

    A root with two children, the first of which has a child: [2, 1, 3, 0], if they are numbered depth first.
    """
    order, stack = [], [0]
    while stack:  # parents first and last children first; reversed below
        node = stack.pop()
        order.append(node)
        stack += tree.children[node]
    return order[::-1]
