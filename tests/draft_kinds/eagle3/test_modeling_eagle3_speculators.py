"""EAGLE-3 drafts that the `speculators` package writes, beside its own forward pass (`make test-formats`)."""

import importlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from support.files.checkpoints import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP
from support.files.eagle3_files import DRAFT_VOCAB, VOCAB
from support.targets.models import prompt, tiny
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.training.distillation.unrolling import unrolled

pytestmark = pytest.mark.takes(60)

STEPS, TEXT = 3, prompt(12)
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


IDS = [2, 1, 3]  # of layers, as the package counts them; not in order: it is kept
SIZES = {
    "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": 1,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
}  # fmt: skip


def package(module: str = "models.eagle3") -> Any:
    """A module of it. Skips where it is not installed, and fails where it is and cannot be imported."""
    if find_spec("speculators") is None:
        pytest.skip("speculators is not installed: make test-formats")
    return importlib.import_module(f"speculators.{module}")


def config_of(layer: Mapping[str, Any], **settings: Any) -> Any:
    """The config of a tiny draft.

    `layer`: what differs from `SIZES`, by transformers' names. `settings`: those of `FLAGS` that are set, and other
    fields of the config."""
    sizes = {**SIZES, **layer}
    inner = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    inner._attn_implementation = "sdpa"  # eager computes the softmax in float32, and flex attention is compiled
    fields = {"draft_vocab_size": DRAFT_VOCAB, "eagle_aux_hidden_state_layer_ids": IDS, **settings}
    return package().Eagle3SpeculatorConfig(transformer_layer_config=inner, **fields)


@torch.no_grad()
def random_draft(config: Any, seed: int = 0) -> Any:
    """A draft of the package in float64 with random weights and a random vocabulary; `save_pretrained` writes it."""
    draft, generator = package().Eagle3DraftModel(config).double().eval(), torch.Generator().manual_seed(seed)
    for name, weight in draft.named_parameters():  # embeddings and LM head are NaN before
        weight.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    if draft.use_draft_vocab:
        ids = torch.randperm(VOCAB, generator=generator)[: config.draft_vocab_size].sort().values
        draft.load_vocab_mappings(torch.isin(torch.arange(VOCAB), ids), ids - torch.arange(len(ids)))
    return draft


@torch.no_grad()
def their_logits(draft: Any, text: Tensor, states: Tensor, steps: int) -> list[Tensor]:
    """For each step s = 1, 2, ... the logits `[n - s, VOCAB]` at the tokens s to n - 1 of a text; -inf where none are.

    Example: the text is a b c d. The package is given b c d beside the states at a b c. Its row 0 reads b in the first
    step, and in the second one c, with its own state at b. Its last row has no token in the second step.

    `text`: `[1, n]`. `states`: `[1, n, width]`, the target's at each token."""
    caught: list[Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda _module, _inputs, logits: caught.append(logits[0]))
    ids, count = text[:, 1:], text.shape[1] - 1
    places = torch.arange(count)[None]  # as ours; by default the package counts them from 1
    with hook, torch.compiler.set_stance("force_eager"):  # with a GPU at hand its forward pass is compiled
        draft(states[:, :-1], ids, torch.zeros_like(ids), position_ids=places, ttt_steps=steps)
    kept, found = (slice(None) if draft.t2d is None else draft.t2d), []
    for step, logits in enumerate(caught):
        found.append(logits.new_full((count - step, VOCAB), float("-inf")))
        found[-1][:, kept] = logits[: count - step]
    return found


def saved(folder: Path, layer: dict[str, Any], settings: dict[str, Any]) -> Any:
    """A random draft of the package, which has written it to a folder."""
    draft = random_draft(config_of(layer, **settings))
    draft.save_pretrained(folder)
    return draft


def loaded(folder: Path, **options: Any) -> Any:
    return SpecDecPPAssistant.from_pretrained(folder, target=tiny("llama", head_dim=8), **options).ready_drafter()


@torch.no_grad()
def difference(drafter: Any, draft: Any, steps: int = STEPS) -> float:
    """The largest one of any logit, in the steps along a text; infinite where only one of them has a token."""
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(*TEXT.shape, 3 * HIDDEN, generator=generator, dtype=torch.float64)
    hidden = enumerate(unrolled(drafter, TEXT, states, steps), start=1)
    ours = [drafter.logits(each[0, step:], VOCAB).double() for step, each in hidden]
    both = zip(ours, their_logits(draft, TEXT, states, steps), strict=True)
    return float(torch.stack([(one - other).abs()[one != other].max() for one, other in both]).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_three_steps(variant: str, tmp_path: Path) -> None:
    draft = saved(tmp_path, *VARIANTS[variant])
    assert difference(loaded(tmp_path), draft) < CLOSE


def test_a_window(tmp_path: Path) -> None:
    """In further steps the package lets its window end where the round begins, and not at the token that is read."""
    draft = saved(tmp_path, WINDOW, {})
    assert difference(loaded(tmp_path), draft, steps=1) < CLOSE
    draft.sliding_window = len(TEXT[0])
    assert difference(loaded(tmp_path), draft, steps=1) > FAR


@pytest.mark.parametrize(("variant", "wrong"), [
    ("plain", {"norm_before_residual": True}),
    ("norm_before_residual", {"norm_before_residual": False}),
    ("plain", {"norm_output": True}),
    ("norm_output", {"norm_output": False}),
    *(("eagle-3.1", {flag: False}) for flag in ("norm_before_residual", "norm_output")),
    ("theta", {"rope_theta": 10000.0}),
])  # fmt: skip
def test_a_flag_matters(variant: str, wrong: dict[str, Any], tmp_path: Path) -> None:
    draft = saved(tmp_path, *VARIANTS[variant])
    assert difference(loaded(tmp_path, eagle3=wrong), draft) > FAR


@pytest.mark.parametrize(("flag", "part"), NORMS_OF_STATES)
def test_a_norm_of_states_matters(flag: str, part: str, tmp_path: Path) -> None:
    draft, drafter = saved(tmp_path, *VARIANTS[flag]), loaded(tmp_path)
    setattr(drafter.fusion, part, None)
    assert difference(drafter, draft) > FAR
    plain, drafter = saved(tmp_path, *VARIANTS["plain"]), loaded(tmp_path)
    setattr(drafter.fusion, part, UNIT_NORMS[part])
    assert difference(drafter, plain) > FAR
