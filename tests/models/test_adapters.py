"""A draft with a LoRA adapter: what it says is the adapter's, and the target never notices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.files.repos import change_json, check_round_trip, estimates, files_of, greedy, logits, save_adapter
from support.runs.hub_server import HubServer
from support.targets.models import tiny
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.models.adapters import LoraLinear, add_adapter
from hf_specdecpp.models.early_exit import early_exit

FIXED = SpeculationConfig("fixed", num_tokens=4)


@pytest.mark.daily("folder")
@pytest.mark.parametrize("source", ["folder", "id", "object"])
def test_adapter(hub: HubServer, target: PreTrainedModel, draft: str, tmp_path: Path, source: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(draft)
    folder = save_adapter(base, tmp_path / "peft")
    change_json(Path(folder) / "adapter_config.json", base_model_name_or_path="org/draft")
    hub.commit("org/adapter", files_of(folder))
    hub.requests.clear()
    named, untouched = (base if source == "object" else draft), logits(base)
    assistant = SpecDecPPAssistant.from_draft(named, target, adapter="org/adapter" if source == "id" else folder)
    assert torch.equal(logits(base), untouched), "a model object is left as it is"
    assert not hasattr(base, "peft_config")
    expected = logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(draft), folder))
    assert not torch.allclose(expected, untouched)
    torch.testing.assert_close(logits(assistant.ready_drafter().model), expected, rtol=1e-6, atol=1e-6)
    assert bool(hub.requests) == (source == "id"), "PEFT itself asks the Hub for the base model"
    check_round_trip(assistant, target, tmp_path / "a")


def test_peft_model(target: PreTrainedModel, draft: str, tmp_path: Path) -> None:
    """Drafts with its adapter; saved without naming the adapter's folder it would draft without."""
    folder = save_adapter(AutoModelForCausalLM.from_pretrained(draft), tmp_path / "peft")
    wrapped = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(draft), folder)
    assistant = SpecDecPPAssistant.from_draft(wrapped, target, speculation=FIXED)
    assert torch.equal(logits(assistant.ready_drafter().model), logits(wrapped))
    assert greedy(target, assistant) == greedy(target)
    with pytest.raises(ValueError, match=r"carries a PEFT adapter in memory.*from_draft\(draft, adapter=folder\)"):
        assistant.save_pretrained(tmp_path / "a")
    with pytest.raises(ValueError, match=r"already has a PEFT adapter.*merge_and_unload"):
        SpecDecPPAssistant.from_draft(wrapped, target, adapter=folder)


@pytest.mark.daily("gemma2-False")
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_adapter_on_an_early_exit(family: str, merge: bool, tmp_path: Path) -> None:
    target = tiny(family)
    modules = ["c_attn"] if family == "gpt2" else ["q_proj", "up_proj"]
    folder = save_adapter(early_exit(target, 2), tmp_path / "peft", targets=modules)
    before, weights = logits(target), {n: t.clone() for n, t in target.state_dict().items()}
    bare = estimates(SpecDecPPAssistant.from_early_exit(target, 2))
    assistant = SpecDecPPAssistant.from_early_exit(target, 2, adapter=folder, merge=merge, speculation=FIXED)
    assert greedy(target, assistant) == greedy(target)
    assert torch.equal(logits(target), before)
    assert {n: t.tolist() for n, t in target.state_dict().items()} == {n: t.tolist() for n, t in weights.items()}
    assert not torch.allclose(estimates(assistant), bare), "the adapter changes the draft"
    check_round_trip(assistant, target, tmp_path / "a")
    assert torch.equal(logits(target), before)


def test_adapter_that_does_not_fit(target: PreTrainedModel, draft: str, tmp_path: Path) -> None:
    deep, shallow = (save_adapter(model, tmp_path / name) for name, model in (
        ("deep", tiny("llama")), ("shallow", early_exit(tiny("llama"), 1))
    ))  # fmt: skip
    wide = save_adapter(early_exit(tiny("llama", intermediate_size=64), 2), tmp_path / "wide")
    foreign, before = save_adapter(tiny("gpt2"), tmp_path / "foreign", targets=["c_attn"]), logits(target)
    for merge in (True, False):
        with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: \d+ modules or .*layers\.2"):
            SpecDecPPAssistant.from_early_exit(target, 2, adapter=deep, merge=merge)
        with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM: 2 modules or .*layers\.1"):
            SpecDecPPAssistant.from_early_exit(target, 2, adapter=shallow, merge=merge)
        with pytest.raises(ValueError, match=r"does not fit LlamaForCausalLM; .*up_proj has \[32, 48\].*\[32, 64\]"):
            SpecDecPPAssistant.from_early_exit(target, 2, adapter=wide, merge=merge)
        with pytest.raises(ValueError, match=r"no counterpart, for example transformer\.h\.0\.attn\.c_attn"):
            SpecDecPPAssistant.from_early_exit(target, 2, adapter=foreign, merge=merge)
    with pytest.raises(ValueError, match="does not fit LlamaForCausalLM"):
        SpecDecPPAssistant.from_draft(draft, target, adapter=wide)
    assert torch.equal(logits(target), before)


