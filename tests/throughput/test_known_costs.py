"""What rounds cost before any was timed, how it follows the rounds, under what it is kept, and what is remembered."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, partly_agreeing, prompt, tiny
from torch import Tensor

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant, assist, files
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import known_costs as costs
from hf_specdecpp.throughput.chains import ChainPlan
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.round_times import Drafting, RoundTimes

pytestmark = pytest.mark.usefixtures("cache")


def time_a_text(known: costs.KnownCosts, drafting: float = 1.0, passes: tuple[float, float] = (2.0, 2.0)) -> None:
    """Nine rounds without candidates and nine with one, and the seconds of drafting it and of both passes."""
    now = [0.0]
    times = RoundTimes(lambda: now[0])
    for width in (1, 2) * 9:
        times.begin()
        now[0] += drafting * (width - 1)
        times.drafted(Drafting(width - 1))
        now[0] += passes[width - 1]
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


def test_a_width_that_was_timed_in_a_better_moment_does_not_pay_by_itself() -> None:
    """Passes over two tokens seemed to take two thirds of those over one, and no candidate is ever accepted."""
    target = tiny("llama")
    known = costs.costs_of(costs.Rounds(target, Drafter(target), DraftProbability(), 4))
    time_a_text(known, 0.5, (3.0, 1.5))
    plan = ChainPlan(known, 4, lag=0)
    assert plan.costs.verify[1] == plan.costs.verify[0]
    for _ in range(24):
        plan.observe([0.5], 0, 1, 0)
        plan.follow(16)
    assert not plan.pays


def test_a_draft_without_layers_costs_nothing() -> None:
    target = tiny("llama")
    drafter = assist(target, "lookup", default=False).ready_drafter()
    assert costs.Rounds(target, drafter, DraftProbability(), 2).assumed() == Costs(0.0, (1.0, 1.1, 1.2))


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
def wrong(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier process has kept costs that are wrong by far."""
    recall, kept = costs.recall, {"first": WRONG.to_dict(), "by_length": {}}
    monkeypatch.setattr(costs, "recall", lambda kind, of: recall(kind, of) or kept)
    monkeypatch.setattr(costs, "_known", {})


def plan_of(assistant: SpecDecPPAssistant, target: CausalLM) -> Plan:
    (learned,) = assistant.memory.learned[target].values()
    assert learned.plan is not None
    return learned.plan


@pytest.mark.every(3)
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
