"""Which candidates does the target accept, and what does it say instead? Pure functions of p, q and randomness.

p is the target's law, q the law that a candidate was really drawn from, both after all logits processors. Chains are
explained in `docs/specdecpp.md`, trees in `docs/dyspec.md`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness


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