@pytest.mark.daily(
    "use_rslora-True", "target_modules0-False", "target_modules2-True", "rank_pattern-False", "exclude_modules-True",
)  # fmt: skip
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("lora", [
    {"use_rslora": True, "lora_alpha": 12},
    {"target_modules": "all-linear"},
    {"target_modules": r".*layers\.1\..*proj"},
    {"target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    {"rank_pattern": {"layers.0.self_attn.q_proj": 2}, "alpha_pattern": {"1.self_attn.q_proj": 9, "q_proj": 3}},
    {"layers_to_transform": [1], "layers_pattern": "layers"},
    {"exclude_modules": ["layers.0.self_attn.q_proj"]},
], ids=lambda lora: next(iter(lora)))  # fmt: skip
def test_ordinary_lora_is_what_peft_makes_of_it(tmp_path: Path, lora: dict[str, Any], merge: bool) -> None:
    folder = str(tmp_path)
    trained = get_peft_model(tiny("llama"), LoraConfig(**{"target_modules": ["q_proj"], **lora}))
    for name, parameter in trained.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    trained.save_pretrained(folder)
    adapted = add_adapter(tiny("llama"), Path(folder), merge)
    torch.testing.assert_close(logits(adapted), logits(trained.eval()), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(logits(adapted), logits(tiny("llama")))


EARLY = {  # what peft 0.2 wrote, and peft 0.4
    "base_model_name_or_path": "org/draft", "bias": "none", "enable_lora": None, "fan_in_fan_out": False,
    "inference_mode": True, "lora_alpha": 4, "lora_dropout": 0.05, "merge_weights": False, "modules_to_save": None,
    "peft_type": "LORA", "r": 4, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM",
}  # fmt: skip
LATER = {"auto_mapping": None, "init_lora_weights": True, "layers_pattern": None, "layers_to_transform": None}


@pytest.mark.parametrize("config", [EARLY, {**EARLY, **LATER, "revision": None, "exclude_modules": None}])
def test_adapters_of_early_peft(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = Path(save_adapter(tiny("llama"), tmp_path))
    expected = logits(add_adapter(tiny("llama"), folder, merge=True))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert torch.equal(logits(add_adapter(tiny("llama"), folder, merge=True)), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapter_on_a_model_in_half_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    """Merged it is rounded once, from the file's own precision."""
    folder, model = Path(save_adapter(tiny("llama"), tmp_path)), tiny("llama").to(dtype)
    expected = logits(add_adapter(tiny("llama"), folder, merge=True))
    for merge in (True, False):
        actual = logits(add_adapter(model, folder, merge))
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=0.1, atol=0.1)


def test_quantised_layers_keep_the_adapter_beside_them(tmp_path: Path) -> None:
    """Their weights cannot be added to, so `merge` has no effect."""

    class Quantised(nn.Module):
        weight: torch.Tensor

        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.scale = float(linear.weight.detach().abs().max()) / 127
            self.register_buffer("weight", (linear.weight.detach() / self.scale).round().to(torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)

    model, folder = tiny("llama"), Path(save_adapter(tiny("llama"), tmp_path))
    for name in ("q_proj", "v_proj"):
        attention = model.model.layers[0].self_attn
        setattr(attention, name, Quantised(getattr(attention, name)))
    bare = logits(model)
    merged, beside = (add_adapter(model, folder, merge) for merge in (True, False))
    assert type(merged.model.layers[0].self_attn.q_proj) is LoraLinear
    assert type(merged.model.layers[0].mlp.up_proj) is nn.Linear
    torch.testing.assert_close(logits(merged), logits(beside))
    assert not torch.allclose(logits(merged), bare)
    assert torch.equal(logits(model), bare)
