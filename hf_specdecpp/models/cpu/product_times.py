"""What products of a weight and its copy take on this processor (`ProductTimes`), measured once a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.models.cpu.products import MOST_INT8_ROWS, Float16Weight, Int8Weight, OneDnnWeight, kind_of_copy

ROWS = (1, 4, 16)  # of the products that are measured
UP_TO = (2, 8, 24)  # rows that these stand for; products of more rows are PyTorch's own
SAMPLE = 1 << 21  # elements of a weight
COLD = 64 << 20  # bytes that are read between two products, so that no weight is in a cache
RUNS, MOST_RUNS = 3, 6  # of each product
AGREE = 1.15  # times the shortest run, which the second one may take: else something else was read meanwhile
LEAST_GAIN = 1.05  # of a copy's product over PyTorch's own
MOST_LOSS = 1.3  # for more rows: below, the copy is kept, since rows then have the same bits in all narrow passes


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
