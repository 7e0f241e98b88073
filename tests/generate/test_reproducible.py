"""`SpeculationConfig(reproducible=True)`: a seed repeats a sampled text, whatever was generated or measured before."""

from typing import Any

import pytest
import torch
from support.models import assistant_of, prompt, tiny, told
from torch import Tensor

from hf_specdecpp import assist
from hf_specdecpp.models import cpu_products
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import known_costs

WAYS: dict[str, dict[str, Any]] = {
    "chain": {"rule": "throughput"},
    "threshold": {"rule": "threshold", "threshold": 0.5},
    "corrected": {"rule": "throughput", "draft_successors": True},
    "tree": {"rule": "throughput", "tree": "dyspec", "tree_budget": 8},
    "tree of a budget": {"tree": "dyspec", "tree_budget": 8},
    "lookup": {"rule": "throughput", "lookup": True},
    "history": {"rule": "fixed", "lookup": "history"},
    "tree and history": {"rule": "throughput", "tree": "dyspec", "tree_budget": 8, "lookup": "history"},
}


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    monkeypatch.setattr(cpu_products, "LEAST_ELEMENTS", 1)  # else the tiny model's products have no choice
    return tiny("llama", initializer_range=0.05).float()


def generate(target: CausalLM, assistant: Any, ids: Tensor, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "pad_token_id": 0}
    text: Tensor = target.generate(ids, assistant_model=assistant, attention_mask=torch.ones_like(ids), **options)
    return text.tolist()


@pytest.mark.every(11)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_seed_repeats_a_text_whatever_was_before(target: CausalLM, way: str, rows: int) -> None:
    settings = WAYS[way]
    if rows > 1 and "tree" in settings:
        pytest.skip("batches draft chains")
    ids = torch.cat([prompt(12, seed) for seed in range(rows)])
    assistant = assistant_of("conditioned", target, **settings, reproducible=True)
    first, drafted = generate(target, assistant, ids, seed=1), assistant.stats.drafted
    told(assistant, **settings)
    for seed in (2, 3):
        generate(target, assistant, ids, seed)  # learns costs, estimates, successors and answers
    told(assistant, **settings, reproducible=True)
    assert (generate(target, assistant, ids, seed=1), assistant.stats.drafted) == (first, drafted)
    assert generate(target, assistant_of("conditioned", target, **settings, reproducible=True), ids, seed=1) == first


def test_a_draft_of_its_own_without_a_target(target: CausalLM) -> None:
    assistant = assistant_of("independent", target, **WAYS["threshold"], reproducible=True)
    assistant.detach()
    first = generate(target, assistant, prompt(), seed=1)
    generate(target, assistant, prompt(seed=2), seed=2)
    assert generate(target, assistant, prompt(), seed=1) == first


def test_nothing_is_kept_and_nothing_timed(target: CausalLM) -> None:
    assistant = assistant_of("independent", target, rule="throughput", lookup="history", reproducible=True)
    before = dict(known_costs._known)
    generate(target, assistant, prompt(), seed=1)
    assert assistant.stats.decided["costs"] == "assumed"
    assert (assistant.stats.decided["products"].split()[0], known_costs._known) == ("own", before)
    assert not len(assistant.memory.learned)
    assert not len(assistant.memory.answers)


def test_greedy_text_is_plain(target: CausalLM) -> None:
    assistant = assist(target, "lookup", default=False)
    assistant.speculation.reproducible = True
    plain = target.generate(prompt(), max_new_tokens=40, do_sample=False)
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, max_new_tokens=40, do_sample=False), plain)
