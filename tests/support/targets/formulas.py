"""Parts of formulas on plain tensors, and the states that drafts read of a target."""

import math
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader, TargetStates

EPSILON = 1e-6  # of all norms


def rms(x: Tensor, weight: Tensor) -> Tensor:
    """As Llama's and Qwen3's: in float32, the weight after that."""
    single = x.float()
    return weight * (single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x)


def rotated(x: Tensor, places: Tensor, theta: float) -> Tensor:
    """`x` is `[rows, heads, size]`."""
    angles = places[:, None].float() * theta ** -(torch.arange(0, x.shape[-1], 2).float() / x.shape[-1])
    cos, sin = (torch.cat((turn, turn), -1).to(x)[:, None] for turn in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


def attended(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """What heads that share keys and values find, `[rows, heads * size]`.

    `q`: `[rows, heads, size]`; `k`, `v`: `[places, shared heads, size]`. `seen`: bool `[rows, places]`."""
    k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for part in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, float("-inf")).softmax(-1), v).flatten(1)


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-6) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


@torch.no_grad()
def states_of(target: CausalLM, draft: Any, text: Tensor) -> Tensor:
    """What a draft, or a reader of states, reads of a target along a text, `[batch, n, width]`."""
    with TargetStates(target, draft if isinstance(draft, StateReader) else draft.reads) as caught:
        target(text)
        states = caught.take()
    assert states is not None
    return states
