"""Which candidates does the target accept, and what does it say instead? Pure functions of p, q and randomness.

p is the target's law, q the law that a candidate was really drawn from, both after all logits processors. Chains are
explained in `docs/specdecpp.md`, trees in `docs/dyspec.md`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_specdecpp.randomness import Randomness
from hf_specdecpp.tree import DraftTree


def verify_greedy(candidates: list[int], scores: Tensor) -> tuple[int, int]:
    """Accept candidates while they are the target's likeliest tokens.

    Args:
        candidates: k tokens.
        scores: `[k + 1, vocab]`, the target's processed logits at each candidate and after the last.

    Returns:
        Number of accepted candidates, and the token that follows them.
    """
    choices = likeliest_tokens(scores)
    accepted = 0
    while accepted < len(candidates) and candidates[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def verify_chain(candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness) -> tuple[int, int]:
    """Speculative sampling (arXiv 2211.17192, Algorithm 1): the emitted tokens are distributed exactly as p.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[k, vocab]` probabilities of the draft.

    Returns:
        Number of accepted candidates, and the token that follows them: from the residual after a rejection, from p
        (the bonus) when all were accepted.
    """
    accepted = 0
    if candidates:
        rows = torch.arange(len(candidates), device=p.device)
        columns = torch.tensor(candidates, device=p.device)
        p_of, q_of = p[rows, columns].tolist(), q[rows, columns].tolist()
        while accepted < len(candidates) and randomness.bernoulli(min(1.0, p_of[accepted] / q_of[accepted])):
            accepted += 1
    law = p[accepted] if accepted == len(candidates) else residual(p[accepted], q[accepted])
    return accepted, int(randomness.categorical(law))


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


def likeliest_tokens(scores: Tensor) -> list[int]:
    """`scores.argmax(-1)` of `[n, vocab]`, which on a CPU numpy finds ten times faster than torch: 5 us a token."""
    if scores.device.type == "cpu":
        return scores.numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """Law of the token emitted after a rejection, `[vocab]`: the positive part of p - q, renormalised.

    In floating point a candidate can be rejected although p and q are equal to rounding, so that nothing is left: then
    p itself, which is what the limit of the emitted law is.
    """
    left = (p - q).clamp_min(0.0)
    mass = left.sum()
    return left / mass if float(mass) > 0.0 else p
