"""Attention on a CPU: without copies of keys and values, in half precision computed in float32 (`grouped_attention`),
and over several tokens with the bits of passes over one token (`separate_queries`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from threading import local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdecpp.models.cpu.products import ALIKE

UNUSUAL = frozenset({"position_bias", "cache", "softcap"})  # arguments of attention that are left to transformers
HALF = (torch.bfloat16, torch.float16)
SeenKeys = list[slice | Tensor] | None


def computes_in_half(model: Any) -> bool:
    """Whether a model's forward passes on a CPU compute in half precision, by its dtype or `torch.autocast`."""
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") in HALF
    return model.dtype in HALF


class _Local(local):
    """State of a thread."""

    def __init__(self) -> None:
        self.seen: dict[Tensor, SeenKeys] | None = None  # by attention mask within `separate_queries`
        # Of each `FasterProducts` that the thread has entered, `attending` and `attends_in_float32`. The last decides.
        self.contexts: list[tuple[Set[nn.Module], bool]] = [(frozenset(), False)]
        self.buffers: dict[str, Tensor] = {}  # reused memory, as new memory takes longer than the conversion


of_thread = _Local()


@contextmanager
def separate_queries() -> Iterator[None]:
    """A context for a forward pass over a chain or a tree, which attends from one query at a time, as passes over one
    token do.

    With several queries PyTorch's kernels sum in another order. In half precision results are then rounded differently,
    so that of two nearly tied tokens the other one may be chosen. Not used if the mask also hides tokens of the prompt,
    and without effect for more than 32 tokens, whose linear layers round differently, too.
    """
    of_thread.seen = {}
    try:
        yield
    finally:
        of_thread.seen = None


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Replaces transformers' attention function `sdpa` on CPUs, for modules of a target or draft within their
    `FasterProducts`: equal results, bit for bit, without copies of keys and values for query heads that share them; but
    where `attends_in_float32`, passes over up to 32 tokens compute attention of half precision in float32, and round
    once. The attention of other models is transformers', even if a logits processor or a hook calls such a model.

    transformers copies keys and values if several tokens are read with a mask, as in every verification, because CUDA
    has no fast kernel without copies. CPUs have one. Example: 12 query heads of width 128 share 2 heads of keys and
    values. For two tokens in each of eight rows, with 512 tokens in the cache, the copies take 50 MB per layer in
    float32.

    Args:
        query: `[batch, heads, tokens, width]`.
        key, value: `[batch, heads of keys, cached tokens, width]`.
        attention_mask: `[batch, 1, tokens, cached tokens]`, boolean or additive.

    Returns:
        `[batch, tokens, heads, width]`, and `None` for the attention weights.
    """
    tokens, dtype, (attending, in_float32) = query.shape[2], query.dtype, of_thread.contexts[-1]
    in_float32 = in_float32 and dtype in HALF and tokens <= ALIKE and not torch.is_autocast_enabled("cpu")
    if (  # cheap tests first: every layer runs this in every pass
        module in attending
        and (in_float32 if tokens == 1 else attention_mask is not None)
        and not torch.is_grad_enabled()
        and key.device.type == "cpu"
        and key.shape[-1] == value.shape[-1]
        and not kwargs.get("dropout")
        and (not (given := UNUSUAL & kwargs.keys()) or all(kwargs[name] is None for name in given))
    ):
        attend = partial(
            functional.scaled_dot_product_attention, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        seen = None
        if of_thread.seen is not None and attention_mask is not None and tokens <= ALIKE:
            seen = _seen_keys(attention_mask, of_thread.seen)
        output = None
        if in_float32:
            output = _attend_in_float32(attend, query, key, value, attention_mask, seen).to(dtype)
        elif seen is not None:
            output = torch.cat(_attend_apart(attend, query.split(1, dim=2), key, value, seen), dim=2)
        elif query.shape[1] != key.shape[1]:
            output = attend(query, key, value, attn_mask=attention_mask)
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


def _attend_apart(
    attend: Callable[..., Tensor], queries: Iterable[Tensor], key: Tensor, value: Tensor, seen: Iterable[slice | Tensor]
) -> list[Tensor]:
    """Attention from one query at a time, each to the keys that it sees."""
    return [attend(query, key[:, :, keys], value[:, :, keys]) for query, keys in zip(queries, seen, strict=True)]


def _attend_in_float32(
    attend: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seen: SeenKeys
) -> Tensor:
    """Attention of half-precision states, in float32. Heads of one query that share a head of keys attend as several
    queries of one head, so that the kernel reads the keys once for all of them.

    PyTorch's kernels for one query in half precision take 3 to 13 times as long, in every pass over one token."""
    query, key, value = query.float(), _in_float32("key", key), _in_float32("value", value)
    if mask is not None and mask.dtype is not torch.bool:
        mask = mask.float()
    if seen is None and (query.shape[2] > 1 or (mask is not None and mask.shape[1] > 1)):  # or a mask for each head
        return attend(query, key, value, attn_mask=mask)
    queries = query.unflatten(1, (key.shape[1], -1)).unbind(3)
    if seen is None:
        outputs = [attend(queries[0], key, value, attn_mask=mask)]
    else:
        outputs = _attend_apart(attend, queries, key, value, seen)
    return torch.stack(outputs, dim=3).flatten(1, 2)


def _in_float32(name: str, states: Tensor) -> Tensor:
    """A copy of keys or values in float32, in memory that the next layer uses for its own."""
    buffer = of_thread.buffers.get(name)
    if buffer is None or buffer.numel() < states.numel():
        with torch.inference_mode(False):  # so that passes in and outside of inference mode may write it
            buffer = torch.empty(2 * states.numel(), dtype=torch.float32, device=states.device)
        of_thread.buffers[name] = buffer
    return buffer[: states.numel()].view(states.shape).copy_(states)


def _seen_keys(mask: Any, known: dict[Tensor, SeenKeys]) -> SeenKeys:
    """For each query of a boolean mask `[1, 1, tokens, cached tokens]` the keys that it sees, a slice or in a tree
    indices; `None` for other masks, or if a window hides a query's first key. Later layers find the result in `known`.

    Example: after a prefix of 2 tokens the root, its child and the child's sibling see `[:3]`, `[:4]` and
    `[0, 1, 2, 4]`."""
    if mask not in known:
        known[mask] = None
        if mask.dtype is torch.bool and mask.shape[:2] == (1, 1) and bool(mask[..., 0].all()):
            rows = [row.nonzero()[:, 0] for row in mask[0, 0]]
            known[mask] = [slice(len(row)) if int(row[-1]) < len(row) else row for row in rows]
    return known[mask]
