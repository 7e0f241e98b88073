"""`rule="throughput"`: how far chains are drafted, in simulated rounds, in exact ones and in generations."""

import math
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch
from support.enumeration.exact_distribution import Replay, Tokens, exact_distribution, worst_error
from support.enumeration.plans import chain_plan, tell
from support.enumeration.toy_rounds import Models, ToyRound
from support.targets.models import assistant_for, configured, prompt, tiny

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.throughput.known_costs import KnownCosts, RoundTimes
from hf_specdecpp.throughput.plan import SECOND_CREDIT, ChainPlan, Throughput

STEPS = [1.0, 1.0, 1.0, 1.7, 1.75, 1.8, 1.85, 1.9]  # a target on a CPU


Stream = Callable[[np.random.Generator], Iterator[tuple[float, float]]]


def independent(quality: Callable[[float], float]) -> Stream:
    """Estimates from beta(0.5, 0.125), which come true with probability `quality(estimate)`."""

    def stream(rng: np.random.Generator) -> Iterator[tuple[float, float]]:
        while True:
            estimate = rng.beta(0.5, 0.125)
            yield estimate, quality(estimate)

    return stream


class Simulation:
    """Rounds of the rule itself, with made-up candidates and seconds by the cost model."""

    def __init__(self, plan: ChainPlan, stream: Stream) -> None:
        self.plan, self.stream = plan, stream
        self.rng = np.random.default_rng(0)
        self.tokens, self.seconds, self.speculated, self.unread = 0, 0.0, 0, 1

    def run(self, rounds: int) -> float:
        """Tokens a second of these rounds, which are one generation with a short prompt."""
        self.unread = 20
        rule = Throughput(DraftProbability(), self.plan)
        before = self.tokens, self.seconds
        for _ in range(rounds):
            rule.begin_round()
            drafted = self._draft(rule) if rule.should_draft(self.unread) else []
            accepted = 0
            while accepted < len(drafted) and self.rng.random() < drafted[accepted]:
                accepted += 1
            tell(rule, len(drafted), accepted)
            self.tokens += accepted + 1
            self.seconds += float(self.plan.seconds[len(drafted)])
            self.seconds += self.plan.costs.read * self.unread if drafted else 0.0
            self.unread = 1 if drafted else self.unread + 1
            self.speculated += bool(drafted)
        return (self.tokens - before[0]) / (self.seconds - before[1])

    def _draft(self, rule: Throughput) -> list[float]:
        lag, estimates, chances = self.plan.lag, [], []
        for estimate, chance in self.stream(self.rng):
            estimates.append(estimate)
            chances.append(chance)
            late = len(estimates) - 1 - lag
            if rule.stops(estimates[late] if late >= 0 else None) or len(estimates) == rule.max_tokens:
                break
        return chances


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("verify", [[1.0], STEPS], ids=["flat", "steps"])
def test_it_reaches_the_rate_that_it_promises(verify: list[float], lag: int) -> None:
    simulation = Simulation(chain_plan(Costs(0.19, tuple(verify)), 20, lag), independent(lambda e: e))
    simulation.run(300)
    rate = simulation.run(1500)
    assert rate == pytest.approx(simulation.plan.rate, rel=0.08)
    assert rate > (1.6 if len(verify) > 1 else 2.0)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("costs", [Costs(0.19, (1.0,), read=0.03), Costs(0.19, tuple(STEPS)), Costs(1.2, (1.0,))])
def test_a_useless_draft_costs_little(costs: Costs, lag: int) -> None:
    simulation = Simulation(chain_plan(costs, 20, lag), independent(lambda _: 0.02))
    assert simulation.run(1000) > 0.97
    assert simulation.run(1000) > 0.985
    assert 0 < simulation.speculated < 400
    assert not simulation.plan.pays


