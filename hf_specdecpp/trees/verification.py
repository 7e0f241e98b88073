"""Which nodes of a tree does the target accept, and what does it say instead?

Pure functions of p, q and randomness, explained in `docs/dyspec.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.sampling.verification import likeliest_tokens, remaining, sibling_tests
from hf_specdecpp.trees.tree import DraftTree


def verify_tree_greedy(tree: DraftTree, scores: Callable[[int], Tensor]) -> tuple[list[int], int]:
    """Walk down the tree along the target's likeliest tokens.

    Args:
        scores: gives `[vocab]`, the target's processed logits after a node. Only asked about nodes on the way.

    Returns:
        The accepted nodes, and the token that follows them.
    """
    path: list[int] = []
    node = 0
    while True:
        choice = likeliest_tokens(scores(node)[None])[0]
        child = next((child for child in tree.children[node] if tree.tokens[child] == choice), None)
        if child is None:
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
        tests = child_tests(tree, node, p(node))
        # zip asks for the next sibling first: nothing is computed behind an accepted one.
        for child, (chance, _) in zip(tree.children[node], tests, strict=False):
            if randomness.bernoulli(float(chance)):
                path.append(child)
                node = child
                break
        else:
            _, left = next(tests)
            return path, int(randomness.categorical(left))


def child_tests(tree: DraftTree, node: int, p: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """`sibling_tests` of the node's children, given the target's distribution after the node, `[vocab]`."""
    tokens = torch.tensor([tree.tokens[child] for child in tree.children[node]], device=p.device).unbind()
    q = tree.q(node).to(p.device) if tokens else p
    return sibling_tests(p, remaining(q, tokens), tokens)
