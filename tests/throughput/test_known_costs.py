"""What rounds cost: before any was timed, as it follows from timed ones, of which rounds it is, what is remembered."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, partly_agreeing, prompt, tiny
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.costs import Costs, DraftWork
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import known_costs, memory
from hf_specdecpp.throughput.known_costs import RoundTimes, corrected, in_seconds
from hf_specdecpp.throughput.plan import ChainPlan, Plan

pytestmark = pytest.mark.usefixtures("cache")


def time_a_text(known: known_costs.KnownCosts, drafting: float = 1.0, passes: tuple[float, float] = (2.0, 2.0)) -> None:
    """Nine rounds without candidates and nine with one, and the seconds of drafting it and of both passes."""
    now = [0.0]
    times = RoundTimes(lambda: now[0])
    for width in (1, 2) * 9:
        times.begin_round()
        now[0] += drafting * (width - 1)
        times.drafted(DraftWork(width - 1))
        now[0] += passes[width - 1]
        times.end(16, width)
    known.update(times)


def test_a_row_of_a_batch_pays_its_share() -> None:
    target = tiny("llama", hidden_size=256, intermediate_size=512)
    drafter = Drafter(target)
    one, four = (
        known_costs.costs_of(known_costs.Rounds(target, drafter, DraftProbability(), 4, rows=rows)) for rows in (1, 4)
    )
    assert four.at(0) == four.first.scaled(1 / 4)
    assert four.at(0).verify[0] < one.at(0).verify[0]
    assert 0.0 < four.at(0).read < four.at(0).draft < one.at(0).draft
    assert len(four.at(0).verify) == 5


def test_they_are_those_of_like_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    drafter = Drafter(partly_agreeing(target))

    def ask(estimator: Any = None, most: int = 20) -> known_costs.KnownCosts:
        return known_costs.costs_of(known_costs.Rounds(target, drafter, estimator or DraftProbability(), most))

    first = ask()
    assert ask() is first
    assert first.is_assumed
    time_a_text(first)
    assert not ask().is_assumed
    with known_costs.without_known_costs():
        assert ask().is_assumed
    assert ask() is first
    others = [ask(most=5), ask(AcceptanceHead(32))]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert all(each.is_assumed for each in [*others, ask()]), "other settings are other costs"
    known_costs.forget_costs()
    assert ask() is not first


def test_a_width_that_was_timed_in_a_better_moment_does_not_pay_by_itself() -> None:
    """Passes over two tokens seemed to take two thirds of those over one, and no candidate is ever accepted."""
    target = tiny("llama")
    known = known_costs.costs_of(known_costs.Rounds(target, Drafter(target), DraftProbability(), 4))
    time_a_text(known, 0.5, (3.0, 1.5))
    plan = ChainPlan(known, 4, lag=0)
    assert plan.costs.verify[1] == plan.costs.verify[0]
    for _ in range(24):
        plan.record_chain([0.5], 1, 0)
        plan.set_length(16)
    assert not plan.pays


def test_few_ways_of_sampling_are_remembered() -> None:
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", costs={"draft": 0.1, "verify": [1.0]})
    for temperature in range(1, 25):
        how: dict[str, Any] = {"max_new_tokens": 2, "do_sample": True, "temperature": float(temperature)}
        target.generate(prompt(), assistant_model=assistant, **how)
    learned = assistant.memory.learned[target]
    assert [key[3] for key in learned] == [float(temperature) for temperature in range(9, 25)]


def test_what_rounds_teach_is_of_one_way_to_draw_candidates() -> None:
    """Another temperature of the draft, or the target's successors, and its estimates come true another time; greedy
    texts do not know that temperature."""
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", costs={"draft": 0.1, "verify": [1.0]})
    for do_sample, ways in ((True, 4), (False, 2)):
        for _ in range(2):
            for mixes, temperature in product((False, True), (0.8, 1.0)):
                assistant.decisions = Decisions(draft_successors=mixes, draft_temperature=temperature)
                target.generate(prompt(), assistant_model=assistant, max_new_tokens=8, do_sample=do_sample)
        assert sum(each.greedy is not do_sample for each in assistant.memory.learned[target].values()) == ways


# In generations whose first costs are wrong by far. -------------------------------------------------------------------


WRONG = Costs(5.0, (100.0, 100.1, 100.2))  # seconds, that is
ROWS = torch.cat([prompt(12, seed) for seed in range(4)])

KINDS: dict[str, tuple[dict[str, Any], Tensor, dict[str, Any]]] = {
    "chains": ({}, prompt(), {}),
    "trees": ({"tree": "dyspec", "tree_budget": 8}, prompt(), {}),
    "batch": ({}, ROWS, {"attention_mask": torch.ones_like(ROWS)}),
    "static": ({}, prompt(), {"cache_implementation": "static"}),
}


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are known that are wrong by far."""

    def known(rounds: known_costs.Rounds) -> known_costs.KnownCosts:
        return found.setdefault(rounds.rows, known_costs.KnownCosts(WRONG, rounds.formed()))

    found: dict[int, known_costs.KnownCosts] = {}
    monkeypatch.setattr(memory, "costs_of", known)


