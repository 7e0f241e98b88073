"""How likely is the verifier to accept a candidate? Labels and loss of the acceptance head; no models in here.

p and q are the distributions that the verifier sees: after temperature, top-k and the rest. At temperature 0 both are
point masses: p at the target's likeliest token, q at the candidate, which is then not drawn but taken.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.sampling.randomness import draw_rows
from hf_specdecpp.sampling.verification import sibling_tests


def analytic_label(p: Tensor, q: Tensor) -> Tensor:
    """Σ min(p, q): the mean of `acceptance` over candidates drawn from q; `[..., vocab]` to `[...]`."""
    return torch.minimum(p, q).sum(-1)


@dataclass
class DrawnSiblings:
    """Candidates drawn one after another for the same position, none twice.

    Attributes:
        tokens: `[..., n]` int64.
        drawn_from: n tensors `[..., vocab]`: q of each draw, without the tokens drawn before it, renormalised.
        mass: `[..., n]`, total probability in the original q of the siblings drawn before each.
        index: `[..., n]`, how many were drawn before each.
        valid: `[..., n]` bool, False where q had no token left; what the other fields hold there means nothing.
    """

    tokens: Tensor
    drawn_from: list[Tensor]
    mass: Tensor
    index: Tensor
    valid: Tensor


def draw_siblings(q: Tensor, n: int, generator: torch.Generator | None = None, greedy: bool = False) -> DrawnSiblings:
    """Draw n siblings from q without replacement (the order of DySpec's Algorithm 1).

    Args:
        q: `[..., vocab]`.
        greedy: take the likeliest token left instead of drawing one.
    """
    left = q.clone()
    tokens: list[Tensor] = []
    drawn_from, masses, valid = [], [], []
    for _ in range(n):
        total = left.sum(-1, keepdim=True)
        some_left = total > 0.0
        probs = torch.where(some_left, left / total, 1.0 / q.shape[-1])
        rows = probs.reshape(-1, q.shape[-1])
        token = (rows.argmax(-1) if greedy else draw_rows(rows, generator)).reshape(q.shape[:-1])
        masses.append(q.gather(-1, torch.stack(tokens, -1)).sum(-1) if tokens else torch.zeros_like(total[..., 0]))
        tokens.append(token)
        drawn_from.append(probs)
        valid.append(some_left[..., 0])
        left = left.scatter(-1, token[..., None], 0.0)
    drawn = torch.stack(tokens, -1)
    index = torch.arange(n, device=q.device).expand_as(drawn)
    return DrawnSiblings(drawn, drawn_from, torch.stack(masses, -1), index, torch.stack(valid, -1))


def sibling_labels(
    p: Tensor, drawn_from: list[Tensor], tokens: Tensor, analytic: bool = False
) -> tuple[Tensor, Tensor]:
    """Chance that the verifier accepts each sibling once it has rejected those before it (DySpec, Algorithm 3).

    The verifier gets as far as sibling j with the chance of the second result (`sibling_tests`). A head that
    is fitted with that as the weight of the example learns P(accepted | reached): unweighted, it would learn as much
    from siblings that are hardly ever tested.

    Args:
        p: `[..., vocab]`.
        drawn_from: n tensors `[..., vocab]`, D of each sibling.
        tokens: `[..., n]`.
        analytic: labels Σ min(R, D) in the place of min(1, R(y) / D(y)).

    Returns:
        labels `[..., n]` and the chance that each sibling is tested `[..., n]`, 1 for the first.
    """
    reached = torch.ones_like(p[..., 0])
    labels, reach = [], []
    tests = sibling_tests(p, drawn_from, tokens.unbind(-1))
    for each, (accepted, left) in zip(drawn_from, tests, strict=False):
        labels.append(analytic_label(left, each) if analytic else accepted)
        reach.append(reached)
        reached = reached * (1.0 - accepted)
    return torch.stack(labels, -1), torch.stack(reach, -1)


def weighted_bce(log_odds: Tensor, label: Tensor, rejection_weight: float, mask: Tensor) -> Tensor:
    """The paper's loss: - Σ [P log P̂ + w_rej (1 - P) log(1 - P̂)] / [w_rej Σ (1 - P) + Σ P].

    Args:
        log_odds: `[...]`, of P̂.
        label: `[...]`, P, which may lie between 0 and 1.
        rejection_weight: w_rej.
        mask: `[...]`, which candidates count: bool, or weights (`sibling_labels`).

    Returns:
        0-d; zero where nothing counts.
    """
    weight = mask.to(log_odds.dtype)
    accept, reject = weight * label, weight * rejection_weight * (1.0 - label)
    loss = -(accept * F.logsigmoid(log_odds) + reject * F.logsigmoid(-log_odds)).sum()
    return loss / (accept + reject).sum().clamp_min(torch.finfo(log_odds.dtype).tiny)
