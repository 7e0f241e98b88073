"""Clocks for measurements of computations, which exclude the time of other processes if possible."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean, median

import torch


def computing_clock(*devices: torch.device) -> Callable[[], float]:
    """A function that returns seconds, for computations on `devices` (default: the CPU). It measures the thread's CPU
    time if torch has one thread and all devices are CPUs (on POSIX), otherwise wall time."""
    only_here = torch.get_num_threads() == 1 and all(device.type == "cpu" for device in devices)
    return time.thread_time if only_here and os.name == "posix" else time.perf_counter


def working_clock() -> Callable[[], float]:
    """A function that returns seconds of CPU time, of this thread if torch has one thread (another thread may copy
    weights meanwhile), otherwise of the process."""
    return time.thread_time if torch.get_num_threads() == 1 else time.process_time


def typical(times: Sequence[float]) -> float | None:
    """The median of the times; their mean if the median is 0, as with a coarse clock; `None` if both are invalid.

    Example: with a clock that ticks every 10 ms, 22 of 25 passes take 0 s and 3 take 10 ms: the result is 1.2 ms.
    """
    return first_sensible(median(times), fmean(times))


def first_sensible(*seconds: float) -> float | None:
    """The first valid time (`are_sensible`), or `None`. Times are 0 with a coarse clock, negative if it is set back."""
    return next((each for each in seconds if are_sensible([each])), None)


def are_sensible(times: Iterable[float]) -> bool:
    """Whether all times are above 0 and finite."""
    return all(0.0 < each < math.inf for each in times)