@pytest.mark.parametrize("of_draft", [0.1, 0.5])
@pytest.mark.parametrize("mutant", [False, True])
def test_a_first_text_tries_a_useless_draft_few_times(of_draft: float, mutant: bool) -> None:
    """While costs are assumed, rounds of which nothing stands use up the credit even if drafting seems to pay; the
    mutant charges probes alone."""
    plan = chain_plan(Costs(of_draft, (1.0, 1.1)), 20)
    simulation = Simulation(plan, independent(lambda _: 0.02))
    plan.known.is_assumed = not mutant
    simulation.run(64)
    assert (1 <= simulation.speculated <= 5) is not mutant


def test_trials_of_a_first_text_are_charged_their_true_cost_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that begins badly must not keep a cheap draft out of the next ones; an expensive one is not tried more."""
    for draft in (0.1, 3.0):
        plan = chain_plan(Costs(draft, (1.0, 1.1)), 20)
        plan.known.is_assumed = True
        Simulation(plan, independent(lambda _: 0.02)).run(64)
        assert plan.leaves_to_target(40)
        before = plan.credit
        known = plan.known

        def update(_: RoundTimes, known: KnownCosts = known) -> dict[Any, Any]:
            known.is_assumed = False
            return {}

        monkeypatch.setattr(known, "update", update)
        plan.end_text(RoundTimes(clock=float))
        assert plan.credit == (SECOND_CREDIT if draft < 1.0 else before)
        assert plan.leaves_to_target(40) == (draft > 1.0)


def test_a_draft_reads_what_takes_less_time_than_it_saves() -> None:
    """The example of `weigh_reading`: 8 s for 1000 tokens of a prompt, and 0.117 s saved per token. At first without
    what waiting has missed."""
    plan = chain_plan(Costs(0.01, (0.45,), read=0.008), 20)

    def waits(generated: int, left: float = math.inf, unread: int = 1001) -> bool:
        plan.rate, plan.num_tokens, plan._missed = 3.0, generated, 0.0
        plan.weigh_reading(unread, left)
        return plan.waits

    assert [waits(generated) for generated in (0, 68, 69)] == [True, True, False]
    assert waits(69, left=60)
    assert not waits(0, unread=900)
    plan.set_length(0)
    waits(200)
    plan.begin_text()
    assert not waits(0), "earlier answers were long"
    plan._usual_tokens, passes = 64.0, 0
    while waits(passes):
        missed, passes = plan._missed, passes + 1
        assert missed == pytest.approx(0.117 / 0.45, rel=0.01)
    plan.num_tokens, plan._missed = 0, 0.0
    plan.weigh_reading(1001, math.inf)
    while plan.waits:
        plan.num_tokens += 1
        plan.weigh_reading(1001, math.inf)
    assert (passes, plan.num_tokens) == (69, 35)
    plan.rate = 1.0 / 0.45
    plan.weigh_reading(1001, math.inf)
    assert not plan.waits, "a draft that does not pay reads for trials"


def test_waiting_ends_if_reading_is_assumed_too_expensive() -> None:
    """Answers of 40 tokens never save what the reading is assumed to take, so without it nothing would correct that."""
    plan = chain_plan(Costs(0.2, (1.0, 1.02), read=0.05), 20)
    reads = []
    for answer in range(60):
        plan.begin_text()
        plan.set_length(0)
        for _ in range(40):
            plan.rate = 2.0
            plan.weigh_reading(1001, 40)
            if not plan.waits:
                reads.append(answer)
                break
            plan.num_tokens += 1
    assert reads[:2] == [1, 5], "50 plain passes of reading; 0.5 are missed per token"
    assert len(reads) < 6, "ever more rarely"


@pytest.mark.daily(
    "throughput/draft probability-0.2-[]", "throughput/draft probability-0.9-[1, 2]",
    "throughput/after, untied-0.9-[2]",
)  # fmt: skip
@pytest.mark.parametrize("trials", [[], [2], [1, 2]], ids=str)
@pytest.mark.parametrize("draft_cost", [0.2, 0.9])
@pytest.mark.parametrize("rule", ["throughput/draft probability", "throughput/after, untied"])
def test_two_rounds_emit_p(rule: str, draft_cost: float, trials: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round decides whether and how far the second one speculates: also not at all. Rounds may also have a
    length that is tried."""
    monkeypatch.setattr("hf_specdecpp.estimation.estimators.FIRST_FITS", (1,))
    monkeypatch.setattr("hf_specdecpp.throughput.plan.MOST_CREDIT", 1.0)
    second = set()
    for seed in range(2):
        models = Models("top-k", 3, seed)
        toy = ToyRound(models, rule, (1, 2), seed)
        toy.config.costs = {"draft": draft_cost, "verify": [1.0]}

        def two_rounds(randomness: Replay, toy: ToyRound = toy) -> Tokens:
            stopping = toy.new_rule()
            assert isinstance(stopping, Throughput)
            stopping.plan.trials = list(trials)
            emitted = toy.run(randomness, stopping)
            tell(stopping, toy.drafted, toy.accepted)
            emitted = toy.run(randomness, stopping, emitted)
            second.add(toy.drafted)
            return emitted

        assert worst_error(exact_distribution(two_rounds), models.p, 3) < 1e-12
    assert len(second) > 1 or len(trials) == 2, "the outcome of the first round must matter"
    assert draft_cost < 0.5 or 0 in second or len(trials) == 2


