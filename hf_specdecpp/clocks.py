"""Clocks to time computations without the time of other processes, if possible; and `typical` times."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median

import torch


def computing_clock(*devices: torch.device) -> Callable[[], float]:
    """A function without arguments that returns seconds, to time computations on `devices` (default: the CPU): CPU time
    of this thread if torch has one thread and all devices are CPUs (on POSIX), otherwise wall-clock time."""
    only_here = torch.get_num_threads() == 1 and all(device.type == "cpu" for device in devices)
    return time.thread_time if only_here and os.name == "posix" else time.perf_counter


def working_clock() -> Callable[[], float]:
    """A function without arguments that returns seconds of CPU time: of this thread if torch has one thread (another
    thread may copy weights meanwhile), otherwise of the process."""
    return time.thread_time if torch.get_num_threads() == 1 else time.process_time


def typical(times: Sequence[float]) -> float | None:
    """The median of measured `times`; their mean if the median is 0, as with a coarse clock, or negative, as with one
    that was set back; `None` if neither is positive and finite.

    Example: with a clock that ticks every 10 ms, 22 of 25 passes take 0 s and 3 take 10 ms: the result is 1.2 ms."""
    return next((each for each in (median(times), fmean(times)) if 0.0 < each < math.inf), None)