def plan_of(assistant: SpecDecPPAssistant, target: CausalLM) -> Plan:
    (learned,) = assistant.memory.learned[target].values()
    assert learned.plan is not None
    return learned.plan


@pytest.mark.daily("chains")
@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("kind", KINDS)
def test_costs_follow_the_rounds(kind: str) -> None:
    settings, ids, options = KINDS[kind]
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", max_tokens=4, **settings)
    options = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, **options}
    plain = target.generate(ids, **options)
    seen: list[Costs] = []
    for _ in range(4):
        assert torch.equal(target.generate(ids, assistant_model=assistant, **options), plain)
        seen.append(plan_of(assistant, target).costs)
    assert seen[0] == plan_of(assistant, target).known._form(WRONG), "the first text reckons with what was known"
    assert all(later.verify[0] < 0.85 * earlier.verify[0] for earlier, later in zip(seen, seen[1:], strict=False))
    assert all(later.draft < 0.85 * earlier.draft for earlier, later in zip(seen, seen[1:], strict=False))


@pytest.mark.usefixtures("wrong")
def test_given_costs_never_change() -> None:
    target, given = tiny("llama"), {"draft": 0.05, "verify": [1.0, 1.1, 1.2]}
    assistant = assistant_for(target, rule="throughput", max_tokens=4, costs=given)
    for _ in range(2):
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=False)
    assert plan_of(assistant, target).costs == Costs.from_dict(given)


# Rounds that are timed, and the costs that follow from them. --------------------------------------------------


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
            times.begin_round()
            times.drafted(DraftWork())
            clock.now += seconds
            times.end(length, width)
    return times


def test_assumed_costs_become_seconds() -> None:
    """The example of `in_seconds`: passes and drafting each by one factor, whatever single rounds took."""
    times = rounds({3: [0.022, 0.022, 0.9, 0.022]})
    times.drafts[7] = [(DraftWork(2), 0.006), (DraftWork(4), 0.012), (DraftWork(1), 0.9)]
    costs = in_seconds(Costs(0.1, (1.0, 1.05, 1.1), read=0.01), times)
    assert costs is not None
    assert costs.verify == pytest.approx((0.020, 0.021, 0.022))
    assert (costs.draft, costs.read) == pytest.approx((0.003, 0.0003))
    alone = in_seconds(Costs(0.1, (1.0, 1.05, 1.1)), rounds({1: [0.02] * 3}))
    assert alone is not None
    assert alone.draft == pytest.approx(0.002), "nothing was drafted: its share of a pass"


# What follows for the costs. ------------------------------------------------------------------------------------------


