"""Which nodes of a tree does the target accept, and what does it say instead?

Pure functions of p, q and randomness, explained in `docs/dyspec.md`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.sampling.verification import likeliest_tokens, residual
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
        p: gives `[vocab]`, the target's law after a node. Only asked about nodes on the way.

    Returns:
        The accepted nodes, and the token that follows them: from what the rejected children left of p, or from p itself
        where there were no children.
    """
    path: list[int] = []
    node = 0
    while True:
        left = p(node)  # R in the paper: the law of what is emitted here, given that the children so far were rejected
        accepted = None
        if tree.children[node]:
            q = tree.q(node).to(left.device)  # D: the law that the next child was drawn from
            for child in tree.children[node]:
                y = tree.tokens[child]
                if randomness.bernoulli(min(1.0, float(left[y] / q[y]))):
                    accepted = child
                    break
                left = residual(left, q)
                q[y] = 0.0
                q /= q.sum()
        if accepted is None:
            return path, int(randomness.categorical(left))
        path.append(accepted)
        node = accepted