def cheap() -> dict[str, Any]:
    return {"rule": "throughput", "tree": False, "costs": {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.5]}}


@pytest.mark.takes(2)
def test_it_remembers_between_generations_and_forgets_when_told() -> None:
    target = tiny("llama")
    assistant, lengths = assistant_for(target, **cheap()), []

    def generate(seed: int, do_sample: bool = True) -> list[int]:
        torch.manual_seed(seed)
        text = target.generate(prompt(), assistant_model=assistant, max_new_tokens=60, do_sample=do_sample)
        lengths.append(assistant.stats.drafted)
        return text[0].tolist()

    first, second = generate(0), generate(1)
    (learned,) = assistant.memory.learned[target].values()
    assert learned.rates.rounds > assistant.stats.rounds, "it knows both generations"
    assistant.memory.clear()
    assert ([generate(0), generate(1)], lengths[:2]) == ([first, second], lengths[2:])
    generate(0, do_sample=False)
    assert len(assistant.memory.learned[target]) == 2, "greedy decoding has rates of its own"

    rates = next(iter(assistant.memory.learned[target].values())).rates
    configured(assistant, **{**cheap(), "max_tokens": 3})
    generate(0)
    *_, learned = assistant.memory.learned[target].values()  # the latest
    assert learned.rates is rates
    assert isinstance(learned.plan, ChainPlan)
    assert len(learned.plan.seconds) == 4
    configured(assistant, **{**cheap(), "tree": "dyspec"})
    generate(0)
    assert len(assistant.memory.learned[target]) == 3, "trees have states of their own, too"


@pytest.mark.slow
@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("size", ["64x28", "576x8", "1536x4"])
def test_a_useless_draft_costs_next_to_nothing(size: str, copies: bool) -> None:
    """By the share of the target's own passes in a call's seconds: whatever else the machine does slows all of a call
    alike, and two calls by 20 % either way. The example compares calls, which takes an idle machine."""
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "useless_draft.py"))
    hidden, layers = map(int, size.split("x"))
    calls = [stats for *_, stats in example["answers"](hidden, layers, copies)]
    shares = [each.target_seconds / (each.call_seconds - each.prompt_seconds) for each in calls]
    assert median(shares) > 0.94
    assert sum(each.drafted for each in calls) < 0.1 * sum(each.generated for each in calls)


# Looking ahead by the prices of candidates. ---------------------------------------------------------------------------


@pytest.mark.parametrize(("costs", "message"), [
    ({"draft": 0.1}, "must look like"),
    ({"draft": 0.1, "verify": [1.0], "speed": 2}, "must look like"),
    ({"draft": -0.1, "verify": [1.0]}, "none negative"),
    ({"draft": 0.1, "verify": ["1"]}, "none negative"),
    ({"draft": 0.1, "verify": []}, "must list"),
    ({"draft": 0.1, "verify": [1.0, 0.0]}, "each positive"),
    ({"draft": 0.1, "verify": [1.0], "block": 0}, "at least 1"),
])  # fmt: skip
def test_bad_costs_are_refused(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(rule="throughput", costs=costs)