def test_the_example_of_the_docstring() -> None:
    costs = corrected(MEASURED, {2: [0.020] * 8 + [9.0]}, [])
    assert costs.verify == pytest.approx((0.0074, 0.0221), rel=0.01)
    assert costs.draft == pytest.approx(0.74 * MEASURED.draft, rel=0.01), "nothing was drafted: as the passes"


def test_one_text_changes_no_cost_by_more_than_twice() -> None:
    costs = corrected(MEASURED, {1: [1.0] * 100, 2: [1.0] * 100}, [(DraftWork(1), 1.0)] * 100)
    for new, old in zip((*costs.verify, costs.draft), (*MEASURED.verify, MEASURED.draft), strict=True):
        assert 1.9 * old < new <= 2.0 * old


@pytest.mark.parametrize("start", [0.001, 0.0])
def test_a_step_and_starting_are_told_apart(start: float) -> None:
    """The example of the docstring; also from costs that know of no starting."""
    costs, drafts = replace(MEASURED, start=start), [(DraftWork(1), 0.004), (DraftWork(3), 0.008)] * 300
    costs = corrected(corrected(costs, {}, drafts), {}, drafts)
    assert costs.draft == pytest.approx(0.002, rel=0.05)
    assert costs.start == pytest.approx(0.002, rel=0.1)


def test_drafts_of_one_length_change_their_price_as_a_whole() -> None:
    costs = corrected(replace(MEASURED, start=0.001, read=0.0001, branch=0.0002), {}, [(DraftWork(2), 0.010)] * 1000)
    found = costs.draft, costs.start, costs.read, costs.branch
    assert found == pytest.approx((0.004, 0.002, 0.0002, 0.0004), rel=0.01)


def test_what_a_draft_reads_beside_its_steps_is_not_a_step_s_price() -> None:
    costs = replace(MEASURED, read=0.001, branch=0.002)
    drafts = [(each, each.seconds(costs)) for each in (DraftWork(1, 5, 0), DraftWork(2, 0, 9), DraftWork(4, 1, 3))]
    followed = corrected(costs, {}, drafts * 100)
    assert followed.draft == pytest.approx(costs.draft)
    assert followed.start == pytest.approx(0.0, abs=1e-9)


def test_reading_many_tokens_has_a_price_of_its_own() -> None:
    """The example of `_corrected_reading`; it changes by at most a factor of two, and no step's price with it."""
    costs = replace(MEASURED, draft=0.004, read=0.00015)
    for seconds, read in ((0.028, 0.0001), (9.0, 0.0003), (0.001, 0.000075)):
        found = corrected(costs, {}, [(DraftWork(2, read=200), seconds)])
        assert found.read == pytest.approx(read)
        assert found == replace(costs, read=found.read)


def test_the_head_reads_no_prompt() -> None:
    """A draft with a small vocabulary takes less for a step, and as long for a prompt."""
    target = tiny("llama")
    all_ids, few_ids = (Drafter(partly_agreeing(target), draft_vocab=each) for each in (None, torch.arange(8)))
    first, second = (
        known_costs.costs_of(known_costs.Rounds(target, each, DraftProbability(), 4)).first
        for each in (all_ids, few_ids)
    )
    assert first.draft > second.draft
    assert first.read == second.read > 0.0


# Kept by length, in memory and on disk. -------------------------------------------------------------------------------


def test_each_length_has_its_costs() -> None:
    known = known_costs.KnownCosts(MEASURED)
    assert known.at(50) is known.at(99)
    assert known.at(50) == known.at(5000) == known.first == MEASURED
    known.update(rounds({1: [0.020] * 1000}, length=50))
    known.update(rounds({1: [0.040] * 1000}, length=4000))
    assert known.at(50).verify[0] == pytest.approx(0.020, rel=0.01)
    assert known.at(4000).verify[0] == pytest.approx(0.040, rel=0.01)
    assert known.at(9000) == known.at(4000), "the nearest that is known"
    assert known.at(150) == known.at(50)
    assert known.first == MEASURED
