"""Generations whose costs follow their rounds: between texts, in every kind of decoding, and never the text itself."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, prompt, tiny
from torch import Tensor

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import known_costs
from hf_specdecpp.throughput.plan import Plan

WRONG = Costs(5.0, (100.0, 100.1, 100.2))  # seconds, that is
ROWS = torch.cat([prompt(12, seed) for seed in range(4)])

KINDS: dict[str, tuple[dict[str, Any], Tensor, dict[str, Any]]] = {
    "chains": ({}, prompt(), {}),
    "trees": ({"tree": "dyspec", "tree_budget": 8}, prompt(), {}),
    "batch": ({}, ROWS, {"attention_mask": torch.ones_like(ROWS)}),
    "static": ({}, prompt(), {"cache_implementation": "static"}),
}


@pytest.fixture(autouse=True)
def wrong(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An earlier process has kept costs that are wrong by far."""
    recall, kept = known_costs.recall, {"first": WRONG.to_dict(), "by_length": {}}
    monkeypatch.setattr(known_costs, "recall", lambda kind, of: recall(kind, of) or kept)
    monkeypatch.setattr(known_costs, "_known", {})


def plan_of(assistant: SpecDecPPAssistant, target: CausalLM) -> Plan:
    (learned,) = assistant.memory.learned[target].values()
    assert learned.plan is not None
    return learned.plan


@pytest.mark.every(3)
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


def test_given_costs_never_change() -> None:
    target, given = tiny("llama"), {"draft": 0.05, "verify": [1.0, 1.1, 1.2]}
    assistant = assistant_for(target, rule="throughput", max_tokens=4, costs=given)
    for _ in range(2):
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=False)
    assert plan_of(assistant, target).costs == Costs.from_dict(given)
