"""Layers of Gemma 4 in DSpark drafts (DeepSpec's Gemma4DSparkModel): `Gemma4Layer`, and their settings (`in_gemma4`).

Qwen3's layers compute x + f(n(x)), with f the attention or the MLP, and a norm n. Gemma 4's also have norms after both
(each norm n has weights of its own), and a factor s:

    x' = x + n(attention(n(x))),    y = s (x' + n(mlp(n(x'))))

Queries are not scaled. Values are normed by head, without weights. Sizes and rotation of heads are those of Gemma 4's
layers with full attention. The logits are capped before the bias of the Markov head is added."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from hf_specdecpp.config.value_checks import FULL
from hf_specdecpp.draft_kinds.checkpoints import mapping
from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings
from hf_specdecpp.draft_kinds.dflash.modeling_dflash import BlockLayer

ROPE = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}  # transformers' defaults


def in_gemma4(block: DFlashSettings, raw: Mapping[str, Any], named: Mapping[str, Tensor]) -> DFlashSettings:
    """Return the settings `block` with Gemma 4's layers. Size and number of key heads are the global ones of the config
    `raw`, or computed from the first layer's tensors: newer configs list them by target layer (`per_layer_config`)."""
    first, layer = "layers.0.self_attn", dict(block.layer)
    size, width = (len(named.get(f"{first}.{part}.weight", ())) for part in ("k_norm", "k_proj"))
    head_dim = raw.get("global_head_dim") or size
    shared = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    layer |= {
        "head_dim": head_dim or None,
        "num_key_value_heads": shared or width // max(head_dim, 1) or None,
        "hidden_act": raw.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": {**ROPE, **mapping(mapping(raw, "rope_parameters"), FULL)},
    }
    return replace(block, layer=layer, embedding_scale=layer["hidden_size"] ** 0.5)


def with_values(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a draft's tensors, with a copy of each `k_proj` where `v_proj` is missing (for `attention_k_eq_v`)."""
    keys = {name: tensor for name, tensor in tensors.items() if name.endswith(".k_proj.weight")}
    return {**{name.replace("k_proj", "v_proj"): tensor.clone() for name, tensor in keys.items()}, **tensors}


class Values(nn.Linear):
    """The projection `v_proj`, followed by an RMS norm of each head, without weights. Shapes and bias are of `like`."""

    def __init__(self, like: nn.Linear, head_dim: int, eps: float) -> None:
        super().__init__(like.in_features, like.out_features, bias=like.bias is not None)
        self.size, self.eps = head_dim, eps

    def forward(self, input: Tensor) -> Tensor:
        heads = super().forward(input).unflatten(-1, (-1, self.size))
        return functional.rms_norm(heads.float(), (self.size,), eps=self.eps).to(heads.dtype).flatten(-2)


class Gemma4Layer(BlockLayer):
    """A `BlockLayer` with the norms of Gemma 4 and the factor s (`layer_scalar`), as in this module's equations."""

    def __init__(self, config: Qwen3Config, place: int) -> None:
        super().__init__(config, place)
        attention: Any = self.self_attn
        attention.scaling = 1.0
        attention.v_proj = Values(attention.v_proj, attention.head_dim, config.rms_norm_eps)
        self.pre_feedforward_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.register_buffer("layer_scalar", torch.ones(1))

    def added(self, block: Tensor, attended: Tensor) -> Tensor:
        block = block + self.post_attention_layernorm(attended)
        more = self.mlp(self.pre_feedforward_layernorm(block))
        return (block + self.post_feedforward_layernorm(more)) * self.layer_scalar
