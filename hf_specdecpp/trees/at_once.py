"""Verification of a sampled tree without waiting for the device in between: all tests first, then one read.

The readable versions are in `verification.py`; a test compares the two.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from hf_specdecpp.sampling.at_once import as_tests, weights_of
from hf_specdecpp.sampling.randomness import TreeRandomness, widest
from hf_specdecpp.sampling.verification import Verification
from hf_specdecpp.trees.tree_pass import Families, TreePass, parents_first


def verify_tree_at_once(
    tree_pass: TreePass, p: Tensor, randomness: TreeRandomness, verification: Verification
) -> tuple[list[int], int]:
    """The same distribution of results as `verify_tree_block` or `verify_tree`: the last accepted node is drawn by the
    tests of all, then the token after it.

    What is left of p at a node does not depend on what its subtrees decide. So all nodes of a depth are tested
    together, their first children at once, then their second ones, and so on.

    Args:
        p: `[rows, vocab]`, the target's distribution after each node.
    """
    tests, rows, left = _tests(tree_pass, p, verification)

    def after(weights: Tensor, chosen: Tensor) -> Tensor:
        return weights.index_select(0, rows.index_select(0, chosen))

    index, token = randomness.outcome(tests, partial(after, left), partial(after, p))
    parents, node, path = tree_pass.tree.parents, parents_first(tree_pass.tree)[index], []
    while node > 0:
        path.append(node)
        node = parents[node]
    return path[::-1], token


def ending_chances(tree_pass: TreePass, p: Tensor, verification: Verification) -> Tensor:
    """`[rows]`, the chance that each node is the last accepted one.

    For p = [0.5, 0.3, 0.2] at the root and its child 1 from q = [0.2, 0.6, 0.2]: [0.5, 0.5].
    """
    tests, rows, _ = _tests(tree_pass, p, verification)
    return torch.empty_like(tests).index_copy_(0, rows, weights_of(tests))


def _tests(tree_pass: TreePass, p: Tensor, verification: Verification) -> tuple[Tensor, Tensor, Tensor]:
    """The chances `[rows]` with which nodes pass their tests, those of a subtree before that of its root, last first;
    the nodes' rows, parents first; and weights `[rows, vocab]` of what follows each node if it is the last."""
    levels, rows = tree_pass.families(p.device)
    own = torch.ones(len(p), dtype=widest(p.device), device=p.device)
    left = p.clone()
    for level in levels:
        _test(level, left, own, verification)
    own = own.index_select(0, rows)
    return own if verification == "block" else as_tests(own), rows, left


def _test(level: Families, left: Tensor, own: Tensor, verification: Verification) -> None:
    """Test the children of a depth. `own` `[rows]` becomes for the parents what is left to them, and is entered for the
    children: the chance with which a node has to be accepted (block), or with which it is the last (token). `left`
    `[rows, vocab]` becomes, for the parents, what is left of p.

    As `docs/verification.md` says, with a for what a parent is owed (1 token by token). Here M is kept without its
    denominator: M = U / R with R = 1 - a + sum(U), and D = q / Z without the siblings before. Then a child y has the
    chance U(y) / (f q(y)) with f = R / Z, and U becomes (U - f q)+.
    """
    due, masses = own.index_select(0, level.parents), left.index_select(0, level.parents)
    rest = torch.zeros_like(due)
    if verification == "block":
        rest = 1.0 - due
        masses.mul_(due[:, None])
    q = level.scores.softmax(dim=-1)
    of_q = q[level.places, level.tokens]
    of_masses, factors = [], [torch.ones_like(due)]
    ranks = level.tokens[:, None].split(level.counts)
    for rank, tokens in enumerate(ranks):
        count = len(tokens)
        mass, drawn_from = masses[:count], q[:count]
        of_masses.append(mass.gather(-1, tokens)[:, 0])
        if rank == 0:
            mass.sub_(drawn_from).clamp_min_(0.0)
            sums = mass.sum(-1, dtype=own.dtype)
            scales = rest + sums
            continue
        drawn_from.scatter_(-1, ranks[rank - 1][:count], 0.0)
        factors.append(scales[:count] / drawn_from.sum(-1, dtype=own.dtype))
        mass.addcmul_(drawn_from, factors[-1][:, None].to(drawn_from.dtype), value=-1.0).clamp_min_(0.0)
        torch.sum(mass, -1, dtype=own.dtype, out=sums[:count])
        torch.add(rest[:count], sums[:count], out=scales[:count])
    left.index_copy_(0, level.parents, masses)
    # Where nothing is left, a child before is always accepted, and the others do not matter.
    accepts = (torch.cat(of_masses) / torch.cat(factors).mul_(of_q)).clamp_max_(1.0).nan_to_num_(0.0)
    if verification == "block":
        own.index_copy_(0, level.children, accepts)
        due = sums / scales.clamp_min_(torch.finfo(scales.dtype).tiny)
    else:
        for children, accept in zip(level.children.split(level.counts), accepts.split(level.counts), strict=True):
            tested = due[: len(accept)]
            own.index_copy_(0, children, tested * accept)
            tested.mul_(1.0 - accept)
    own.index_copy_(0, level.parents, due)
