"""Small random targets with multi-token layers in their own checkpoint, as published ones have them."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import COMMON, ROTARY

HIDDEN, VOCAB, DEPTH = 32, 12, 3
LOUD = 3.0  # by which embeddings are larger than usual
SHAPE: dict[str, Any] = {**COMMON, **ROTARY, "vocab_size": VOCAB, "max_position_embeddings": 256}
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
KIMI = {
    "num_local_experts": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
}  # fmt: skip
SHARED = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**LATENT, "first_k_dense_replace": 1},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8},
    "glm4_moe_lite": {**LATENT, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "qwen3_next": {**LINEAR, **SHARED},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **SHARED},
    "bailing_hybrid": {**LATENT, **KIMI},
    "sarvam_moe": {**ROUTED, "first_k_dense_replace": 1, "head_dim": 8, "num_experts": 4},
    "inkling_text": {
        **ROUTED, "head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
        "sliding_window_size": 6, "d_rel": 4, "rel_extent": 16, "local_layer_ids": [1],
        "mlp_layer_types": ["dense", "dense", "sparse"], "chain_hidden_post_norm": True,
    },
    "step3p7": {
        **EXPERTS, "n_routed_experts": 4, "share_expert_dim": 16, "head_dim": 8, "sliding_window": 6,
        "num_sliding_attention_heads": 6, "pad_token_id": 0,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "mlp_layer_types": ["dense", "dense", "sparse"],
        "mtp_layer_types": ["sliding_attention"] * 3, "mtp_mlp_layer_types": ["dense"] * 3,
    },
    "mellum": {
        **EXPERTS, "num_experts": 4, "head_dim": 8, "sliding_window": 6,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}  # fmt: skip
FAMILIES = {name: values for name, values in FAMILIES.items() if name in CONFIG_MAPPING}  # of this transformers
EYE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
SEEING, QWEN = ("step3p7",), ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
HYBRID = (*QWEN, "bailing_hybrid", "inkling_text")
NESTED = (*QWEN, "mellum", "inkling_text")  # `mtp.*` in the checkpoint; others have `model.layers.N.*`
# A layer of the target of the kind of a multi-token layer.
WHERE = {**dict.fromkeys((*NESTED, "bailing_hybrid", "step3p7"), 1), "inkling_text": 0}


_made: dict[str, Any] = {}


@dataclass
class Files:
    """A target and its multi-token layers.

    `num_layers`: of these. `overrides`: of the target's config. `start_of_head`: before `.norm` in the names of their
    norms; by default as published."""

    family: str = "glm4_moe"
    num_layers: int = 1
    seed: int = 0
    dtype: torch.dtype = torch.float64
    overrides: dict[str, Any] = field(default_factory=dict)
    start_of_head: str = ""

    def config(self) -> Any:
        own = "mtp_num_hidden_layers" if self.family in QWEN else "num_nextn_predict_layers"
        own = "num_mtp_layers" if self.family == "inkling_text" else own
        values = {**SHAPE, **FAMILIES[self.family], own: self.num_layers, **self.overrides}
        if self.family in SEEING:
            return AutoConfig.for_model(self.family, text_config=values, vision_config=EYE, image_token_id=VOCAB - 1)
        return AutoConfig.for_model(self.family, **values)

    def model(self, seed: int, share: float) -> CausalLM:
        """One of these shapes, whose layers add a share of what they would: embeddings say most, so drafts agree."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = maker(self.family).from_config(self.config(), experts_implementation="eager").to(self.dtype)
            for name, parameter in model.named_parameters():
                if ".layers." in name and parameter.dim() > 1:
                    parameter.data *= share
                elif "embed" in name:
                    parameter.data *= LOUD
                elif "norm" in name:
                    parameter.data += 0.2 * torch.randn_like(parameter)
        return model.eval()

    @cached_property
    def layers(self) -> list[dict[str, Tensor]]:
        """The tensors of the layers by the names of the checkpoint."""
        return [self._layer(place) for place in range(self.num_layers)]

    def _noise(self, place: int) -> Callable[..., Tensor]:
        """What makes normal numbers of a shape, for a layer."""
        generator = torch.Generator().manual_seed(100 * self.seed + place)
        return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

    def _layer(self, place: int) -> dict[str, Tensor]:
        """The decoder layer is one of another model of the family, as transformers writes it."""
        random = self._noise(place)

        centre = 0.0 if self.family in QWEN else 1.0  # Qwen's norms scale by 1 + weight
        size = self.config().get_text_config().hidden_size
        enorm, hnorm, post_norm = (centre + 0.2 * random(size) for _ in range(3))
        eye = torch.eye(size, dtype=self.dtype)
        project = torch.cat((eye, 0.1 * eye), dim=1) + 0.02 * random(size, 2 * size)
        if self.family == "inkling_text":  # the norm after them is the one that all of them have
            start = f"mtp.layers.{place}."
            own = {
                f"{start}input_proj": project.roll(size, dims=1),  # states come first
                f"{start}embed_norm": enorm, f"{start}hidden_norm": hnorm,
                "mtp.chain_norm": 1.0 + 0.2 * self._noise(99)(size),
            }  # fmt: skip
            start += "transformer_block."
        elif self.family in NESTED:
            start, own = "mtp.layers.0.", {
                "mtp.fc": project, "mtp.pre_fc_norm_embedding": enorm, "mtp.pre_fc_norm_hidden": hnorm,
                "mtp.norm": post_norm,
            }  # fmt: skip
        else:
            start = f"model.layers.{DEPTH + place}."
            head = self.start_of_head or ("transformer.shared_head" if self.family == "step3p7" else "shared_head")
            own = {
                f"{start}eh_proj": project, f"{start}enorm": enorm, f"{start}hnorm": hnorm,
                f"{start}{head}.norm": post_norm, f"{start}embed_tokens": random(VOCAB, size),
                f"{start}{head}.{'output' if '.' in head else 'head'}": random(VOCAB, size),
            }  # fmt: skip
        other = f"model.layers.{WHERE.get(self.family, DEPTH - 1)}."
        with TemporaryDirectory() as folder:
            self.model(50 + 10 * self.seed + place, 0.3).save_pretrained(folder)
            saved = load_file(Path(folder, "model.safetensors"))
        block = {name.replace(other, start): tensor for name, tensor in saved.items() if name.startswith(other)}
        return {**{f"{name}.weight": tensor for name, tensor in own.items()}, **block}

    def save(self, folder: Path, with_layers: bool = True) -> Path:
        """Write the checkpoint, with or without its multi-token layers. It is made once for all who ask for it."""
        if (what := f"{self} {with_layers}") not in _made:
            made = TemporaryDirectory()
            self._make(Path(made.name), with_layers)
            _made[what] = made
        return Path(shutil.copytree(_made[what].name, folder, dirs_exist_ok=True))

    def _make(self, folder: Path, with_layers: bool) -> None:
        self.model(self.seed, 0.6).save_pretrained(folder)
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for layer in self.layers if with_layers else []:
            tensors |= layer
        save_file(tensors, path, {"format": "pt"})

    def load(self, folder: Path) -> CausalLM:
        """The target as users load it: transformers drops the layers."""
        return load(self.save(folder), self.dtype)


def dense(num_layers: int = 1, seed: int = 7, **more: Any) -> Files:
    """Without experts, which are slow."""
    return Files("glm4_moe", num_layers, seed, overrides={"first_k_dense_replace": DEPTH}, **more)


def maker(family: str) -> Any:
    return AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM


def load(folder: Path | str, dtype: torch.dtype = torch.float64) -> CausalLM:
    auto = maker(AutoConfig.from_pretrained(folder).model_type)
    model = auto.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()
    # transformers' classes name the layers of published models only, such as model.layers.61.
    unexpected = [rf"model\.layers\.{DEPTH + place}\." for place in range(4)]
    model._keys_to_ignore_on_load_unexpected = [*unexpected, r"^mtp\."]
    return model
