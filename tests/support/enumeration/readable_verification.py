"""Verification as the papers have it, with loops over numbers, which the tensor functions of the package are compared
with. Nothing here is shared with `hf_specdecpp.trees.verification` and
`hf_specdecpp.trees.verification`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees.tree import DraftTree


def verify_chain(candidates: Sequence[int], p: Tensor, q: Tensor, randomness: Randomness) -> tuple[int, int]:
    """Speculative sampling, token by token (arXiv 2211.17192, Algorithm 1): the output is distributed exactly as p.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`; ids.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[k, vocab]` probabilities of the draft.

    Returns:
        Number of accepted candidates, and the token that follows them: from the residual after a rejection, from p
        (the bonus) when all were accepted.
    """
    ratios = ratios_of(candidates, p, q)
    accepted = 0
    while accepted < len(candidates) and randomness.bernoulli(min(1.0, ratios[accepted])):
        accepted += 1
    emits = p[accepted] if accepted == len(candidates) else residual(p[accepted], q[accepted])
    return accepted, int(randomness.categorical(emits))


def verify_block(candidates: Sequence[int], p: Tensor, q: Tensor, randomness: Randomness) -> tuple[int, int]:
    """Block verification (arXiv 2403.10444): accepts more than `verify_chain`, and what is emitted is as exactly p.

    With r_i = p(y_i) / q(y_i), let c_0 = 1 and c_i = min(1, c_{i-1} r_i). The longest i is accepted that passes its
    test: all k candidates with chance c_k, and i < k of them with chance h_i = s_i / (s_i + 1 - c_i), where s_i is the
    sum of (c_i p - q)+ after i candidates. The token after them is drawn from norm((c_i p - q)+), or from p after k.

    For k = 1, p = [0.5, 0.5], q = [0.75, 0.25] and the candidate 0, c_1 is 2/3; i = 0 is left with [0, 0.25]. With one
    candidate this is `verify_chain`. `docs/verification.md` has an example with two.

    Arguments and results are those of `verify_chain`. A rule may stop drafting because of what it drafted: what keeps p
    there is that the last test is c_k, and not h_k.
    """
    carried = [1.0]
    for ratio in ratios_of(candidates, p, q):
        carried.append(min(1.0, carried[-1] * ratio))
    accepted = len(candidates)
    if randomness.bernoulli(carried[accepted]):
        return accepted, int(randomness.categorical(p[accepted]))
    while True:
        accepted -= 1
        c = carried[accepted]
        if not randomness.bernoulli(c):  # s_i <= c_i, so h_i <= c_i: most tests that fail need no sum
            continue
        left = (c * p[accepted]).sub_(q[accepted]).clamp_min_(0.0)
        mass = float(left.sum())  # nan where p or q is, so that no further candidate counts
        if c == 1.0 or math.isnan(mass) or randomness.bernoulli(mass / (mass + 1.0 - c) / c):  # i = 0 always passes
            return accepted, int(randomness.categorical(left if mass > 0.0 else p[accepted]))


def ratios_of(candidates: Sequence[int], p: Tensor, q: Tensor) -> list[float]:
    """p(y_i) / q(y_i) of each candidate; 0 where p or q is nan, so that no candidate is accepted there."""
    ratios = [float(p[place, token]) / float(q[place, token]) for place, token in enumerate(candidates)]
    return [0.0 if math.isnan(ratio) else ratio for ratio in ratios]


def weights_of(tests: Tensor) -> Tensor:
    """The chance that each of the `tests` `[n]` is the first that passes, of those from the last to the first; where
    none passes the first counts.

    For [1, 0.5, 0.25]: [0.375, 0.375, 0.25].
    """
    weights, left = [], 1.0
    for test in reversed(tests.tolist()):
        weights.append(left * test)
        left *= 1.0 - test
    return torch.tensor([weights.pop() + left, *weights[::-1]], dtype=torch.float64)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+), `[..., vocab]`: the distribution of the token that is emitted after a rejection.

    For p = [0.5, 0.3, 0.2] and q = [0.2, 0.6, 0.2] this is [1, 0, 0].

    In floating point a candidate can be rejected although p and q are equal to rounding, so that nothing is left: then
    p itself, which is the limit.
    """
    left = (p - q).clamp_min(0.0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0.0, left / mass, p)


def verify_tree(
    tree: DraftTree, p: Callable[[int], Tensor], randomness: Randomness, renormalise: bool = True, update: bool = True
) -> tuple[list[int], int]:
    """DySpec (arXiv 2410.11744), Algorithm 3, with the bonus at a leaf: what is emitted is distributed exactly as p.

    Args:
        tree: its siblings were drawn one after another, without replacement.
        p: gives `[vocab]`, the target's distribution after a node. Only asked about nodes on the way.
        renormalise, update: parts of the algorithm that mutants leave out: those of q and of p after a rejection.

    Returns:
        The accepted nodes, and the token that follows them: from what the rejected children left of p, or from p itself
        where there were no children.
    """
    path: list[int] = []
    node = 0
    while True:
        left = p(node)
        q = tree.q(node) if tree.children[node] else left
        for child in tree.children[node]:
            y = tree.tokens[child]
            if randomness.bernoulli(min(1.0, float(left[y] / q[y]))):
                path.append(child)
                node = child
                break
            left = residual(left, q) if update else left
            if renormalise:
                q = q.index_fill(0, torch.tensor(y), 0.0)
                q = q / q.sum()
        else:
            return path, int(randomness.categorical(left))


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
