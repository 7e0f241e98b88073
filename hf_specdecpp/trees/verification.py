"""Verification of a tree, on a host: which nodes the target accepts, and the token that follows.

Functions of p, q and randomness, explained in `docs/verification.md` and `docs/dyspec.md`. Siblings are tested by
`sampling.verification.sibling_tests`, as in captured rounds (`cuda_graphs.on_device.tree_tests`); here p is computed
for those nodes alone that a test asks about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.sampling.verification import Verification, acceptance_of, or_p, sibling_tests
from hf_specdecpp.trees.tree import DraftTree


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


def verify_tree(
    tree: DraftTree, p: Callable[[int], Tensor], randomness: Randomness, verification: Verification
) -> tuple[list[int], int]:
    """Accept nodes that were drawn; what is emitted is distributed exactly as p.

    `"block"` is traversal verification (arXiv 2505.12398), for siblings drawn without replacement: a node is tested
    after all nodes below it, with what their rejections have left of its chance. `"token"` is Algorithm 3 of DySpec
    (arXiv 2410.11744), which accepts fewer: from the root down, with the bonus at a leaf.

    Args:
        tree: its siblings were drawn one after another, without replacement.
        p: gives `[vocab]`, the target's distribution after a node. `"block"` asks about nodes that have children,
            until a node is accepted, `"token"` about nodes on the way.

    Returns:
        The accepted nodes, and the token that follows them: from what the rejected children left of p, or from p itself
        where there were no children.
    """
    if verification == "token":
        path = [0]
        while True:
            child, token = test_children(tree, path[-1], p(path[-1]), randomness)
            if child is None:
                return path[1:], token
            path.append(child)
    stack = [(0, _tests(tree, 0, p, torch.ones(())))]
    while True:
        node, tests = stack[-1]
        child, chance, mass = next(tests)
        if child is not None:
            stack.append((child, _tests(tree, child, p, chance)))
        elif len(stack) == 1 or randomness.bernoulli(float(chance)):  # the root always passes
            rest = p(node) if mass is None or not float(mass.sum()) > 0.0 else mass
            return [each for each, _ in stack[1:]], int(randomness.categorical(rest))
        else:
            stack.pop()


def _tests(
    tree: DraftTree, node: int, p: Callable[[int], Tensor], owed: Tensor
) -> Iterator[tuple[int | None, Tensor, Tensor | None]]:
    """`child_tests` of a node that has to be accepted with the chance `owed`, each with its child, `None` at last."""
    children = tree.children[node]
    if not children or not owed:  # nothing to find out below
        yield None, owed, None
        return
    for child, (chance, mass) in zip((*children, None), child_tests(tree, node, p(node), owed), strict=True):
        yield child, chance, mass


def test_children(tree: DraftTree, node: int, p: Tensor, randomness: Randomness) -> tuple[int | None, int]:
    """A level of Algorithm 3: the accepted child of a node, if any, and the token after the node. `p`: `[vocab]`."""
    tests = child_tests(tree, node, p, torch.ones((), device=p.device))
    # zip asks for the next sibling first: nothing is computed behind an accepted one.
    for child, (chance, _) in zip(tree.children[node], tests, strict=False):
        if randomness.bernoulli(float(chance)):
            return child, tree.tokens[child]
    _, left = next(tests)
    return None, int(randomness.categorical(or_p(left, p)))


def child_tests(tree: DraftTree, node: int, p: Tensor, owed: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """The chance of each child of a node that has to be accepted with the chance `owed`; at last what `sibling_tests`
    leaves. `p`: `[vocab]`, the target's distribution after the node."""
    tokens = torch.tensor([tree.tokens[child] for child in tree.children[node]], dtype=torch.long, device=p.device)
    q = tree.q(node).to(p.device) if len(tokens) else p
    tests = sibling_tests(p, q, tokens.unbind(), owed)
    for of_q in q[tokens].unbind():
        mass, share = next(tests)
        yield acceptance_of(mass, share, of_q).nan_to_num(0.0), mass
    yield next(tests)


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
