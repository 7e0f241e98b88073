"""What a `generate()` does before its first round: counted in calls of our functions, which no clock disturbs."""

from typing import Any

import pytest
import torch
from support.calls import our_calls
from support.models import tiny

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.models import cpu_products

MOST_CALLS = 550  # they were 2,763 when each look at the modules called several functions for each of them
IDS = torch.arange(8)[None]


def calls_before_the_first_round(layers: int) -> int:
    """Calls of functions of the package, of the second text of an assistant."""
    target, draft = (tiny("llama", seed, num_hidden_layers=layers).float() for seed in range(2))
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig(rule="threshold"))
    # Long enough for all passes that are made beside those of rounds.
    target.generate(IDS, assistant_model=assistant, max_new_tokens=20, do_sample=False)
    with our_calls() as calls:
        target.generate(IDS, assistant_model=assistant, max_new_tokens=8, do_sample=False)
    return calls.index(AssistedDecoding.round.__code__) + 1


def test_few_calls() -> None:
    assert 100 < calls_before_the_first_round(3) < MOST_CALLS


def test_modules_cost_no_calls() -> None:
    """All modules are looked at, and nothing is called for a usual one: a layer costs its attention in the prompt's
    pass and looks at its cache."""
    few, many = (calls_before_the_first_round(layers) for layers in (2, 12))
    assert many - few <= 10 * 10


@pytest.mark.takes(2)
def test_more_calls_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where each module is asked whether it is compiled."""

    def asks_each(models: Any, seen: Any = None) -> Any:
        return (module for model in models for module in model.modules() if cpu_products._recompiles(module))

    few = calls_before_the_first_round(12)
    monkeypatch.setattr(cpu_products, "large_layers", asks_each)
    assert calls_before_the_first_round(12) > few + 200
