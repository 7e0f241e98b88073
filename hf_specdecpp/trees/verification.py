"""Which nodes of a tree does the target accept, and what does it say instead?

Pure functions of p, q and randomness, explained in `docs/verification.md` and `docs/dyspec.md`. The readable versions
run on a CPU. `verify_tree_at_once` is for devices from which each read is slow: all tests first, then one read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness, TreeRandomness, widest
from hf_specdecpp.sampling.verification import Verification, as_tests, remaining, sibling_tests, weights_of
from hf_specdecpp.trees.tree import DraftTree, Families, TreePass, parents_first


def verify_tree_greedy(tree: DraftTree, likeliest: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk down the tree along the `likeliest` tokens, which is asked about nodes on the way only: the accepted nodes,
    and the token that follows them."""
    path: list[int] = []
    node = 0
    while True:
        choice = likeliest(node)
        if (child := tree.child(node, choice)) is None:
            return path, choice
        path.append(child)
        node = child


def verify_tree(tree: DraftTree, p: Callable[[int], Tensor], randomness: Randomness) -> tuple[list[int], int]:
    """DySpec (arXiv 2410.11744), Algorithm 3, with the bonus at a leaf: what is emitted is distributed exactly as p.

    Args:
        tree: its siblings were drawn one after another, without replacement.
        p: gives `[vocab]`, the target's distribution after a node. Only asked about nodes on the way.

    Returns:
        The accepted nodes, and the token that follows them: from what the rejected children left of p, or from p itself
        where there were no children.
    """
    path: list[int] = []
    node = 0
    while True:
        child, token = test_children(tree, node, p(node), randomness)
        if child is None:
            return path, token
        path.append(child)
        node = child


def test_children(tree: DraftTree, node: int, p: Tensor, randomness: Randomness) -> tuple[int | None, int]:
    """A level of `verify_tree`: the accepted child of a node, if any, and the token after the node. `p`: `[vocab]`."""
    tests = child_tests(tree, node, p)
    # zip asks for the next sibling first: nothing is computed behind an accepted one.
    for child, (chance, _) in zip(tree.children[node], tests, strict=False):
        if randomness.bernoulli(float(chance)):
            return child, tree.tokens[child]
    _, left = next(tests)
    return None, int(randomness.categorical(left))


@dataclass
class Open:
    """A node whose subtree is being verified, after some of its children were rejected."""

    node: int
    owed: float  # the chance that the node has to be accepted with, alone or with a descendant
    mass: Tensor  # `[vocab]`, how much of each next token is owed; sums to `owed`
    q: Tensor  # `[vocab]`, what the next child was drawn from
    tested: int = 0  # rejected children


def verify_tree_block(tree: DraftTree, p: Callable[[int], Tensor], randomness: Randomness) -> tuple[list[int], int]:
    """Traversal verification (arXiv 2505.12398), for siblings drawn without replacement: the output is exactly p.

    Block verification for trees: a node is tested after all below it. A node is owed a chance a, 1 at the root, and
    each next token x its share M(x) = a p(x). Child y, drawn from D, is owed min(1, M(y) / D(y)), and its subtree goes
    first. If all of that is rejected, with s = sum of (M - D)+,

        M <- (M - D)+ / (s + 1 - a),    a <- s / (s + 1 - a),    D <- norm(D without y),

    and the next child follows. At last the node itself is accepted with chance a, and the token after it is drawn from
    norm(M). On a chain this is `verify_block`; where only the root has children it is `verify_tree`.

    For p = [0.5, 0.3, 0.2] and the child 1 from [0.2, 0.6, 0.2], without children, the child is owed 0.5. Rejected, it
    leaves M = [1, 0, 0] and a = 1 to the root.

    Arguments and results are those of `verify_tree`; p is asked about every node that has children, until one accepts.
    """
    stack = [_open(tree, 0, 1.0, p)]
    while True:
        top = stack[-1]
        children = tree.children[top.node]
        if top.tested < len(children):
            child = children[top.tested]
            owed = float(top.mass[tree.tokens[child]]) / float(top.q[tree.tokens[child]])
            owed = min(1.0, owed) if owed > 0.0 else 0.0  # also where p is nan
            stack.append(_open(tree, child, owed, p))
        elif len(stack) == 1 or randomness.bernoulli(top.owed):  # the root always passes
            rest = top.mass if children and float(top.mass.sum()) > 0.0 else p(top.node)
            return [each.node for each in stack[1:]], int(randomness.categorical(rest))
        else:
            stack.pop()
            _reject(stack[-1], tree.tokens[top.node])


