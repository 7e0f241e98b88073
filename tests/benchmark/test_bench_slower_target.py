"""The slowed-down target says what the original says, whatever the family, and costs more."""

from __future__ import annotations

import pytest
import torch
from support.models import FAMILIES, assistant_for, prompt, quiet_later_layers, tiny

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.benchmark.live import slower_target as module
from hf_specdecpp.benchmark.live.slower_target import layers_for_ratio, slower_target

EXTRA = 5  # more than the original's three: its layers serve more than once


@pytest.mark.parametrize("family", FAMILIES)
def test_same_logits_and_a_longer_cache(family: str) -> None:
    target = tiny(family)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    slower = slower_target(target, EXTRA)
    output = slower(prompt(20), use_cache=True)
    assert torch.equal(output.logits, target(prompt(20)).logits)
    assert len(output.past_key_values.layers) == 3 + EXTRA
    assert all(layer.get_seq_length() == 20 for layer in output.past_key_values.layers)
    assert slower.config.get_text_config().num_hidden_layers == 3 + EXTRA
    assert target.config.get_text_config().num_hidden_layers == 3
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())
    greedy = {"max_new_tokens": 16, "do_sample": False}
    assert torch.equal(slower.generate(prompt(), **greedy), target.generate(prompt(), **greedy))


def test_further_layers_share_their_tensors() -> None:
    target = tiny("llama")
    slower = slower_target(target, 50)
    own = {tensor.data_ptr() for tensor in target.parameters()}
    further = {p.data_ptr(): p.numel() for p in slower.parameters() if p.data_ptr() not in own}
    layer = target.model.layers[0]
    assert sum(further.values()) == layer.self_attn.o_proj.weight.numel() + layer.mlp.down_proj.weight.numel()


def test_early_exit_assistants_fit_both() -> None:
    target = quiet_later_layers(tiny("llama"))
    knobs = SpeculationConfig(rule="fixed", num_tokens=3)
    outcomes = []
    for model in (target, slower_target(target, EXTRA)):
        assistant = SpecDecPPAssistant.from_early_exit(model, 1, speculation=knobs)
        text = model.generate(prompt(), max_new_tokens=30, do_sample=False, assistant_model=assistant)
        outcomes.append((text.tolist(), assistant.stats.drafted, assistant.stats.accepted))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][2] > 0


def test_unknown_output_projections_are_refused() -> None:
    # Normalises after the residual: a layer that adds nothing still changes what passes through it.
    with pytest.raises(ValueError, match="further layers change what"):
        slower_target(tiny("opt", do_layer_norm_before=False), 2)


def test_number_of_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    assistant = assistant_for(target)
    # A draft step costs 2, a layer 1, the rest of a pass 1: the target's three layers make 4.
    monkeypatch.setattr(
        module, "step_seconds",
        lambda models: [2.0, *(1.0 + model.text_config.num_hidden_layers for model in models[1:])],
    )  # fmt: skip
    assert layers_for_ratio(target, assistant.drafter, 0.5) == 0
    assert layers_for_ratio(target, assistant.drafter, 0.2) == 6
    assert layers_for_ratio(target, assistant.drafter, 0.1) == 16
    with pytest.raises(ValueError, match="less than the wanted 0.9"):
        layers_for_ratio(target, assistant.drafter, 0.9)
    monkeypatch.setattr(module, "step_seconds", lambda models: [1.0, 4.0, 3.9])
    with pytest.raises(ValueError, match="other load is too high"):
        layers_for_ratio(target, assistant.drafter, 0.1)
