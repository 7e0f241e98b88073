"""Products of a draft with int8 weights and activations on a CPU: for a few tokens about a third of float32's time.

A step of a draft over a few tokens takes as long as its weights take to be read, and int8 weights are a quarter of
float32's. The draft then says something slightly different, which costs a little acceptance and never correctness: q is
what the candidates were drawn from, whatever it was computed with.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

MOST_ROWS = 16  # tokens read at once in int8. They share a scale, and the first token of a prompt would spoil it.
LEAST_ELEMENTS = 100_000  # of a weight: below, a product costs little more than its call
LEVELS = 127


def is_available() -> bool:
    """Whether this PyTorch has the products for this processor."""
    return torch.backends.quantized.engine != "none" and hasattr(torch.ops.quantized, "linear_dynamic")


def quantise(weight: Tensor) -> Any:
    """The weight `[out, in]` rounded to int8, with a scale for each output, in the order that the product reads."""
    scales = (weight.detach().abs().amax(dim=1).double() / LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    zeros = torch.zeros(len(scales), dtype=torch.int64)
    with warnings.catch_warnings():  # PyTorch will replace these tensors one day
        warnings.simplefilter("ignore")
        rounded = torch.quantize_per_channel(weight.detach(), scales, zeros, 0, torch.qint8)
        return torch.ops.quantized.linear_prepack(rounded, None)


def multiply(x: Tensor, copy: Any, bias: Tensor | None) -> Tensor:
    """The product of float32 `x` `[..., in]`, rounded to 8 bits by its largest number, with a `quantise`d weight.

    To 7 bits on processors without VNNI instructions, whose sums of products would overflow.
    """
    rows: Tensor = torch.ops.quantized.linear_dynamic(x.reshape(-1, x.shape[-1]), copy, not _has_vnni())
    product = rows.view(*x.shape[:-1], -1)
    return product if bias is None else product.add_(bias)


def pays(layer: nn.Linear) -> bool:
    """Whether the layer is large enough."""
    return layer.weight.numel() >= LEAST_ELEMENTS


def _has_vnni() -> bool:
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())  # not in every PyTorch
