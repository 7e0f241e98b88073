"""Products of a draft with int8 weights and activations on a CPU: for a few tokens about a third of float32's time.

A step of a draft over a few tokens takes as long as its weights take to be read, and int8 weights are a quarter of
float32's. The draft then says something slightly different, which costs a little acceptance and never correctness: q is
what the candidates were drawn from, whatever it was computed with.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

MOST_ROWS = 16  # tokens read at once in int8. They share a scale, and the first token of a prompt would spoil it.
LEAST_ELEMENTS = 100_000  # of a weight: below, a product costs little more than its call
LEVELS = 127
TINY = 1e-30  # in the place of 0, where a scale is divided by


class Int8Weight(NamedTuple):
    """A weight `[out, in]` in int8.

    Attributes:
        packed: in the order that the product reads.
        scales: `[out]`, of one level.
        zeros: `[out]`, the level of a 0, which is 0.
    """

    packed: Tensor
    scales: Tensor
    zeros: Tensor


def is_available() -> bool:
    """Whether this PyTorch has the products for this processor. Without AVX2 they are far slower than float32's."""
    has_vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return has_vectors and torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")


def quantise(weight: Tensor) -> Int8Weight:
    """The weight `[out, in]` rounded to int8, with a scale for each output, in the order that the product reads."""
    weight = weight.detach()
    scales = (weight.abs().amax(dim=1) / LEVELS).clamp_min(TINY)
    rounded = (weight / scales[:, None]).round_().to(torch.int8)
    packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
    return Int8Weight(packed, scales, torch.zeros(len(scales), dtype=torch.int32))


def multiply(x: Tensor, copy: Int8Weight, bias: Tensor | None) -> Tensor:
    """The product of float32 `x` `[..., in]`, rounded to 8 bits by its largest number, with a `quantise`d weight.

    To 7 bits on processors without VNNI instructions: these add two products in 16 bits, and 2 * 127 * 127 fits.

    Example: the largest number of the input is 2.54, so a level is 0.02, and 1.0 becomes 128 + 50. In 7 bits a level is
    2.54 / 63, and 1.0 becomes 64 + 25.
    """
    levels = LEVELS if _has_vnni() else LEVELS // 2
    scale, middle = max(x.abs().max().item(), TINY) / levels, levels + 1  # oneDNN's fast kernels take no signs
    # Half a level is added before the digits after the point are cut off.
    rounded = torch.add(torch.tensor(middle + 0.5), x.reshape(-1, x.shape[-1]), alpha=1.0 / scale).to(torch.uint8)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rounded, scale, middle, *copy, bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return product.view(*x.shape[:-1], -1)


def pays(layer: nn.Linear) -> bool:
    """Whether the layer is large enough."""
    return layer.weight.numel() >= LEAST_ELEMENTS


def _has_vnni() -> bool:
    return bool(getattr(torch.cpu, "_is_vnni_supported", lambda: False)())  # not in every PyTorch
