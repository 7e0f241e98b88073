"""The products of a linear layer on a CPU beside PyTorch's own: oneDNN's, with packed weights, and in int8.

PyTorch gives float32 products to MKL. oneDNN is faster for some models on some processors, and faster still with a copy
of the weights in an order of its own. The last digits differ, as those of passes over one token and over several do.
Which of them a pass takes is chosen on the passes of texts (`throughput.target_passes`).

A draft may compute in int8, in about a third of the time for a few tokens, which is what weights take to be read. It
then says something slightly different, which costs a little acceptance and never correctness: q is what the candidates
were drawn from, whatever it was computed with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

Product = Literal["own", "onednn", "packed"]

PACKED_FOR = 4  # rows; the order of a packed copy is the same for all numbers but 1
BUCKETS = 1021  # a prime, so that whatever moves rows or columns of a weight moves numbers from bucket to bucket
MOST_INT8_ROWS = 16  # tokens read at once in int8. They share a scale, and a prompt's first token would spoil it.
LEVELS = 127
TINY = 1e-30  # in the place of 0, where a scale is divided by


class Ways(Protocol):
    """Which product the layers of a model take, by the number of rows."""

    @property
    def products(self) -> set[Product]:
        """All that may be taken."""

    def of(self, rows: int) -> Product:
        """The product for so many rows, now."""


@dataclass(frozen=True)
class Always:
    """One product for all numbers of rows."""

    product: Product

    @property
    def products(self) -> set[Product]:
        return {self.product}

    def of(self, rows: int) -> Product:  # noqa: ARG002 - all alike
        return self.product


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product; `weight` may be a packed copy."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def pack(weight: Tensor) -> Tensor:
    """A copy of the weight in the order that oneDNN likes best for few rows."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)
    return copy


class Int8Weight(NamedTuple):
    """A weight `[out, in]` in int8, in the order that the product reads; `[out]` the scale of a level, and zeros."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor


def has_int8() -> bool:
    """Whether this PyTorch has int8 products for this processor. Without AVX2 they are far slower than float32's."""
    has_vectors = torch.backends.cpu.get_cpu_capability().startswith("AVX")
    return has_vectors and torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")


def quantise(weight: Tensor) -> Int8Weight:
    """The weight `[out, in]` rounded to int8, with a scale for each output, in the order that the product reads."""
    weight = weight.detach()
    scales = (weight.abs().amax(dim=1) / LEVELS).clamp_min(TINY)
    rounded = (weight / scales[:, None]).round_().to(torch.int8)
    packed: Tensor = torch.ops.onednn.qlinear_prepack(rounded, None)
    return Int8Weight(packed, scales, torch.zeros(len(scales), dtype=torch.int32))


def int8_product(x: Tensor, copy: Int8Weight, bias: Tensor | None) -> Tensor:
    """The product of float32 `x` `[..., in]`, rounded to 8 bits by its largest number, with a `quantise`d weight.

    To 7 bits on processors without VNNI instructions: these add two products in 16 bits, and 2 * 127 * 127 fits.

    Example: the largest number of the input is 2.54, so a level is 0.02, and 1.0 becomes 128 + 50. In 7 bits a level is
    2.54 / 63, and 1.0 becomes 64 + 25.
    """
    is_vnni_supported = getattr(torch.cpu, "_is_vnni_supported", lambda: False)  # not in every PyTorch
    levels = LEVELS if is_vnni_supported() else LEVELS // 2
    scale, middle = max(x.abs().max().item(), TINY) / levels, levels + 1  # oneDNN's fast kernels take no signs
    # Half a level is added before the digits after the point are cut off.
    rounded = torch.add(torch.tensor(middle + 0.5), x.reshape(-1, x.shape[-1]), alpha=1.0 / scale).to(torch.uint8)
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        rounded, scale, middle, *copy, bias, 1.0, 0, torch.float32, "none", [], ""
    )
    return product.view(*x.shape[:-1], -1)


class PackedWeights:
    """Copies of weights that `pack` makes. They go with this object, and each of them with its weight.

    Objects that pack the same weight in the same way share the copy.
    """

    def __init__(self, pack: Callable[[Tensor], Any] = pack) -> None:
        self._pack = pack
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> PackedCopy

    def current(self, weight: Tensor) -> PackedCopy:
        """The copy of the weight as it is now. The whole weight is read for this, as for a product with one row."""
        copies = _shared[self._pack]
        shared = copies.get(weight)
        copy = shared() if shared is not None else None
        state = fingerprint(weight)
        if copy is None or not torch.equal(copy.state, state):
            copy = PackedCopy(state, self._pack(weight))
            copies[weight] = ref(copy)
        self._copies[weight] = copy
        return copy

    def clear(self) -> None:
        self._copies.clear()

    @property
    def bytes(self) -> int:
        """Memory of the weights that there are copies of."""
        return sum(weight.nbytes for weight in self._copies)


@dataclass(eq=False)
class PackedCopy:
    """A weight in another order, or rounded; `state` is the `fingerprint` of the weight that it was made of."""

    state: Tensor
    tensor: Any


# By the function that packs: weight -> weak reference to its copy.
_shared: defaultdict[Callable[[Tensor], Any], WeakIdKeyDictionary] = defaultdict(WeakIdKeyDictionary)


def fingerprint(weight: Tensor) -> Tensor:
    """Sums over all bits of a weight, to notice writes that autograd does not count (`.data`, numpy).

    The numbers are taken two by two as 64-bit integers; number j is added to sum j mod 1021, overflow wrapping around.
    So a write to one element always shows, and several are missed only if they cancel out in each sum.

    Returns:
        `[1021 + rest]` int64, the `rest` being numbers that do not fill a row of 1021.
    """
    numbers = weight.detach().view(-1).view(torch.int64)
    whole = numbers.numel() - numbers.numel() % BUCKETS
    return torch.cat((numbers[:whole].view(-1, BUCKETS).sum(0), numbers[whole:]))
