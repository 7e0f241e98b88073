"""Verification of a sampled tree without waiting for the device in between: all tests first, then one read.

The readable versions are in `verification.py`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_specdecpp.sampling.at_once import as_tests, weights_of
from hf_specdecpp.sampling.randomness import TreeRandomness
from hf_specdecpp.sampling.verification import Verification, residual
from hf_specdecpp.trees.tree_pass import Families, TreePass, parents_first


def verify_tree_at_once(
    tree_pass: TreePass, p: Tensor, randomness: TreeRandomness, verification: Verification
) -> tuple[list[int], int]:
    """The same distribution of results as `verify_tree_block` or `verify_tree`: the last accepted node is drawn by the
    chance of each, then the token after it.

    What is left of p at a node does not depend on what its subtrees decide. So all nodes of a depth are tested
    together, their first children at once, then their second ones, and so on.

    Args:
        p: `[rows, vocab]`, the target's distribution after each node; overwritten by what is left of it.
    """
    tests, rows = _tests(tree_pass, p, verification)

    def left(chosen: Tensor) -> Tensor:
        return p.index_select(0, rows.index_select(0, chosen))

    index, token = randomness.outcome(tests, left, left)
    parents, node, path = tree_pass.tree.parents, parents_first(tree_pass.tree)[index], []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1], token


def ending_chances(tree_pass: TreePass, p: Tensor, verification: Verification) -> Tensor:
    """`[rows]` float64, the chance that each node is the last accepted one; `p` is overwritten as above.

    For p = [0.5, 0.3, 0.2] at the root and its child 1 from q = [0.2, 0.6, 0.2]: [0.5, 0.5].
    """
    tests, rows = _tests(tree_pass, p, verification)
    return torch.empty_like(tests).index_copy_(0, rows, weights_of(tests))


def _tests(tree_pass: TreePass, p: Tensor, verification: Verification) -> tuple[Tensor, Tensor]:
    """The chances `[rows]` with which nodes pass their tests, those of a subtree before that of its root, last first;
    and the nodes' rows, parents first."""
    levels, rows = tree_pass.families(p.device)
    own = torch.ones(len(p), dtype=torch.float64, device=p.device)
    test = _test_block if verification == "block" else _test_siblings
    for level in levels:
        test(level, p, own)
    own = own.index_select(0, rows)
    return own if verification == "block" else as_tests(own), rows


def _test_block(level: Families, p: Tensor, own: Tensor) -> None:
    """`own` `[rows]`, what a node is owed, becomes what is left of it after its children; theirs is entered."""
    owed = own.index_select(0, level.parents)
    mass = p.index_select(0, level.parents) * owed[:, None].to(p.dtype)
    tiny = torch.finfo(p.dtype).tiny
    for children, tokens, drawn_from in _ranks(level):
        rows, due = mass[: len(children)], owed[: len(children)]
        own.index_copy_(0, children, _ratios(rows, drawn_from, tokens))
        left = rows.sub_(drawn_from).clamp_min_(0.0)
        sums = left.sum(-1, dtype=torch.float64)
        rejected = (1.0 - due).add_(sums).clamp_min_(tiny)  # 0 where the child is always accepted: nothing is left
        left.div_(rejected[:, None].to(left.dtype))
        torch.div(sums, rejected, out=due)
    own.index_copy_(0, level.parents, owed)
    p.index_copy_(0, level.parents, mass)


def _test_siblings(level: Families, p: Tensor, own: Tensor) -> None:
    """`own` `[rows]`, the chance that a node is accepted, becomes that of ending there; its children's is entered."""
    reached = own.index_select(0, level.parents)
    rest = p.index_select(0, level.parents)
    for children, tokens, drawn_from in _ranks(level):
        rows, tested = rest[: len(children)], reached[: len(children)]
        accepts = _ratios(rows, drawn_from, tokens)
        own.index_copy_(0, children, tested * accepts)
        tested.mul_(1.0 - accepts)
        rows.copy_(residual(rows, drawn_from))
    own.index_copy_(0, level.parents, reached)
    p.index_copy_(0, level.parents, rest)


def _ranks(level: Families) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """First children, then second ones, and so on: their rows `[m]`, their tokens `[m]`, and the distributions
    `[m, vocab]` that they were drawn from: without the siblings before them."""
    q, before = level.scores.softmax(dim=-1), None
    for children, tokens in zip(level.children, level.tokens, strict=True):
        q = q[: len(children)]
        if before is not None:
            q.scatter_(-1, before[: len(children), None], 0.0)
            q.div_(q.sum(-1, keepdim=True))
        yield children, tokens, q
        before = tokens


def _ratios(rows: Tensor, q: Tensor, tokens: Tensor) -> Tensor:
    """min(1, rows(y) / q(y)), `[m]` float64, of `rows` and `q` `[m, vocab]` and the tokens y `[m]`."""
    of_rows, of_q = (probs.gather(-1, tokens[:, None])[:, 0] for probs in (rows, q))
    return (of_rows / of_q).clamp_max_(1.0).double()
