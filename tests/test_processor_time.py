"""Fast tests that take too long fail."""

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import os
import pytest

def work(seconds):
    start = os.times()[0]
    while os.times()[0] - start < seconds:
        sum(range(1000))

@pytest.mark.takes(0.05)
def test_longer_than_said():
    work(0.4)

@pytest.mark.every(2, takes=5)
def test_as_said():
    work(0.2)

@pytest.mark.parametrize("mark", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.apart)])
@pytest.mark.takes(0.05)
def test_slow_or_apart(mark):
    work(0.4)

"""
MARKS = "[pytest]\nmarkers =\n    takes\n    every\n    slow\n    apart\n"


@pytest.mark.takes(5)
def test_processor_time_is_limited(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("support.processor_time._slowness", lambda: 1.0)
    pytester.makeini(MARKS)
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_inprocess("-p", "support.processor_time", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["This fast test took 0.[3-9] s of processor time, where 0.1 s are allowed *`@pytest.mark.takes(1)`."]
    )
