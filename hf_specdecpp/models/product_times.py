"""Which matrix product is the fastest for a weight's shape on this machine: measured once for a shape, then kept.

Which one it is differs from one processor to the next. With one thread, seconds of PyTorch's own product divided by
seconds of oneDNN's on a packed weight, 1024 to 3072 features, two rows: 2.1 on an AMD EPYC, 0.9 on an Intel Xeon.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional
from transformers.utils import logging

from hf_specdecpp.files import recall, remember

logger = logging.get_logger("hf_specdecpp")

Product = Literal["own", "onednn", "packed"]
PRODUCTS: tuple[Product, ...] = ("own", "onednn", "packed")

ROWS = (1, 2, 4, 8, 16, 64)  # that are measured, each for all numbers of rows up to the next
PACKED_FOR = 4  # rows; the order of a packed copy is the same for all numbers but 1

LEAST_ELEMENTS = 100_000  # of a weight: below, calling oneDNN costs more than the product itself
LEAST_GAIN = 1.1  # over the simpler product, since two measurements of the same differ by a few percent
MOST_ELEMENTS = 2**20  # of a measured weight, so that there are several and many calls
ALL_ELEMENTS = 2**22  # of the weights that a measurement goes through: more than a core's cache holds
SECONDS, LEAST_TURNS = 0.3, 4  # for a shape

Times = dict[Product, list[float]]

_known: dict[tuple[int, int, int], Times] = {}


def fastest(out_features: int, in_features: int, may_pack: bool) -> tuple[Product, ...]:
    """The product to use for the numbers of rows in `ROWS`: measured before, or now.

    With times of 4 and 9 (own), 5 and 6 (oneDNN), 4 and 3 (packed) for 1 and 2 rows it is `("own", "packed")`, or
    `("own", "onednn")` without packed copies.
    """
    if out_features * in_features < LEAST_ELEMENTS:
        return tuple(PRODUCTS[0] for _ in ROWS)
    times = times_of(out_features, in_features)
    chosen: list[Product] = []
    for i in range(len(ROWS)):
        best: Product = "own"
        for product in PRODUCTS[1:] if may_pack else PRODUCTS[1:2]:
            if times[best][i] >= LEAST_GAIN * times[product][i]:
                best = product
        chosen.append(best)
    return tuple(chosen)


def index_of(rows: int) -> int:
    """Where in `ROWS` the times of so many rows are: 0 for 1, 1 for 2 and 3, 2 for 4 to 7, ..., 5 for 32 and more."""
    return min(rows.bit_length(), len(ROWS)) - 1


def times_of(out_features: int, in_features: int) -> Times:
    """Seconds of a product with a weight of this shape, for each way and each number of rows in `ROWS`."""
    shape = out_features, in_features, torch.get_num_threads()
    if shape not in _known:
        key = {"shape": shape, "host": platform.node(), "processor": _processor(), "torch": torch.__version__}
        times = recall("products", key)
        if times is None:
            times = measure(out_features, in_features)
            remember("products", key, times)
            logger.info(f"Measured the matrix products of weights of {out_features}x{in_features}: {times}")
        _known[shape] = times
    return _known[shape]


@torch.inference_mode()
def measure(out_features: int, in_features: int) -> Times:
    """Time the three products on weights that no cache hold: medians over single calls, taken in turns.

    So load of other processes, which stops a few calls and slows all of them alike, does not change which one is the
    fastest. Of a larger weight, such as that of an LM head, the first rows are taken.
    """
    out_features = max(min(out_features, MOST_ELEMENTS // in_features), 1)
    count = max(ALL_ELEMENTS // (out_features * in_features), 1)
    weights = [torch.full((out_features, in_features), 0.5) for _ in range(count)]
    copies = [pack(weight) for weight in weights]
    inputs = [torch.full((1, rows, in_features), 0.5) for rows in ROWS]
    ways: dict[Product, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "own": (functional.linear, weights),
        "onednn": (onednn, weights),
        "packed": (onednn, copies),
    }
    clock = computing_clock()
    samples: dict[Product, list[list[float]]] = {product: [[] for _ in ROWS] for product in PRODUCTS}
    end = time.perf_counter() + SECONDS
    turn = 0
    while turn < LEAST_TURNS or time.perf_counter() < end:
        for i, x in enumerate(inputs):
            for product, (multiply, chosen) in ways.items():
                for weight in chosen:
                    begin = clock()
                    multiply(x, weight, None)
                    samples[product][i].append(clock() - begin)
        turn += 1
    return {product: [median(each) for each in of_rows] for product, of_rows in samples.items()}


def computing_clock(*devices: torch.device) -> Callable[[], float]:
    """Reads the seconds of computations on these devices, by default on the CPU.

    With one thread on a CPU, seconds for which other processes have it are left out: on a busy machine they would be
    most of the time.
    """
    only_here = torch.get_num_threads() == 1 and all(device.type == "cpu" for device in devices)
    return time.thread_time if only_here and os.name == "posix" else time.perf_counter


def onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """oneDNN's product; `weight` may be a packed copy."""
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product


def pack(weight: Tensor) -> Tensor:
    """A copy of the weight in the order that oneDNN likes best for few rows."""
    copy: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR)
    return copy


def _processor() -> str:
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
