"""A fast test takes about a second of processor time at most, unless it says how many: `@pytest.mark.takes(3)`.

Wall-clock time would say how busy the machine is. Processor time, too, says how fast the machine is: a test that is too
slow is therefore judged beside a piece of work of known length, done right after the test."""

import os
import sys
from collections.abc import Generator

import pytest

LIMIT = 1.0  # seconds of a test's call, without its fixtures
IMPORT = 0.01  # seconds more for each module that the test is the first to import
SPREAD = 2.0  # a test may take so many times its limit: from run to run a test's processor time varies that much
YARDSTICK = 0.06  # seconds that `_yardstick` takes on the machine that limits are written for, a fast one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a fast test that passed, but took too long."""
    before, modules = _used(), len(sys.modules)
    result = yield
    seconds, limit = _used() - before, _limit(item) + IMPORT * (len(sys.modules) - modules)
    is_fast = item.get_closest_marker("slow") is None and item.get_closest_marker("apart") is None
    if is_fast and seconds > SPREAD * limit and seconds > (now := SPREAD * limit * _slowness()):
        pytest.fail(
            f"This fast test took {seconds:.1f} s of processor time, where {now:.1f} s are allowed ({limit:.1f} s on "
            f"the machine that limits are written for, {SPREAD:.0f} times that since times vary), so that `make test` "
            "stays under six minutes. Make its case smaller, share what it makes with other tests in a fixture, mark "
            f"it slow, or, if the fast run must have it, mark it `@pytest.mark.takes({seconds + 1:.0f})`.",
            pytrace=False,
        )
    return result


def _limit(item: pytest.Item) -> float:
    """What the nearest of the marks `takes(3)` and `daily("llama-tree", takes=3)` says."""
    for mark in item.iter_markers():
        if mark.name == "takes":
            return mark.args[0]
        if mark.name == "daily" and "takes" in mark.kwargs:
            return mark.kwargs["takes"]
    return LIMIT


def _used() -> float:
    """Seconds of processor time of this process, in all its threads, and of its children that have ended."""
    return sum(os.times()[:4])


def _slowness() -> float:
    """How many times longer a piece of work takes here and now; 1 on faster machines."""
    before = _used()
    _yardstick()
    return max(1.0, (_used() - before) / YARDSTICK)


def _yardstick() -> int:
    return sum(number * number % 7 for number in range(1_400_000))
