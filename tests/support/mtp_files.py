"""Small random targets with multi-token layers in their own checkpoint, as published ones have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hf_specdecpp.models.causal_lm import CausalLM

HIDDEN, VOCAB, DEPTH = 32, 12, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": DEPTH,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ROUTED = {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
LATENT = {
    **ROUTED, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_key_value_heads": 4,
}  # fmt: skip
LINEAR = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "qwen3_next": {**EXPERTS, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "mellum": {**EXPERTS, "num_experts": 4, "head_dim": 8, "layer_types": ["full_attention", "sliding_attention"] * 1
               + ["full_attention"], "sliding_window": 6},
}  # fmt: skip
NESTED = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "mellum")  # `mtp.*` in the checkpoint
ANNOUNCED = {**dict.fromkeys(FAMILIES, "num_nextn_predict_layers"), "qwen3_5_text": "mtp_num_hidden_layers"}


def config_of(family: str, num_layers: int = 1, **overrides: Any) -> Any:
    """The config of a target that announces so many multi-token layers."""
    values = {**SHAPE, **FAMILIES[family], ANNOUNCED[family]: num_layers, **overrides}
    return AutoConfig.for_model(family, **values)


def random_model(config: Any, seed: int, dtype: torch.dtype = torch.float64) -> CausalLM:
    """A model of a config, whose embeddings say most of what it predicts: drafts of it then guess some tokens."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").to(dtype).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".layers." in name and parameter.dim() > 1:
                parameter *= 0.5
            elif parameter.dim() == 1 and "norm" in name:
                parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model


def layer_tensors(family: str, place: int, num_layers: int, seed: int, **overrides: Any) -> dict[str, Tensor]:
    """The tensors of a multi-token layer by their names in the checkpoint, float64.

    Its decoder layer is one of another model of the family, as transformers writes it.
    """
    generator = torch.Generator().manual_seed(100 * seed + place)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    like = DEPTH - 2 if "layer_types" in FAMILIES[family] and family != "mellum" else DEPTH - 1
    if family == "mellum":
        like = 1  # its multi-token layer has a window
    other = random_model(config_of(family, num_layers, **overrides), 50 + 10 * seed + place)
    names = {"embed": other.state_dict()["model.embed_tokens.weight"]}
    assert names
    tensors = as_saved(other)
    block = {
        name.split(f"layers.{like}.")[1]: each for name, each in tensors.items() if f".layers.{like}." in f".{name}"
    }
    centre = 0.0 if family.startswith("qwen") else 1.0  # Qwen's norms scale by 1 + weight
    norms = {name: centre + 0.2 * random(HIDDEN) for name in ("enorm", "hnorm", "post_norm")}
    eye = torch.eye(HIDDEN, dtype=torch.float64)
    project = torch.cat((eye, 0.3 * eye), dim=1) + 0.02 * random(HIDDEN, 2 * HIDDEN)
    if family in NESTED:
        own = {"mtp.fc": project, "mtp.pre_fc_norm_embedding": norms["enorm"], "mtp.pre_fc_norm_hidden": norms["hnorm"],
               "mtp.norm": norms["post_norm"]}  # fmt: skip
        start = "mtp.layers.0."
    else:
        start = f"model.layers.{DEPTH + place}."
        own = {f"{start}eh_proj": project, f"{start}enorm": norms["enorm"], f"{start}hnorm": norms["hnorm"],
               f"{start}shared_head.norm": norms["post_norm"], f"{start}embed_tokens": random(VOCAB, HIDDEN),
               f"{start}shared_head.head": random(VOCAB, HIDDEN)}  # fmt: skip
    return {**{f"{name}.weight": each for name, each in own.items()}, **{start + name: t for name, t in block.items()}}


def as_saved(model: CausalLM) -> dict[str, Tensor]:
    """A model's tensors by the names that transformers writes, which are those of published checkpoints."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder, "model.safetensors"))


def checkpoint(
    folder: Path, family: str, num_layers: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> CausalLM:
    """Write a target with multi-token layers into `folder`, and load it as users do."""
    write(folder, family, num_layers, seed, dtype, **overrides)
    return load(folder, dtype)


def write(
    folder: Path, family: str, num_layers: int = 1, seed: int = 0, dtype: torch.dtype = torch.float64, **overrides: Any
) -> None:
    model = random_model(config_of(family, num_layers, **overrides), seed, dtype)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for place in range(num_layers):
        tensors |= {name: t.to(dtype) for name, t in layer_tensors(family, place, num_layers, seed, **overrides).items()}
    save_file(tensors, path, {"format": "pt"})


def load(folder: Path, dtype: torch.dtype = torch.float64) -> CausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


def change_config(folder: Path, **fields: Any) -> None:
    """Fields of the folder's `config.json`; `None` drops one."""
    path = folder / "config.json"
    raw = {**json.loads(path.read_text()), **fields}
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))
