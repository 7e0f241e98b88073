"""`rule="throughput"` with costs that were measured wrongly: rounds that are timed put them right."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.enumeration.plans import chain_plan, tell
from support.targets.models import assistant_of, prompt, tiny
from support.targets.watchers import heard

from hf_specdecpp.config.costs import Costs, DraftWork
from hf_specdecpp.drafting.drafter import ModelSession
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput import plan
from hf_specdecpp.throughput.known_costs import KnownCosts, RoundTimes
from hf_specdecpp.throughput.plan import ChainPlan, Throughput

ROUNDS = 40  # of a text
MOST = 12

# Milliseconds of passes over 1, 2, ... tokens. Of a processor where four to eight cost less than two, and of another.
DIP = (58.6, 71.2, 80.1, 52.5, 50.1, 52.1, 56.0, 60.4, 63.0, 66.0, 68.0, 70.0, 72.0)
LINE = tuple(40.0 + 2.0 * n for n in range(MOST + 1))


def costs(milliseconds: tuple[float, ...], draft: float = 4.0) -> Costs:
    return Costs(draft / 1e3, tuple(each / 1e3 for each in milliseconds), start=0.001)


def disturbed(true: Costs, seed: int) -> Costs:
    """Measured while another process comes and goes: each number is up to three times too high."""
    rng = np.random.default_rng(seed)
    verify = tuple(seconds * rng.uniform(1.0, 3.0) for seconds in true.verify)
    return Costs(true.draft * rng.uniform(1.0, 3.0), verify, start=true.start)


class Machine:
    """Texts whose candidates are accepted with the probability that they are given, and rounds that take `true`."""

    def __init__(self, true: Costs, plan: ChainPlan) -> None:
        self.true, self.plan = true, plan
        self.rng, self.now = np.random.default_rng(0), 0.0

    def text(self, length: int = 16) -> float:
        """Tokens a second of a text, the tokens being those expected."""
        rule, tokens, begin = Throughput(DraftProbability(), self.plan), 0.0, self.now
        times = RoundTimes(lambda: self.now)
        self.plan.begin_text()
        verify = self.true.verify_seconds(MOST)
        for _ in range(ROUNDS):
            self.plan.set_length(length)
            times.begin_round()
            rule.begin_round()
            chances = list(self._drafted(rule)) if rule.should_draft(1) else []
            self.now += (self.true.start + self.true.draft * len(chances)) * self._noise() if chances else 0.0
            times.drafted(DraftWork(len(chances)))
            accepted = 0
            while accepted < len(chances) and self.rng.random() < chances[accepted]:
                accepted += 1
            self.now += float(verify[len(chances)]) * self._noise()
            times.end(length, len(chances) + 1)
            tell(rule, len(chances), accepted)
            tokens += 1.0 + float(np.cumprod(chances).sum())
        self.plan.end_text(times)
        return tokens / (self.now - begin)

    def _drafted(self, rule: Throughput) -> Iterator[float]:
        for _ in range(MOST):
            yield (chance := self.rng.beta(2.0, 0.8))
            if rule.stops(chance):
                break

    def _noise(self) -> float:
        return 1.0 + 0.03 * self.rng.standard_normal() + (self.rng.random() < 0.02)


def best_constant(true: Costs) -> float:
    """Tokens a second of the best fixed length."""
    accepted = 2.0 / 2.8
    tokens = np.cumsum(accepted ** np.arange(MOST + 1))
    return float((tokens / true.round_seconds(MOST))[:9].max()) / 1.02  # the noise adds 2 %


def rate_after_ten_texts(true: Costs, measured: Costs) -> float:
    """Mean over the twenty texts that follow, over the best constant length."""
    machine = Machine(true, ChainPlan(KnownCosts(measured), MOST, 0))
    for _ in range(10):
        machine.text()
    return float(np.mean([machine.text() for _ in range(20)])) / best_constant(true)


@pytest.mark.daily("dip-0", "dip-5", "line-4")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("true", [costs(DIP), costs(LINE)], ids=["dip", "line"])
def test_costs_of_a_busy_machine_are_put_right_on_an_idle_one(true: Costs, seed: int) -> None:
    assert rate_after_ten_texts(true, disturbed(true, seed)) > 0.97


@pytest.mark.daily("dip-0", "dip-5", "line-4")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("true", [costs(DIP), costs(LINE)], ids=["dip", "line"])
def test_costs_of_an_idle_machine_are_put_right_on_a_busy_one(true: Costs, seed: int) -> None:
    """Everything becomes slower, and not by the same factor."""
    rng = np.random.default_rng(seed)
    slower = rng.uniform(1.5, 3.0)
    verify = tuple(seconds * slower * rng.uniform(0.9, 1.1) for seconds in true.verify)
    assert rate_after_ten_texts(Costs(true.draft * rng.uniform(1.0, 3.0), verify, start=true.start), true) > 0.97


def test_costs_that_never_change_stay_wrong() -> None:
    """The mutant: without following the rule is far behind."""
    wrong = costs((20.0, *(3.0 * each for each in LINE[1:])))
    machine = Machine(costs(LINE), chain_plan(wrong, MOST))
    for _ in range(10):
        machine.text()
    assert np.mean([machine.text() for _ in range(10)]) / best_constant(costs(LINE)) < 0.9
    assert rate_after_ten_texts(costs(LINE), wrong) > 0.97


def test_long_texts_are_reckoned_with_what_their_passes_cost() -> None:
    """At 4,000 tokens of context passes grow steeply with their width; at 100 they are flat."""
    short, long = (costs(tuple(a + b * n for n in range(MOST + 1))) for a, b in ((40.0, 1.0), (60.0, 20.0)))
    plan = ChainPlan(KnownCosts(short), MOST, 0)
    few, many = Machine(short, plan), Machine(long, plan)
    for _ in range(10):
        few.text(100)
        many.text(4000)
    assert np.mean([few.text(100) for _ in range(30)]) / best_constant(short) > 0.97
    assert np.mean([many.text(4000) for _ in range(30)]) / best_constant(long) > 0.97


# Texts that drafting does not pay for are left to the target, and nothing is noted for the draft. ---------------------


DEAR: dict[str, Any] = {"rule": "throughput", "costs": {"draft": 2.0, "verify": [1.0]}}
OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done for a draft."""
    seen: list[str] = []
    take = TargetStates.states_of

    def taken(self: TargetStates, *args: Any) -> Any:
        if (found := take(self, *args)) is not None:
            seen.append("states")
        return found

    heard(monkeypatch, ModelSession, "read_verified", lambda *_: seen.append("read"))
    monkeypatch.setattr(TargetStates, "states_of", taken)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned"])