def _open(tree: DraftTree, node: int, owed: float, p: Callable[[int], Tensor]) -> Open:
    if owed == 0.0 or not tree.children[node]:  # nothing to find out below
        nothing = torch.empty(0)
        return Open(node, owed, nothing, nothing, tested=len(tree.children[node]))
    mass = p(node)
    return Open(node, owed, owed * mass, tree.q(node).to(mass.device))


def _reject(node: Open, token: int) -> None:
    """Take note that the next child, `token`, was rejected with all of its subtree."""
    node.mass.sub_(node.q).clamp_min_(0.0)
    left = float(node.mass.sum())
    total = left + 1.0 - node.owed
    if total > 0.0:
        node.mass.div_(total)
        node.owed = left / total
    node.q = node.q.clone()  # the tree's own stays as it was drawn from
    node.q[token] = 0.0
    node.q.div_(node.q.sum())
    node.tested += 1


def follow_tree(tree: DraftTree, path: list[int], token: int, draw: Callable[[int], int]) -> tuple[list[int], int]:
    """Go on from what was verified, `path` and `token`, along candidates that were looked up: the same, further down.

    Such a candidate is one token for certain, so it is accepted exactly if it is what is drawn from the target's
    distribution: the token after the path may be one, then the token drawn after that, and so on. `draw` gives a token
    from the target's distribution after a node, and is asked about one node after the other.
    """
    node = path[-1] if path else 0
    while (found := tree.looked_up.get((node, token))) is not None:
        path, node = [*path, found], found
        token = draw(node)
    return path, token


def child_tests(tree: DraftTree, node: int, p: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`sibling_tests` of the node's children, given the target's distribution after the node, `[vocab]`."""
    tokens = torch.tensor([tree.tokens[child] for child in tree.children[node]], device=p.device).unbind()
    q = tree.q(node).to(p.device) if tokens else p
    return sibling_tests(p, remaining(q, tokens), tokens)


def verify_tree_at_once(
    tree_pass: TreePass, p: Tensor, randomness: TreeRandomness, verification: Verification
) -> tuple[list[int], int]:
    """The same distribution of results as `verify_tree_block` or `verify_tree`: the last accepted node is drawn by the
    tests of all, then the token after it. `p`: `[rows, vocab]`, the target's distribution after each node.

    What is left of p at a node does not depend on what its subtrees decide. So all nodes of a depth are tested
    together, their first children at once, then their second ones, and so on.
    """
    tests, rows, left = _tests(tree_pass, p, verification)

    def after(weights: Tensor, chosen: Tensor) -> Tensor:
        return weights.index_select(0, rows.index_select(0, chosen))

    index, token = randomness.outcome(tests, partial(after, left), partial(after, p))
    return tree_pass.tree.nodes_to(parents_first(tree_pass.tree)[index]), token


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
        due = torch.where(sums.isnan(), due, sums / scales.clamp_min_(torch.finfo(scales.dtype).tiny))
    else:
        for children, accept in zip(level.children.split(level.counts), accepts.split(level.counts), strict=True):
            tested = due[: len(accept)]
            own.index_copy_(0, children, tested * accept)
            tested.mul_(1.0 - accept)
    own.index_copy_(0, level.parents, due)
