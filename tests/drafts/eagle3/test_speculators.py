"""EAGLE-3 drafts that the `speculators` package writes, beside its own forward pass (`make test-formats`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.eagle3_files import HIDDEN, VOCAB
from support.eagle3_files import VARIANTS as CHECKPOINTS
from support.models import prompt, tiny
from support.repos import save_model
from support.speculators_oracle import (
    config_of,
    draft_of,
    largest_difference,
    our_logits,
    package,
    random_draft,
    random_states,
    their_logits,
)
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.hub.exporting import export
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import TargetStates

pytestmark = pytest.mark.takes(60)

STEPS = 3
TEXT = prompt(12)
CLOSE, FAR = 1e-6, 0.1  # our logits are float32: up to 8 that is 2.4e-7 off; before that the two agree to 2e-15
OF_31 = {"fc_norm": True, "norm_output": True, "norm_before_residual": True}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the layer, and the draft's other settings
    "plain": ({}, {}),
    "norm_before_residual": ({}, {"norm_before_residual": True}),
    "norm_before_fc": ({}, {"norm_before_fc": True}),
    "fc_norm": ({}, {"fc_norm": True}),
    "norm_output": ({}, {"norm_output": True}),
    "eagle-3.1": ({}, OF_31),
    "qwen3": ({"model_type": "qwen3"}, {}),
    "qwen3, eagle-3.1": ({"model_type": "qwen3"}, OF_31),
    "head_dim": ({"head_dim": 16}, {}),
    "theta": ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, {}),
    "biases": ({"attention_bias": True, "mlp_bias": True}, {}),
    "two layers": ({"num_hidden_layers": 2}, {}),
    "all tokens": ({}, {"draft_vocab_size": VOCAB}),
}
WINDOW = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
NORMS_OF_STATES = [("norm_before_fc", "input_norm"), ("fc_norm", "fc_norm")]
UNIT_NORMS = {"input_norm": LlamaRMSNorm(3 * HIDDEN), "fc_norm": nn.ModuleList(LlamaRMSNorm(HIDDEN) for _ in range(3))}


def target_of(layers: int = 3) -> CausalLM:
    return tiny("llama", num_hidden_layers=layers, head_dim=8)


def saved(folder: Path, layer: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A random draft of the package, which has written it to a folder."""
    draft = random_draft(config_of(layer, **settings))
    draft.save_pretrained(folder)
    return draft


def loaded(folder: Path, target: CausalLM | None = None, **options: Any) -> Any:
    return SpecDecPPAssistant.from_pretrained(folder, target=target or target_of(), **options).ready_drafter()


def difference(drafter: Any, draft: Any, steps: int = STEPS) -> float:
    states = random_states(TEXT)
    return largest_difference(our_logits(drafter, TEXT, states, steps), their_logits(draft, TEXT, states, steps))


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps(variant: str, tmp_path: Path) -> None:
    draft = saved(tmp_path, *VARIANTS[variant])
    assert difference(loaded(tmp_path), draft) < CLOSE


@pytest.mark.parametrize("dialect", ["original", "speculators"])
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name not in ("another width", "final state")])
def test_our_own_checkpoints(name: str, dialect: str, tmp_path: Path) -> None:
    """Those of the other tests mean in the package what they mean here. It has no drafts of the two left out."""
    checkpoint, target = CHECKPOINTS[name], target_of()
    draft = draft_of(checkpoint.config(dialect), checkpoint.tensors(), target)
    assert difference(loaded(checkpoint.save(tmp_path, dialect), target), draft) < CLOSE


@pytest.mark.parametrize("name", ["plain", "eagle-3.1", "norm_before_fc", "two layers", "theta", "all tokens"])
def test_what_is_exported(name: str, tmp_path: Path) -> None:
    """The package computes from an exported folder what we compute from the repository that it was exported from."""
    checkpoint, target = CHECKPOINTS[name], target_of()
    tensors = checkpoint.tensors()
    halves = {key: each.bfloat16().double() if each.is_floating_point() else each for key, each in tensors.items()}
    folder = checkpoint.save(tmp_path / "theirs")
    save_file(halves, folder / "model.safetensors")
    export(folder, tmp_path / "out", save_model(target, tmp_path / "target"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert difference(loaded(folder, target), draft_of(config, exported, target)) < CLOSE


def test_a_window(tmp_path: Path) -> None:
    """In further steps the package lets its window end where the round begins, and not at the token that is read."""
    draft = saved(tmp_path, WINDOW, {})
    assert difference(loaded(tmp_path), draft, steps=1) < CLOSE
    draft.sliding_window = len(TEXT[0])
    assert difference(loaded(tmp_path), draft, steps=1) > FAR


@pytest.mark.parametrize(
    ("variant", "wrong"),
    [
        ("plain", {"norm_before_residual": True}),
        ("norm_before_residual", {"norm_before_residual": False}),
        ("plain", {"norm_output": True}),
        ("norm_output", {"norm_output": False}),
        *(("eagle-3.1", {flag: False}) for flag in ("norm_before_residual", "norm_output")),
        ("theta", {"rope_theta": 10000.0}),
    ],
)
def test_a_flag_matters(variant: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    draft = saved(tmp_path, *VARIANTS[variant])
    assert difference(loaded(tmp_path, eagle3=wrong), draft) > FAR


@pytest.mark.parametrize(("flag", "part"), NORMS_OF_STATES)
def test_a_norm_of_states_matters(flag: str, part: str, tmp_path: Path) -> None:
    draft = saved(tmp_path, *VARIANTS[flag])
    drafter = loaded(tmp_path)
    setattr(drafter.fusion, part, None)
    assert difference(drafter, draft) > FAR
    plain = saved(tmp_path, *VARIANTS["plain"])
    drafter = loaded(tmp_path)
    setattr(drafter.fusion, part, UNIT_NORMS[part])
    assert difference(drafter, plain) > FAR


@pytest.mark.parametrize(("flag", "part"), NORMS_OF_STATES)
def test_norms_of_states_need_their_weights(flag: str, part: str, tmp_path: Path) -> None:
    """The weights decide: a flag without them is refused, and with them it need not be set."""
    draft = saved(tmp_path, *VARIANTS[flag])
    assert difference(loaded(tmp_path, eagle3={flag: False}), draft) < CLOSE
    saved(tmp_path, *VARIANTS["plain"])
    with pytest.raises(ValueError, match=f"lacks {part}"):
        loaded(tmp_path, eagle3={flag: True})


@pytest.mark.parametrize("ids", [None, [2, 4, 5], [5, 2, 7]])
@pytest.mark.filterwarnings("ignore:.*target-layer-ids")
@torch.no_grad()
def test_ids_count_what_goes_into_a_layer(ids: list[int] | None, tmp_path: Path) -> None:
    """As transformers' `hidden_states` does. The list of the package is taken where a config has none."""
    target = target_of(8)
    target.save_pretrained(tmp_path / "target")
    listed = package("models.utils").resolve_target_layer_ids(ids, str(tmp_path / "target"))
    saved(tmp_path, {}, {"eagle_aux_hidden_state_layer_ids": ids})
    drafter = loaded(tmp_path, target)
    assert drafter.fusion.reads == [each - 1 for each in listed]
    with TargetStates(target, drafter.fusion) as caught:
        inputs = target(TEXT, output_hidden_states=True).hidden_states
        states = caught.take()
    assert states is not None
    assert torch.equal(states, torch.cat([inputs[each] for each in listed], -1))
