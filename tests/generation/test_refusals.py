"""What assisted generation cannot serve is refused with the reason, before the target does any work."""

from typing import Any

import pytest
import torch
import transformers
from support.targets.models import assistant_for, prompt, tiny
from support.targets.watchers import no_work
from transformers.cache_utils import QuantizedCache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM

PROMPT = prompt(6)


def quantized_cache() -> QuantizedCache:
    """It needs no quantization library, as it is refused before it is used."""
    cache = QuantizedCache.__new__(QuantizedCache)
    cache.layers = []
    return cache


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny("llama", num_hidden_layers=2)


def offloaded_cache(target: CausalLM) -> transformers.StaticCache:
    cache = transformers.StaticCache(config=target.config, max_cache_len=64)
    cache.offloading = True  # whose own constructor wants a GPU
    return cache


# Arguments (or how to make them from the target), and what the refusal says.
REFUSALS: dict[str, tuple[Any, str]] = {
    "beams": ({"num_beams": 2}, "num_beams=2.*one\\s+continuation"),
    "offloaded static": (
        {"cache_implementation": "offloaded_static"},
        "cache_implementation='offloaded_static' cannot be rolled back",
    ),
    "offloaded static object": (
        lambda target: {"past_key_values": offloaded_cache(target)},
        "A static cache cannot be used here: it is offloaded",
    ),
    "quantized": ({"cache_implementation": "quantized"}, "cache_implementation='quantized' cannot be"),
    "quantized object": (lambda _: {"past_key_values": quantized_cache()}, "QuantizedCache cannot be rolled back"),
    "no cache": ({"use_cache": False}, r"use_cache=False, given to generate\(\) or"),
    "ensemble": ({"assistant_ensemble_weight": 0.5}, "assistant_ensemble_weight changes the output"),
    "DoLa": ({"dola_layers": "low"}, "dola_layers='low': DoLa decodes from"),
    "embeddings": (
        {"input_ids": None, "inputs_embeds": torch.zeros(1, 6, 32, dtype=torch.float64)},
        "given as inputs_embeds",
    ),
    "ranks": ({"synced_gpus": True}, "synced_gpus=True: ranks would run different numbers"),
}


@pytest.mark.parametrize("attached", [True, False])
@pytest.mark.parametrize("name", REFUSALS)
def test_calls(name: str, attached: bool, target: CausalLM) -> None:
    arguments, message = REFUSALS[name]
    assistant = assistant_for(target, attached)
    arguments = arguments(target) if callable(arguments) else arguments
    with no_work(target), pytest.raises(ValueError, match=message):
        target.generate(**{"input_ids": PROMPT, "max_new_tokens": 5, **arguments}, assistant_model=assistant)
    assistant.detach()


def test_a_model_without_a_head(target: CausalLM) -> None:
    headless = target.get_decoder()
    with pytest.raises(ValueError, match="cannot generate.*AutoModelForCausalLM"):
        assistant_for(target, attached=False).attach(headless)


@pytest.mark.parametrize("layers", [0, 2, 7, [], [1, 0], [0, 0], [-1], [0, 2], [0, 1]], ids=str)
def test_early_exits(layers: Any, target: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"layers=.*(the target has 2 layers|keeps all 2 layers)"):
        SpecDecPPAssistant.from_early_exit(target, layers)


def test_an_early_exit_serves_its_own_target_only(target: CausalLM) -> None:
    assistant = SpecDecPPAssistant.from_early_exit(target, 1)
    with pytest.raises(ValueError, match="layers of the target that it is attached to.*detach"):
        assistant.attach(tiny("llama", num_hidden_layers=2))
    assistant.detach()
