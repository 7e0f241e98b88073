"""Clocks for measurements: seconds of computations, with other processes' left out where that can be known."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

import torch


def computing_clock(*devices: torch.device) -> Callable[[], float]:
    """Reads the seconds of computations on these devices (the CPU); with one thread, those of this process alone."""
    only_here = torch.get_num_threads() == 1 and all(device.type == "cpu" for device in devices)
    return time.thread_time if only_here and os.name == "posix" else time.perf_counter


def working_clock() -> Callable[[], float]:
    """Reads the seconds of the processor; with one thread of PyTorch, those of this thread alone, as another one may
    copy weights beside it."""
    return time.thread_time if torch.get_num_threads() == 1 else time.process_time


def typical(times: Sequence[float]) -> float | None:
    """The median; where a coarse clock stood still in most cases, the mean. `None` if it cannot tell.

    Example: a clock ticks every 10 ms, and a pass takes one. Of 25 passes 22 take 0 s by it, and 3 take 10 ms: 1.2 ms.
    """
    return first_sensible(median(times), fmean(times))


def first_sensible(*seconds: float) -> float | None:
    """The first that computations can take: a clock that stands says 0, one that is set back says less."""
    return next((each for each in seconds if are_sensible([each])), None)


def are_sensible(times: Iterable[float]) -> bool:
    """Whether computations can take these seconds."""
    return all(0.0 < each < math.inf for each in times)