@pytest.mark.parametrize("tree", [None, "dyspec"])
def test_a_text_rests_until_a_probe_can_be_paid(kind: str, tree: str | None, noted: list[str]) -> None:
    target = tiny("llama")
    assistant, plain = assistant_of(kind, target, **DEAR, tree=tree), target.generate(prompt(), **OPTIONS)
    drafted, resting = [], 0
    for _ in range(14):
        noted.clear()
        assert torch.equal(target.generate(prompt(), assistant_model=assistant, **OPTIONS), plain)
        stats = assistant.stats
        drafted.append(stats.drafted)
        if not noted:
            resting += 1
            assert (stats.drafted, stats.idle_rounds, stats.rounds) == (0, 59, 59)
    assert drafted[0] > 0
    assert resting >= 9, "a probe costs two passes and more, which take four hundred rounds to save up"
    assert any(drafted[3:]), "a draft that has become good is found"


def test_a_draft_without_states_begins_in_the_middle(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    assistant, plain = assistant_of("independent", target, **DEAR), target.generate(prompt(), **OPTIONS)
    for _ in range(2):
        target.generate(prompt(), assistant_model=assistant, **OPTIONS)
    assert assistant.stats.drafted == 0
    monkeypatch.setattr(plan, "PROBE_SHARE", 0.1)
    noted.clear()
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, **OPTIONS), plain)
    assert assistant.stats.drafted > 0
    assert len(noted) < 40, "not from its beginning"
