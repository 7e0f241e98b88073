"""Clocks that other load disturbs as little as possible."""

from __future__ import annotations

import time

import pytest

from hf_specdecpp.clocks import least_times


def test_every_action_is_timed_and_the_least_counts() -> None:
    calls = {1: 0, 2: 0}

    def act(name: int, seconds: float) -> None:
        calls[name] += 1
        time.sleep(seconds if calls[name] != 2 else seconds + 0.02)  # disturbed once

    times = least_times({1: lambda: act(1, 0.002), 2: lambda: act(2, 0.006)}, budget=0.1)
    assert times[1] == pytest.approx(0.002, abs=0.003)
    assert times[2] == pytest.approx(0.006, abs=0.004)
    assert calls[1] > 3
