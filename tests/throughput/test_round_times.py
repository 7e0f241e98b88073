"""Rounds that are timed, and the costs that follow from them."""

from dataclasses import replace

import pytest

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.round_times import Drafting, RoundTimes, corrected, in_seconds

MEASURED = Costs(0.002, (0.010, 0.030))


class Clock:
    """Seconds that pass when told."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def rounds(passes: dict[int, list[float]], length: int = 16) -> RoundTimes:
    """Rounds without drafting of these widths and seconds."""
    clock = Clock()
    times = RoundTimes(clock)
    for width, each in passes.items():
        for seconds in each:
            times.begin()
            times.drafted(Drafting())
            clock.now += seconds
            times.end(length, width)
    return times


def test_assumed_costs_become_seconds() -> None:
    """The example of `in_seconds`: passes and drafting each by one factor, whatever single rounds took."""
    times = rounds({3: [0.022, 0.022, 0.9, 0.022]})
    times.drafts[7] = [(Drafting(2), 0.006), (Drafting(4), 0.012), (Drafting(1), 0.9)]
    costs = in_seconds(Costs(0.1, (1.0, 1.05, 1.1), read=0.01), times)
    assert costs is not None
    assert costs.verify == pytest.approx((0.020, 0.021, 0.022))
    assert (costs.draft, costs.read) == pytest.approx((0.003, 0.0003))
    alone = in_seconds(Costs(0.1, (1.0, 1.05, 1.1)), rounds({1: [0.02] * 3}))
    assert alone is not None
    assert alone.draft == pytest.approx(0.002), "nothing was drafted: its share of a pass"


# Timing. --------------------------------------------------------------------------------------------------------------


def test_a_round_is_its_drafting_and_the_rest() -> None:
    clock = Clock()
    times = RoundTimes(clock)
    for drafted, width in ((Drafting(3, read=2), 4), (Drafting(), 1), (None, 4)):
        times.begin()
        clock.now += 0.005
        times.drafted(drafted)
        clock.now += 0.030
        times.end(200, width)
    assert times.passes == {8: {4: pytest.approx([0.030, 0.030]), 1: pytest.approx([0.030])}}
    ((drafting, seconds),) = times.drafts[8]
    assert drafting == Drafting(3, read=2)
    assert seconds == pytest.approx(0.005)


# What follows for the costs. ------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    costs = corrected(MEASURED, {2: [0.020] * 8 + [9.0]}, [])
    assert costs.verify == pytest.approx((0.0074, 0.0221), rel=0.01)
    assert costs.draft == pytest.approx(0.74 * MEASURED.draft, rel=0.01), "nothing was drafted: as the passes"


def test_one_text_changes_no_cost_by_more_than_twice() -> None:
    costs = corrected(MEASURED, {1: [1.0] * 100, 2: [1.0] * 100}, [(Drafting(1), 1.0)] * 100)
    for new, old in zip((*costs.verify, costs.draft), (*MEASURED.verify, MEASURED.draft), strict=True):
        assert 1.9 * old < new <= 2.0 * old


def test_wider_passes_than_were_measured_are_learned() -> None:
    costs = corrected(MEASURED, {4: [0.015] * 1000}, [])
    assert len(costs.verify) == 4
    assert costs.verify[3] == pytest.approx(0.035, rel=0.01), "half of the 0.07 that the straight line says"


@pytest.mark.parametrize("start", [0.001, 0.0])
def test_a_step_and_starting_are_told_apart(start: float) -> None:
    """The example of the docstring; also from costs that know of no starting."""
    costs, drafts = replace(MEASURED, start=start), [(Drafting(1), 0.004), (Drafting(3), 0.008)] * 300
    costs = corrected(corrected(costs, {}, drafts), {}, drafts)
    assert costs.draft == pytest.approx(0.002, rel=0.05)
    assert costs.start == pytest.approx(0.002, rel=0.1)


def test_drafts_of_one_length_change_their_price_as_a_whole() -> None:
    costs = corrected(replace(MEASURED, start=0.001, read=0.0001, branch=0.0002), {}, [(Drafting(2), 0.010)] * 1000)
    found = costs.draft, costs.start, costs.read, costs.branch
    assert found == pytest.approx((0.004, 0.002, 0.0002, 0.0004), rel=0.01)


def test_what_a_draft_reads_beside_its_steps_is_not_a_step_s_price() -> None:
    costs = replace(MEASURED, read=0.001, branch=0.002)
    drafts = [(each, each.seconds(costs)) for each in (Drafting(1, 5, 0), Drafting(2, 0, 9), Drafting(4, 1, 3))]
    followed = corrected(costs, {}, drafts * 100)
    assert followed.draft == pytest.approx(costs.draft)
    assert followed.start == pytest.approx(0.0, abs=1e-9)


# Kept by length, in memory and on disk. -------------------------------------------------------------------------------


def test_each_length_has_its_costs() -> None:
    known = KnownCosts(MEASURED)
    assert known.at(50) is known.at(99)
    assert known.at(50) == known.at(5000) == known.first == MEASURED
    known.learn(rounds({1: [0.020] * 1000}, length=50))
    known.learn(rounds({1: [0.040] * 1000}, length=4000))
    assert known.at(50).verify[0] == pytest.approx(0.020, rel=0.01)
    assert known.at(4000).verify[0] == pytest.approx(0.040, rel=0.01)
    assert known.at(9000) == known.at(4000), "the nearest that is known"
    assert known.at(150) == known.at(50)
    assert known.first == MEASURED


def test_a_form_is_made_of_what_was_learned() -> None:
    known = KnownCosts(MEASURED, lambda costs: costs.share(2))
    assert known.at(0) == MEASURED.share(2)
    known.learn(rounds({1: [0.020] * 1000, 2: [0.030] * 1000}))
    assert known.at(0).verify == pytest.approx((0.010, 0.015), rel=0.01)
