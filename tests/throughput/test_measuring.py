"""Costs of a draft and a target: measured sensibly, once, and kept."""

from __future__ import annotations

import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, partly_agreeing, prompt, tiny

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, files
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.models.causal_lm import CausalLM, cache_among
from hf_specdecpp.throughput import measuring as costs
from hf_specdecpp.throughput.chains import ThroughputState

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each measurement; they take no time here."""
    measured: list[int] = []

    def measure(rounds: costs.Rounds) -> Costs:
        measured.append(rounds.max_tokens)
        return Costs(0.1, (1.0, 1.1), read=0.01)

    monkeypatch.setattr(costs, "measure", measure)
    return measured


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_measuring_is_quick_and_leaves_no_trace(family: str) -> None:
    target = tiny(family)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    begin = time.perf_counter()
    measured: Any = costs.measure(
        costs.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 20, trees=True)
    )
    assert time.perf_counter() - begin < 4.0  # two seconds; twice that on a busy machine
    assert torch.equal(torch.rand(3), expected), "torch's generator is where it was"
    assert len(measured.verify) == 21
    assert 0.0 < measured.read < measured.draft
    assert 0.0 <= measured.branch < measured.draft
    assert all(seconds > 0.0 for seconds in measured.verify)


def test_a_row_of_a_batch_pays_its_share() -> None:
    target = tiny("llama", hidden_size=256, intermediate_size=512)
    drafter = Drafter(target)
    one, four = (costs.costs_of(costs.Rounds(target, drafter, DraftProbability(), 4, rows=rows)) for rows in (1, 4))
    assert four.measured.verify[0] > one.measured.verify[0]
    assert four.first == four.measured.share(4)
    assert four.first.verify[0] < one.first.verify[0]
    assert 0.0 < four.first.read < four.first.draft < one.first.draft
    assert len(four.first.verify) == 5


@pytest.mark.parametrize(("positions", "context"), [(256, 128), (64, 33)])
def test_a_batch_is_measured_after_a_longer_context(positions: int, context: int) -> None:
    """Further tokens of each row cost more there. One row is read, the others are copies."""
    target = tiny("gpt2", n_positions=positions)
    rounds = costs.Rounds(target, Drafter(target), DraftProbability(), 4, rows=3)
    calls: list[tuple[int, int, int]] = []

    def note(_model: CausalLM, _args: Any, kwargs: dict[str, Any]) -> None:
        calls.append((*kwargs["input_ids"].shape, cache_among(kwargs).get_seq_length()))

    with torch.inference_mode(), target.register_forward_pre_hook(note, with_kwargs=True):
        costs._time_target(rounds)
    assert calls[0] == (1, context, 0)
    assert set(calls[1:]) == {(3, count, context) for count in range(1, 6)}


def test_a_slower_target_and_a_slower_draft_cost_more() -> None:
    small, large = tiny("llama"), tiny("llama", num_hidden_layers=12)
    head = AcceptanceHead(32, inputs="before")
    one: Any = costs.measure(costs.Rounds(small, Drafter(large), head, 4))
    other: Any = costs.measure(costs.Rounds(large, Drafter(small), head, 4))
    assert other.verify[0] > 1.5 * one.verify[0]
    assert one.draft > 1.5 * other.draft


def test_little_time_measures_the_ends_and_interpolates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "TARGET_SECONDS", 0.0)
    with torch.inference_mode():
        target = tiny("llama")
        verify = costs._time_target(costs.Rounds(target, Drafter(target), DraftProbability(), 10))
    slopes = [b - a for a, b in zip(verify, verify[1:], strict=False)]
    assert slopes == pytest.approx([slopes[0]] * 10)


def test_they_are_measured_once(count: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    drafter = Drafter(partly_agreeing(target))

    def ask(estimator: Any = None, max_tokens: int = 20) -> Costs:
        return costs.costs_of(costs.Rounds(target, drafter, estimator or DraftProbability(), max_tokens)).measured

    first = ask()
    assert ask() == first
    monkeypatch.setattr(costs, "_known", {})  # another process
    assert ask() == first
    assert len(count) == 1
    (path,) = cache.iterdir()
    stored = json.loads(path.read_text())
    assert stored["costs"] == {"measured": first.to_dict(), "by_length": {}}
    assert stored["of"]["target"]["layers"] == 3

    ask(max_tokens=5)
    ask(AcceptanceHead(32))
    assert len(count) == 3, "other settings are other costs"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    ask()
    assert len(count) == 4


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"costs": null}',
        '{"costs": {"draft": 1, "verify": [1]}}',
        '{"costs": {"measured": {"draft": -1, "verify": [1]}, "by_length": {}}}',
        '{"costs": {"measured": {"draft": 1, "verify": [1]}, "by_length": {"x": {"draft": 1, "verify": [1]}}}}',
    ],
)
def test_a_damaged_file_is_measured_again(
    text: str, count: list[int], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny("llama")
    drafter = Drafter(partly_agreeing(target))
    first = costs.costs_of(costs.Rounds(target, drafter, DraftProbability(), 20)).measured
    (path,) = cache.iterdir()
    path.write_text(text)
    monkeypatch.setattr(costs, "_known", {})
    assert costs.costs_of(costs.Rounds(target, drafter, DraftProbability(), 20)).measured == first
    assert len(count) == 2
    assert json.loads(path.read_text())["costs"]["measured"] == first.to_dict()


@pytest.mark.parametrize("error", [OSError("read-only"), ValueError("Corrupted assets folder")])
def test_a_cache_that_cannot_be_made_is_no_error(
    error: Exception, count: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> Path:
        raise error

    monkeypatch.setattr(files, "cached_assets_path", fail)
    target = tiny("llama")
    costs.costs_of(costs.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 20))
    costs.forget_costs()
    assert count == [20]


@pytest.mark.parametrize("positions", [24, 64])
def test_as_many_candidates_as_there_are_positions(positions: int) -> None:
    target = tiny("gpt2", n_positions=positions)
    measured: Any = costs.measure(
        costs.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), positions, trees=True)
    )
    assert 1 < len(measured.verify) < positions
    assert len(measured.verify_seconds(positions)) == positions + 1


def test_an_unwritable_cache_is_no_error(count: list[int], monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setattr(files, "cached_assets_path", lambda *names: cache / "missing")
    target = tiny("llama")
    costs.costs_of(costs.Rounds(target, Drafter(partly_agreeing(target)), DraftProbability(), 20))
    assert count == [20]


@pytest.mark.parametrize("track_costs", [True, False])
@pytest.mark.parametrize("kind", ["independent", "early exit"])
def test_a_generation_measures_costs_that_are_not_to_follow_its_rounds(
    kind: str, track_costs: bool, count: list[int]
) -> None:
    target = tiny("llama")
    speculation = SpeculationConfig("throughput", max_tokens=6, track_costs=track_costs)
    if kind == "independent":
        assistant = assistant_for(target, rule="throughput", max_tokens=6, track_costs=track_costs)
    else:
        assistant = SpecDecPPAssistant.from_early_exit(target, 2, speculation=speculation)
    plain = target.generate(prompt(), max_new_tokens=40, do_sample=False)
    for _ in range(2):
        text = target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=False)
        assert torch.equal(text, plain)
    assert count == ([] if track_costs else [6])


def test_what_is_assumed_holds_for_one_text(cache: Path) -> None:
    """In passes of the target; then in seconds, and for later processes."""
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", max_tokens=6)
    rounds = costs.Rounds(target, assistant.setup().drafter, DraftProbability(), 6, products="auto")
    known = costs.costs_of(rounds, assume=True)
    assert known.is_assumed
    assert known.first == costs.assumed(rounds)
    assert known.first.verify[0] == 1.0
    assert 0.0 < known.first.read < known.first.draft
    assert not list(cache.iterdir())
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=False)
    assert costs.costs_of(rounds) is known
    assert not known.is_assumed
    (learned,) = assistant.memory.learned[target].values()
    assert isinstance(learned.plan, ThroughputState)
    spent = assistant.stats.target_seconds / assistant.stats.rounds
    assert 0.3 * spent < learned.plan.costs.verify[0] < 3.0 * spent, "of one pass, and of some verification"
    assert learned.plan.plan.plain_rate == pytest.approx(1.0 / learned.plan.costs.pass_seconds)
    assert list(cache.iterdir())


def test_a_draft_without_layers_costs_nothing() -> None:
    target = tiny("llama")
    drafter = SpecDecPPAssistant.from_lookup(target).ready_drafter()
    assert costs.assumed(costs.Rounds(target, drafter, DraftProbability(), 2)) == Costs(0.0, (1.0, 1.03, 1.06))


def test_few_ways_of_sampling_are_remembered() -> None:
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", costs={"draft": 0.1, "verify": [1.0]})
    for temperature in range(1, 25):
        target.generate(
            prompt(), assistant_model=assistant, max_new_tokens=2, do_sample=True, temperature=float(temperature)
        )
    learned = assistant.memory.learned[target]
    assert [key[2] for key in learned] == [float(temperature) for temperature in range(9, 25)]


def test_what_rounds_teach_is_of_one_way_to_draw_candidates() -> None:
    """Another temperature of the draft, or the target's successors, and its estimates come true another time; greedy
    texts do not know that temperature."""
    target = tiny("llama")
    assistant = assistant_for(target, rule="throughput", costs={"draft": 0.1, "verify": [1.0]})
    config = assistant.speculation
    for do_sample, ways in ((True, 4), (False, 2)):
        for _ in range(2):
            for config.draft_successors, config.draft_temperature in product((False, True), (0.8, 1.0)):
                target.generate(prompt(), assistant_model=assistant, max_new_tokens=8, do_sample=do_sample)
        learned = assistant.memory.learned[target].values()
        assert sum(each.greedy is not do_sample for each in learned) == ways
