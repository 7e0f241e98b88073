"""Decoder layers of DFlash and DSpark drafts: those of Qwen3 (`BlockLayer`) or of Gemma 4 (`Gemma4Layer`).

Qwen3's layers compute x + f(n(x)), with f the attention or the MLP, and a norm n. Gemma 4's (DeepSpec's
Gemma4DSparkModel) also have norms after both (each norm n has weights of its own), and a factor s:

    x' = x + n(attention(n(x))),    y = s (x' + n(mlp(n(x'))))

Queries are not scaled. Values are normed by head, without weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm


class BlockLayer(Qwen3DecoderLayer):
    """The weights of a draft layer. `added` computes the layer's output from its input `block` and the result of its
    attention after `o_proj`, by adding the residual and the MLP."""

    def added(self, block: Tensor, attended: Tensor) -> Any:
        block = block + attended
        return block + self.mlp(self.post_attention_layernorm(block))


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
