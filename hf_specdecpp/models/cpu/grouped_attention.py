"""Attention over several tokens on a CPU: without copies of keys and values (`grouped_attention`), and in half
precision with the bits of passes over one token (`separate_queries`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

UNUSUAL = frozenset({"position_bias", "cache", "softcap"})  # arguments of attention that are left to transformers
HALF = (torch.bfloat16, torch.float16)


def computes_in_half(model: Any) -> bool:
    """Whether a model's forward passes on a CPU compute in half precision, by its dtype or `torch.autocast`."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") in HALF
    return model.dtype in HALF


class _Local(local):
    """Results of `_seen_keys` by attention mask, in a thread within `separate_queries`; `None` in other threads."""

    seen: dict[Tensor, list[slice | Tensor] | None] | None = None


_local = _Local()


@contextmanager
def separate_queries() -> Iterator[None]:
    """A context for a forward pass over a chain or a tree, which attends from one query at a time, as passes over one
    token do.

    With several queries PyTorch's kernels sum in another order. In half precision results are then rounded differently,
    so that of two nearly tied tokens the other one may be chosen. Not used if the mask also hides tokens of the prompt.
    """
    _local.seen = {}
    try:
        yield
    finally:
        _local.seen = None


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Replaces transformers' attention function `sdpa` on CPUs: equal results, bit for bit, without copies of keys and
    values for query heads that share them.

    transformers makes these copies if several tokens are read with a mask, as in every verification, because CUDA has
    no fast kernel without copies. CPUs have one.

    Example: 12 query heads of width 128 share 2 heads of keys and values. For two tokens in each of eight rows, with
    512 tokens in the cache, the copies take 50 MB per layer in float32.

    Args:
        query: `[batch, heads, tokens, width]`.
        key, value: `[batch, heads of keys, cached tokens, width]`.
        attention_mask: `[batch, 1, tokens, cached tokens]`, boolean or additive.

    Returns:
        `[batch, tokens, heads, width]`, and `None` for the attention weights.
    """
    if (  # cheap tests first: every layer runs this in every pass
        query.shape[2] > 1
        and attention_mask is not None
        and not torch.is_grad_enabled()
        and key.device.type == "cpu"
        and key.shape[-1] == value.shape[-1]
        and not kwargs.get("dropout")
        and (not (given := UNUSUAL & kwargs.keys()) or all(kwargs[name] is None for name in given))
    ):
        attend = partial(
            functional.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        seen = None if _local.seen is None else _seen_keys(attention_mask, _local.seen)
        if seen is not None:
            queries = zip(query.split(1, dim=2), seen, strict=True)
            output = torch.cat([attend(one, key[:, :, keys], value[:, :, keys]) for one, keys in queries], dim=2)
            return output.transpose(1, 2).contiguous(), None
        if query.shape[1] != key.shape[1]:
            return attend(query, key, value, attn_mask=attention_mask).transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _seen_keys(mask: Any, known: dict[Tensor, list[slice | Tensor] | None]) -> list[slice | Tensor] | None:
    """For each query of a boolean mask `[1, 1, tokens, cached tokens]` the keys that it sees, a slice or in a tree
    indices; `None` for other masks, or if a window hides a query's first key. Later layers find the result in `known`.

    Example: after a prefix of 2 tokens the root, its child and the child's sibling see `[:3]`, `[:4]` and
    `[0, 1, 2, 4]`."""
    if mask not in known:
        known[mask] = None
        if mask.dtype is torch.bool and len(mask) == 1 and bool(mask[..., 0].all()):
            rows = [row.nonzero()[:, 0] for row in mask[0, 0]]
            known[mask] = [slice(len(row)) if int(row[-1]) < len(row) else row for row in rows]
    return known[mask]
