"""Matrix products of a linear layer on a CPU that use a copy of its weight: in float16, packed by oneDNN, or in int8.
What products take on this processor (`ProductTimes`), measured once a process.

PyTorch's own product reads a weight of `out * in` elements once for each few rows. These products read it once for many
rows, so that a forward pass over eight tokens takes little more than one over one token.

`Float16Weight` holds each element exactly (or with an error below 2^-24 of its row's largest element) and adds up in
float32, so its results differ from PyTorch's in the order of the sums only. A row of a result has the same bits for any
number of other rows. `OneDnnWeight` is for float32 weights that float16 cannot hold. `Int8Weight` is inexact and is for
drafts alone: q is the distribution that candidates were drawn from, whatever it was computed with.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from threading import Event
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

PACKED_FOR = 4  # rows; oneDNN's order of a packed weight is the same for all numbers of rows but 1
MOST_INT8_ROWS = 16  # tokens read at once in int8. They share a scale, and a prompt's first token would spoil it.
LEVELS = 127
TINY = 1e-30  # replaces 0 where a scale is divided by
AT_ONCE = 1 << 24  # elements that one call packs: a process that ends waits for one call
LARGEST = 15  # a float16 weight is scaled so that its largest element lies between 2^14 and 2^15
MOST_SCALE = 40  # bits: beyond, activations times the inverse of the scale could leave the range of float32
EXACT = 2.0**-24  # of a row's largest element: the largest error of an element that counts as equal
ROWS = (1, 4, 16)  # of the products that are measured
UP_TO = (2, 8, 24)  # rows that these stand for; products of more rows are PyTorch's own
SAMPLE = 1 << 21  # elements of a weight
COLD = 64 << 20  # bytes that are read between two products, so that no weight is in a cache
RUNS, MOST_RUNS = 3, 6  # of each product
AGREE = 1.15  # times the shortest run, which the second one may take: else something else was read meanwhile
LEAST_GAIN = 1.05  # of a copy's product over PyTorch's own
MOST_LOSS = 1.3  # for more rows: below, the copy is kept, since rows then have the same bits in all narrow passes


@dataclass(frozen=True, eq=False)
class Float16Weight:
    """A weight `[out, in]` times a power of two, as float16 elements in the order that FBGEMM reads.

    Attributes:
        parts: FBGEMM's packed matrices of consecutive outputs.
        unit: 1 / the power of two, which the activations are multiplied by.
    """

    parts: tuple[Any, ...]
    unit: float
    name = "float16"
    bytes_of_element = 2

    @staticmethod
    def fits(weight: Tensor) -> bool:
        """Whether float16 holds the elements of a float32, bfloat16 or float16 weight, times a power of two."""
        scale = _scale_of(weight)
        return scale is not None and all(_fits(rows.float() * scale) for rows in _blocks(weight.detach()))

    @classmethod
    def of(cls, weight: Tensor) -> Float16Weight:
        """The copy of a weight that `fits`."""
        scale = _scale_of(weight) or 1.0
        pack = torch.ops.quantized.linear_prepack_fp16
        return cls(tuple(pack(rows.float() * scale, None) for rows in _blocks(weight.detach())), 1.0 / scale)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` `[..., in]` times the weight, plus `bias`: sums in float32, rounded to the dtype of `x` at the end."""
        inputs = x.reshape(-1, x.shape[-1]).float() * self.unit
        parts = [torch.ops.quantized.linear_dynamic_fp16(inputs, part) for part in self.parts]
        output: Tensor = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        if bias is not None:
            output += bias
        return output.to(x.dtype).view(*x.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class OneDnnWeight:
    """A float32 weight in the order that oneDNN reads for few rows."""

    packed: Tensor
    name = "oneDNN"
    bytes_of_element = 4

    @classmethod
    def of(cls, weight: Tensor) -> OneDnnWeight:
        return cls(torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product


def _scale_of(weight: Tensor) -> float | None:
    """The power of two that a float16 weight is multiplied by; `None` for NaN and infinity, and without elements.

    Example: a weight whose largest element is 0.3 is multiplied by 2^16, so that this element becomes 19661. A bfloat16
    element of 2^-30 becomes 2^-14, which float16 holds with all 8 bits.
    """
    largest = max(map(abs, torch.stack(weight.detach().aminmax()).tolist())) if weight.numel() else math.nan
    if not math.isfinite(largest):
        return None
    exponent = LARGEST - math.frexp(largest)[1] if largest else 0
    return 2.0 ** max(min(exponent, MOST_SCALE), -MOST_SCALE)


def _fits(scaled: Tensor) -> bool:
    """Whether float16 holds the float32 elements of `[out, in]`, up to `EXACT`."""
    error = (scaled.half().float() - scaled).abs_().amax(dim=1)
    return not bool((error > EXACT * scaled.abs_().amax(dim=1)).any())


def kind_of_copy(weight: Tensor) -> type[Float16Weight] | type[OneDnnWeight] | None:
    """The kind of copy that computes the layer itself, but for the order of sums; `None` where there is none."""
    if has_float16() and Float16Weight.fits(weight):
        return Float16Weight
    return OneDnnWeight if weight.dtype is torch.float32 and torch.backends.mkldnn.is_available() else None


@cache
def has_float16() -> bool:
    """Whether this PyTorch has FBGEMM's float16 product for this processor, and computes with it what float64 does.

    `torch.ops.onednn.linear_dynamic_fp16` is a slow reference implementation, so another engine does not count.
    """
    if torch.backends.quantized.engine not in ("x86", "fbgemm") or not _has_vectors():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(size, generator=generator).bfloat16().float() for size in ((64, 96), (3, 96)))
    try:
        product = Float16Weight.of(weight).multiply(x, None)
    except (AttributeError, RuntimeError):  # an operator is missing, or is none of this processor
        return False
    expected = functional.linear(x.double(), weight.double())
    return bool((product - expected).norm() <= 1e-5 * expected.norm())


def _has_vectors() -> bool:
    return torch.backends.cpu.get_cpu_capability().startswith("AVX")


class EndingError(RuntimeError):
    """The process ends, so the copy that is being made is not needed."""


ending = Event()  # set when the process ends


def _blocks(weight: Tensor) -> Iterator[Tensor]:
    """Consecutive rows of a weight, of at most `AT_ONCE` elements; `EndingError` after them when the process ends."""
    for index, rows in enumerate(weight.split(max(AT_ONCE // max(weight.shape[1], 1), 1))):
        if index and ending.is_set():
            raise EndingError
        yield rows


@dataclass(frozen=True, eq=False)
class Int8Weight:
    """A weight `[out, in]` rounded to int8, in the order that the product reads; `[out]` the scale of a level, and
    zeros."""

    packed: Tensor
    scales: Tensor
    zeros: Tensor
    name = "int8"
    bytes_of_element = 1

    @classmethod
    def of(cls, weight: Tensor) -> Int8Weight:
        weight = weight.detach().float()
        scales = (weight.abs().amax(dim=1) / LEVELS).clamp_min(TINY)
        packed = torch.ops.onednn.qlinear_prepack((weight / scales[:, None]).round_().to(torch.int8), None)
        return cls(packed, scales, torch.zeros(len(scales), dtype=torch.int32))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """`x` `[..., in]`, rounded to 8 bits by its largest number, times the weight, in the dtype of `x`.

        To 7 bits on processors without VNNI instructions: these add two products in 16 bits, and 2 * 127 * 127 fits.

        Example: the largest number of the input is 2.54, so a level is 0.02, and 1.0 becomes 128 + 50. In 7 bits a
        level is 2.54 / 63, and 1.0 becomes 64 + 25.
        """
        is_vnni_supported = getattr(torch.cpu, "_is_vnni_supported", lambda: False)  # not in every PyTorch
        levels = LEVELS if is_vnni_supported() else LEVELS // 2
        rows = x.reshape(-1, x.shape[-1]).float()
        scale, middle = max(rows.abs().max().item(), TINY) / levels, levels + 1  # oneDNN's fast kernels take no signs
        # Half a level is added before the digits after the point are cut off.
        rounded = torch.add(torch.tensor(middle + 0.5), rows, alpha=1.0 / scale).to(torch.uint8)
        bias = None if bias is None else bias.float()
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            rounded, scale, middle, self.packed, self.scales, self.zeros, bias, 1.0, 0, torch.float32, "none", [], ""
        )
        return product.view(*x.shape[:-1], -1).to(x.dtype)


def has_int8() -> bool:
    """Whether this PyTorch has int8 products for this processor. Without AVX2 they are far slower than float32's."""
    return _has_vectors() and torch.backends.mkldnn.is_available() and hasattr(torch.ops.onednn, "qlinear_prepack")


@dataclass(frozen=True)
class ProductTimes:
    """Seconds of processor time an element of a weight, for products of 1, 4 and 16 rows.

    Attributes:
        own, copied: of PyTorch's own product, and of the one that uses a copy of the weight.
        least, most: the copy is used for products of `least` to `most` rows; for none where `most` is 0.
    """

    own: tuple[float, ...]
    copied: tuple[float, ...]
    least: int
    most: int

    @classmethod
    def of(cls, own: tuple[float, ...], copied: tuple[float, ...]) -> ProductTimes:
        """Decide for which rows the copy is used.

        Example: PyTorch's own product takes 2.3, 2.4 and 3.9 ms for 1, 4 and 16 rows, and the copy's 0.9, 1.4 and 4.9.
        The copy gains for 1 and 4 rows, and for 16 its loss is below 1.3, so it is used for 1 to 24 rows.
        """
        least, most = 1, 0
        for first, last, mine, other in zip((1, *(each + 1 for each in UP_TO)), UP_TO, own, copied, strict=False):
            if other * LEAST_GAIN <= mine or (most and other <= MOST_LOSS * mine):
                least, most = least if most else first, last
            elif most:
                break
        return cls(own, copied, least, most)

    def seconds(self, rows: int, with_copy: bool) -> float:
        """An element's share of a product of so many rows, along straight lines between the measured ones."""
        times = self.copied if with_copy and self.least <= rows <= self.most else self.own
        points = list(zip(ROWS, times, strict=True))
        (x, a), (y, b) = next((pair for pair in pairwise(points) if rows <= pair[1][0]), points[-2:])
        return a + (b - a) * (rows - x) / (y - x)


class MeasuredCopy(NamedTuple):
    """A copy of a weight, and what products with it take."""

    copy: Float16Weight | OneDnnWeight | Int8Weight
    times: ProductTimes

    @property
    def bytes_of_element(self) -> int:
        return self.copy.bytes_of_element


Kind = type[Float16Weight] | type[OneDnnWeight]

# By the dtype of weights and the kind of their copies, and of the first weight of each dtype.
_measured: dict[tuple[torch.dtype, Kind], ProductTimes] = {}
_first: dict[torch.dtype, ProductTimes | None] = {}


def measured_copy(weight: Tensor) -> MeasuredCopy | None:
    """The copy of a weight `[out, in]` that computes the layer exactly; `None` where there is none, or no number of
    rows gains by it."""
    kind = kind_of_copy(weight)
    times = None if kind is None else _times_of(kind, _sample(weight))
    return MeasuredCopy(kind.of(weight), times) if kind is not None and times is not None and times.most else None


def int8_copy(weight: Tensor) -> MeasuredCopy:
    """The int8 copy of a weight, for products of up to `MOST_INT8_ROWS` rows."""
    return MeasuredCopy(Int8Weight.of(weight), ProductTimes((), (), 1, MOST_INT8_ROWS))


def product_times(weight: Tensor) -> ProductTimes | None:
    """What products of weights of this dtype take, measured with a part of the first such weight in at most 0.3 s of
    the processor; `None` where weights of this dtype have no copies."""
    if weight.dtype not in _first:
        sample = _sample(weight)
        if (kind := kind_of_copy(sample)) is None:  # such as a weight with NaN, which says nothing of others
            kind, sample = kind_of_copy(torch.ones_like(sample)), torch.ones_like(sample)
        _first[weight.dtype] = None if kind is None else _times_of(kind, sample)
    return _first[weight.dtype]


def forget_product_times() -> None:
    _measured.clear()
    _first.clear()


def _sample(weight: Tensor) -> Tensor:
    """`SAMPLE` elements of a weight, or somewhat fewer: its first rows, again and again if there are few."""
    rows = max(SAMPLE // weight.shape[1], 1)
    times = -(-rows // len(weight))
    return (weight.detach().repeat(times, 1) if times > 1 else weight.detach())[:rows]


def _times_of(kind: Kind, sample: Tensor) -> ProductTimes:
    of = sample.dtype, kind
    if of not in _measured:
        _measured[of] = _measure(sample, kind.of(sample))
    return _measured[of]


@torch.inference_mode()
def _measure(weight: Tensor, copy: Float16Weight | OneDnnWeight) -> ProductTimes:
    others = torch.ones(COLD // 8, dtype=torch.int64)
    ways: tuple[Callable[[Tensor], Any], ...] = (
        lambda x: functional.linear(x, weight),
        lambda x: copy.multiply(x, None),
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a thread that waits for another one, which has no core now, counts its waiting
    try:
        inputs = [torch.ones(rows, weight.shape[1], dtype=weight.dtype) for rows in ROWS]
        times = [[_shortest(way, x, others) for x in inputs] for way in ways]
    finally:
        torch.set_num_threads(threads)
    own, copied = (tuple(seconds / weight.numel() for seconds in each) for each in times)
    return ProductTimes.of(own, copied)


def _shortest(product: Callable[[Tensor], Any], x: Tensor, others: Tensor) -> float:
    """Seconds of processor time of a product: the shortest run, which another one confirms if the machine lets it."""
    times = sorted(_cold(product, x, others) for _ in range(RUNS))
    while times[1] > AGREE * times[0] and len(times) < MOST_RUNS:
        times = sorted([*times, _cold(product, x, others)])
    return times[0]


def _cold(product: Callable[[Tensor], Any], x: Tensor, others: Tensor) -> float:
    """Seconds of processor time of one product of a weight that is in no cache."""
    others.sum()
    begin = time.thread_time()
    product(x)
    return max(time.thread_time() - begin, 1e-9)
