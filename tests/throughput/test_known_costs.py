"""What rounds cost before any was timed, under what it is kept, and what is remembered of targets."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, partly_agreeing, prompt, tiny

from hf_specdecpp import AcceptanceHead, files
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.throughput import known_costs as costs
from hf_specdecpp.throughput.chains import ChainPlan
from hf_specdecpp.throughput.round_times import Drafting, RoundTimes

pytestmark = pytest.mark.usefixtures("cache")


def time_a_text(known: costs.KnownCosts) -> None:
    """Nine rounds without candidates and nine with one, of 2 and 3 s, of which drafting takes 1."""
    now = [0.0]
    times = RoundTimes(lambda: now[0])
    for width in (1, 2) * 9:
        times.begin()
        now[0] += width - 1.0
        times.drafted(Drafting(width - 1))
        now[0] += 2.0
        times.end(16, width)
    known.learn(times)


def test_a_row_of_a_batch_pays_its_share() -> None:
    target = tiny("llama", hidden_size=256, intermediate_size=512)
    drafter = Drafter(target)
    one, four = (costs.costs_of(costs.Rounds(target, drafter, DraftProbability(), 4, rows=rows)) for rows in (1, 4))
    assert four.at(0) == four.first.share(4)
    assert four.at(0).verify[0] < one.at(0).verify[0]
    assert 0.0 < four.at(0).read < four.at(0).draft < one.at(0).draft
    assert len(four.at(0).verify) == 5


def test_they_are_kept_once_rounds_were_timed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    drafter = Drafter(partly_agreeing(target))

    def ask(estimator: Any = None, most: int = 20) -> costs.KnownCosts:
        return costs.costs_of(costs.Rounds(target, drafter, estimator or DraftProbability(), most))

    first = ask()
    assert ask() is first
    assert first.is_assumed
    assert not list(cache.iterdir())
    time_a_text(first)
    monkeypatch.setattr(costs, "_known", {})  # another process
    assert not ask().is_assumed
    assert ask().at(16) == first.at(16)
    (path,) = cache.iterdir()
    assert json.loads(path.read_text())["of"]["target"]["layers"] == 3
    others = [ask(most=5), ask(AcceptanceHead(32))]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert all(each.is_assumed for each in [*others, ask()]), "other settings are other costs"


@pytest.mark.parametrize("text", [
    "",
    "[]",
    '{"costs": {"draft": 1, "verify": [1]}}',
    '{"costs": {"first": {"draft": -1, "verify": [1]}, "by_length": {}}}',
    '{"costs": {"first": {"draft": 1, "verify": [1]}, "by_length": {"x": {"draft": 1, "verify": [1]}}}}',
])  # fmt: skip
def test_a_damaged_file_is_no_knowledge(text: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    rounds = costs.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 20)
    time_a_text(costs.costs_of(rounds))
    (path,) = cache.iterdir()
    path.write_text(text)
    monkeypatch.setattr(costs, "_known", {})
    again = costs.costs_of(rounds)
    assert again.is_assumed
    time_a_text(again)
    assert json.loads(path.read_text())["costs"]["first"] == again.first.to_dict()


@pytest.mark.parametrize("error", [OSError("read-only"), ValueError("Corrupted assets folder"), None])
def test_an_unwritable_cache_is_no_error(error: Exception | None, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: str) -> Path:
        if error is not None:
            raise error
        return cache / "missing"

    monkeypatch.setattr(files, "cached_assets_path", fail)
    target = tiny("llama")
    time_a_text(costs.costs_of(costs.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 20)))
    costs.forget_costs()


def test_what_is_assumed_holds_for_one_text(cache: Path) -> None:
    """In passes of the target; then in seconds, and for later processes."""
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", max_tokens=6)
    rounds = costs.Rounds(target, assistant.setup().drafter, DraftProbability(), 6, products="own")
    known = costs.costs_of(rounds)
    assert known.is_assumed
    assert (known.first, known.first.verify[0]) == (rounds.assumed(), 1.0)
    assert 0.0 < known.first.read < known.first.draft
    assert not list(cache.iterdir())
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=False)
    assert costs.costs_of(rounds) is known
    assert not known.is_assumed
    (learned,) = assistant.memory.learned[target].values()
    assert learned.plan is not None
    spent = assistant.stats.target_seconds / assistant.stats.rounds
    assert 0.0 < learned.plan.costs.verify[0] < 3.0 * spent, "of one pass, and of some verification, on this thread"
    assert learned.plan.plain == learned.plan.costs.pass_seconds
    assert list(cache.iterdir())


def test_a_width_that_was_timed_in_a_better_moment_does_not_pay_by_itself() -> None:
    """Passes over two tokens seemed to take two thirds of those over one, and no candidate is ever accepted."""
    target = tiny("llama")
    known, now = costs.costs_of(costs.Rounds(target, Drafter(target), DraftProbability(), 4)), [0.0]
    times = RoundTimes(lambda: now[0])
    for width in (1, 2) * 9:
        times.begin()
        now[0] += 0.5 * (width - 1)
        times.drafted(Drafting(width - 1))
        now[0] += 3.0 / width
        times.end(16, width)
    known.learn(times)
    plan = ChainPlan(known, 4, lag=0)
    assert plan.costs.verify[1] == plan.costs.verify[0]
    for _ in range(24):
        plan.observe([0.5], 0, 1, 0)
        plan.follow(16)
    assert not plan.pays


def test_few_ways_of_sampling_are_remembered() -> None:
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", costs={"draft": 0.1, "verify": [1.0]})
    for temperature in range(1, 25):
        how: dict[str, Any] = {"max_new_tokens": 2, "do_sample": True, "temperature": float(temperature)}
        target.generate(prompt(), assistant_model=assistant, **how)
    learned = assistant.memory.learned[target]
    assert [key[2] for key in learned] == [float(temperature) for temperature in range(9, 25)]


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
