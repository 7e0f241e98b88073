"""Targets that read images or sound: texts are plain ones, side outputs too. The draft sees the prompt's text only."""

from typing import Any

import pytest
import torch
from support.families import informed_draft
from support.models import random_layer
from support.multimodal import MODELS, multimodal
from support.outputs import assert_same, assert_same_cache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 20, "do_sample": False, "repetition_penalty": 1.1, "pad_token_id": 0, "eos_token_id": None,
    "return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True,
}  # fmt: skip
FAST = ("gemma3", "llava", "qwen2 audio", "qwen2.5 vl")
CHAIN, TREE = SpeculationConfig("fixed", num_tokens=4), SpeculationConfig(tree=[2, 2, 1])


def assert_equal(target: Any, inputs: Any, assistant: SpecDecPPAssistant, plain: Any) -> None:
    ours = target.generate(**inputs, assistant_model=assistant, **OPTIONS)
    assert torch.equal(ours.sequences, plain.sequences)
    assert_same(ours.scores, plain.scores)
    assert_same(ours.hidden_states, plain.hidden_states)
    assert_same_cache(ours.past_key_values, plain.past_key_values)


def models(*left_out: str) -> list[Any]:
    names = [name for name in MODELS if name not in left_out]
    return [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in names]


@pytest.mark.every(3)
@pytest.mark.parametrize("name", models())
def test_images_and_sound(name: str) -> None:
    """With a draft of text, in chains and trees, with an early exit of the language model and with an EAGLE-3 layer."""
    target, inputs = multimodal(name)
    plain = target.generate(**inputs, **OPTIONS)
    assistant = SpecDecPPAssistant.from_draft(informed_draft(plain.sequences), target, speculation=CHAIN)
    assert_equal(target, inputs, assistant, plain)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    assistant.speculation = TREE
    assert_equal(target, inputs, assistant, plain)
    assert assistant.stats.accepted > 0
    assistant.detach()
    early = SpecDecPPAssistant.from_early_exit(target, [0, 3], speculation=CHAIN)
    assert_equal(target, inputs, early, plain)
    early.detach()
    layer = SpecDecPPAssistant.from_draft(random_layer(target), target, speculation=TREE)
    assert_equal(target, inputs, layer, plain)
    assert layer.stats.drafted > 0


@pytest.mark.every(3)
@pytest.mark.parametrize("name", models())
def test_unattached(name: str) -> None:
    """transformers' own loop reads the first candidates together with the image: none may be a placeholder."""
    target, inputs = multimodal(name)
    options = {**OPTIONS, "output_hidden_states": False}
    plain = target.generate(**inputs, **options)
    assistant = SpecDecPPAssistant.from_draft(informed_draft(plain.sequences), speculation=CHAIN)
    assert torch.equal(target.generate(**inputs, assistant_model=assistant, **options).sequences, plain.sequences)
    assert assistant.stats.accepted > 0
