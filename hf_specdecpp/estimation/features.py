"""Scalars that describe a candidate to a head, and how many of them there are."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SCALARS = 6
SIBLING_MASS, NUM_SIBLINGS = 3, 4  # their places among the scalars


def scalar_features(
    q: Tensor,
    token: Tensor,
    greedy: bool = False,
    sibling_mass: Tensor | None = None,
    num_siblings: Tensor | None = None,
) -> Tensor:
    """Scalars of candidates for a head with `inputs="before"`.

    Args:
        q: `[..., vocab]`, what they were drawn from.
        token: `[...]`, the candidates.
        greedy: whether the target decodes greedily.
        sibling_mass, num_siblings: `[...]`, total draft probability and number of the siblings drawn before each in a
            tree; zero by default.

    Returns:
        `[..., 6]` float32: log q(y), entropy in nats, margin q1 - q2, sibling mass, number of siblings, 1 if greedy.
    """
    top = q.topk(min(2, q.shape[-1]), dim=-1).values
    log_q = q.gather(-1, token[..., None])[..., 0].clamp_min(1e-30).log()
    none = torch.zeros_like(log_q)
    scalars = (
        log_q,
        torch.special.entr(q).sum(-1),
        top[..., 0] - top[..., -1],
        none if sibling_mass is None else sibling_mass,
        none if num_siblings is None else num_siblings.to(q.dtype),
        torch.full_like(log_q, float(greedy)),
    )
    return torch.stack(scalars, dim=-1).float()
