"""Clocks that stand, are coarse, or are set back: texts are right, and what clocks cannot tell is not believed."""

import math
import random
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from support.devices.products import use_copies
from support.targets.models import assistant_of, prompt, tiny

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.clocks import typical
from hf_specdecpp.config.costs import Costs, DraftWork
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu import products
from hf_specdecpp.models.cpu.weight_copies import background
from hf_specdecpp.throughput import known_costs
from hf_specdecpp.throughput.known_costs import KnownCosts, corrected, relative_times

pytestmark = pytest.mark.usefixtures("cache")

real, random_numbers = time.perf_counter, random.Random(0)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}


def backwards() -> Callable[[], float]:
    ticks = count()
    return lambda: 1e9 - 0.001 * next(ticks)


# What a clock says that is called again and again.
CLOCKS: dict[str, Callable[[], Callable[[], float]]] = {
    "stands": lambda: lambda: 5.0, "10 ms": lambda: lambda: math.floor(real() / 0.01) * 0.01, "backwards": backwards,
    "jumps": lambda: lambda: random_numbers.uniform(-1.0, 1.0),
}  # fmt: skip


@pytest.fixture
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    now = CLOCKS[request.param]()
    monkeypatch.setattr(time, "perf_counter", now)
    monkeypatch.setattr(time, "thread_time", now)
    return str(request.param)


DRAFTS: dict[str, Callable[[CausalLM], SpecDecPPAssistant]] = {
    "lookup": lambda target: assist(target, "lookup", default=False),
    "eagle3": lambda target: assistant_of("eagle3", target, rule="throughput", lookup=True),
    "trees": lambda target: assistant_of("early_exit", target, rule="throughput", tree="dyspec", tree_budget=6),
    "batch": lambda target: assistant_of("early_exit", target, rule="throughput"),
}


@pytest.mark.daily("stands-lookup", "stands-batch", "10 ms-lookup")
@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize(
    ("clock", "draft"),
    [*(("stands", draft) for draft in DRAFTS), ("backwards", "eagle3"), ("jumps", "trees"), ("10 ms", "lookup")],
    indirect=["clock"],
)
def test_texts_and_statistics(draft: str, clock: str) -> None:
    target = tiny("llama", num_hidden_layers=2)
    ids = torch.cat((prompt(12), prompt(12, seed=5))) if draft == "batch" else prompt(12)
    plain, assistant = target.generate(ids, **GREEDY), DRAFTS[draft](target)
    for _ in range(2):
        assert torch.equal(target.generate(ids, **GREEDY, assistant_model=assistant), plain)
        assert "nan" not in str(assistant.stats).lower()
    for known in known_costs._known.values():
        assert all(0.0 < seconds < math.inf for seconds in known.at(16).verify)
        assert known.is_assumed or clock not in ("stands", "backwards"), "what was assumed is not kept"


def test_what_fails_after_a_text_does_not_take_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    plain, assistant = target.generate(prompt(12), **GREEDY), DRAFTS["lookup"](target)
    said: list[str] = []

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("of no importance")

    monkeypatch.setattr(KnownCosts, "update", fails)
    monkeypatch.setattr("hf_specdecpp.generation.candidate_generator.logger.warning", said.append)
    assert torch.equal(target.generate(prompt(12), **GREEDY, assistant_model=assistant), plain)
    assert "ZeroDivisionError('of no importance')" in said[0]


@pytest.mark.daily("backwards")
@pytest.mark.parametrize("clock", ["stands", "backwards"], indirect=True)
@pytest.mark.usefixtures("clock")
def test_products_stay_pytorch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing says that another product is faster."""
    measure = products._measure
    use_copies(monkeypatch)
    monkeypatch.setattr(products, "_measure", measure)
    monkeypatch.setattr(products, "SAMPLE", 2048)
    target = tiny("llama").float()
    assistant = assistant_of("early_exit", target, rule="fixed")
    background.wait()
    assert torch.equal(
        target.generate(prompt(12), **GREEDY, assistant_model=assistant), target.generate(prompt(12), **GREEDY)
    )
    assert (assistant.stats.decided["products"], assistant.copies.bytes) == ("own", 0)


def test_a_coarse_clock_tells_by_the_mean() -> None:
    assert typical([0.0] * 22 + [0.01] * 3) == pytest.approx(0.0012)
    assert typical([0.0, 0.0]) is typical([-1.0]) is typical([math.nan]) is typical([math.inf]) is None


MEASURED = Costs(0.002, (0.010, 0.030))


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, -math.inf, math.nan])
def test_rounds_of_no_sensible_time_change_nothing(seconds: float) -> None:
    passes, drafts = {1: [seconds] * 9, 4: [seconds] * 9}, [(DraftWork(steps), seconds) for steps in (1, 2, 2)]
    assert relative_times(MEASURED, passes) == {}
    assert corrected(MEASURED, passes, drafts) == replace(MEASURED, verify=tuple(MEASURED.verify_seconds(3)))
