"""Clocks for measurements: seconds of computations, with other processes' left out where that can be known."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch


def computing_clock(*devices: torch.device) -> Callable[[], float]:
    """Reads the seconds of computations on these devices, by default on the CPU.

    With one thread on a CPU, seconds for which other processes have it are left out: on a busy machine they would be
    most of the time.
    """
    only_here = torch.get_num_threads() == 1 and all(device.type == "cpu" for device in devices)
    return time.thread_time if only_here and os.name == "posix" else time.perf_counter


def least_times(
    actions: dict[int, Callable[[], None]],
    budget: float,
    clock: Callable[[], float] = time.perf_counter,
    turns: int = 25,
    least: int = 2,
) -> dict[int, float]:
    """Minimum time per action, round-robin.

    Args:
        actions: by name.
        budget: seconds after which no further action starts, once the first ones have been timed.
        clock: times them.
        turns: the most.
        least: how many of the actions are timed in any case.
    """
    first = list(actions)[:least]
    for name in first:
        actions[name]()  # warm up
    times: dict[int, float] = {}
    end = time.perf_counter() + budget
    for _ in range(turns):
        for name, action in actions.items():
            if time.perf_counter() > end and set(first) <= set(times):
                return times
            begin = clock()
            action()
            times[name] = min(times.get(name, float("inf")), clock() - begin)
    return times
