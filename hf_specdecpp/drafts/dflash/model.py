"""The DFlash draft (arXiv 2602.06036): Qwen3 layers in which the rows of a block attend to the target's states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from hf_specdecpp.drafts.dflash.config import DFlashSettings
from hf_specdecpp.models.target_states import StateReader

# How far back a row sees (`None`: all the way), and whether it sees no later rows of its block.
View: TypeAlias = "tuple[int | None, bool]"


class Context(StateReader):
    """What the rows of a block see of a verified token: c = norm(fc(a)), a the outputs of the target's layers there.

    Args:
        settings: of the draft.
        config: of its layers.
    """

    def __init__(self, settings: DFlashSettings, config: Qwen3Config) -> None:
        super().__init__()
        self.hidden_size = self.embedding_size = config.hidden_size
        self.count, self.arguments = len(settings.reads), settings.to_config()
        self.fc = nn.Linear(self.count * config.hidden_size, config.hidden_size, bias=False)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.meet(settings.reads, None)

    def meet(self, reads: Sequence[int], normed: int | None) -> None:
        """Read the outputs of these layers of a target, that of the layer `normed` after the target's final norm.

        The final state is caught before all others. Example: `reads=[1, 5, 3]` of 6 layers are the parts final, 1, 3 of
        what is caught, put back as 1, final, 3.
        """
        self.reads_final = normed in reads
        self.reads = [read for read in reads if read != normed]
        self.place = [*reads].index(normed) if normed is not None and normed in reads else 0

    @property
    def width(self) -> int:
        return self.count * self.hidden_size

    def to_config(self) -> dict[str, Any]:
        return self.arguments

    def forward(self, states: Tensor) -> Tensor:
        """`[batch, m, hidden_size]` of `[batch, m, width]` states of the target."""
        if self.reads_final and self.place:
            final, *others = states.split(self.hidden_size, dim=-1)
            states = torch.cat((*others[: self.place], final, *others[self.place :]), dim=-1)
        normed: Tensor = self.norm(self.fc(states))
        return normed


class Rows:
    """Keys and values of the verified text, in each layer `[1, heads, n, head_dim]`; none before the first pass."""

    def __init__(self, depth: int) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * depth

    def extended(self, layer: int, keys: Tensor, values: Tensor, block: int, most: int | None) -> tuple[Tensor, Tensor]:
        """All that the block attends to: what was kept, then these. The last `block` of them are not kept.

        Args:
            most: how many rows are kept at most, where a window sees no more.
        """
        if (known := self.layers[layer]) is not None:
            keys, values = torch.cat((known[0], keys), dim=2), torch.cat((known[1], values), dim=2)
        end = keys.shape[2] - block
        begin = 0 if most is None else max(end - most, 0)
        self.layers[layer] = keys[:, :, begin:end], values[:, :, begin:end]
        return keys, values


class DFlashModel(PreTrainedModel):
    """The weights of a draft. Embeddings and LM head are the target's, unless it brings its own.

    Attributes:
        settings: of it.
        reader: makes the context of the target's states.
    """

    config_class = None
    _supports_sdpa = True

    def __init__(self, settings: DFlashSettings) -> None:
        config = settings.layer_config()
        super().__init__(config)
        self.settings, self.reader = settings, Context(settings, config)
        layers = [Qwen3DecoderLayer(config, place) for place in range(config.num_hidden_layers)]
        self.layers: Any = nn.ModuleList(layers)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        vocab_size, size = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(vocab_size, size) if settings.own_embeddings else None
        self.lm_head = nn.Linear(size, vocab_size, bias=False) if settings.own_head else None
        slides = [kind == "sliding_attention" for kind in config.layer_types or []]
        reach = None if config.sliding_window is None else config.sliding_window - (not settings.includes_window)
        causal = [is_sliding if settings.is_causal is None else settings.is_causal for is_sliding in slides]
        self.views: list[View] = [(reach if slid else None, each) for slid, each in zip(slides, causal, strict=True)]

    def to_config(self) -> dict[str, Any]:
        """The settings that make a draft of this shape."""
        return self.settings.to_config()

    def forward(self, block: Tensor, states: Tensor, first: int, rows: Rows) -> Tensor:
        """Final states `[1, b, hidden_size]` of a block; `rows` goes on by the m verified tokens.

        Example: a text has 10 tokens, of which the last is in the block, and 6 were read before. Then the states of the
        3 tokens at 6, 7 and 8 come with a block at 9, 10, ..., and `first` is 6.

        Args:
            block: `[1, b, hidden_size]`, embeddings of the last token and of mask tokens.
            states: `[1, m, width]` of the target, at the tokens before it that were not read yet.
            first: position of the first of these in the text.
        """
        context, count = self.reader(states), block.shape[1]
        positions = torch.arange(first, first + context.shape[1] + count, device=block.device)[None]
        return self.through(
            block, context, positions, lambda view, keys: _mask(*view, count, keys),
            lambda place, keys, values: rows.extended(place, keys, values, count, self.views[place][0]),
        )  # fmt: skip

    def through(
        self,
        block: Tensor,
        context: Tensor,
        positions: Tensor,
        mask: Callable[[View, Tensor], Tensor | None],
        known: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda _, keys, values: (keys, values),
    ) -> Tensor:
        """Final states `[batch, b, hidden_size]` of rows that attend to a context and to one another.

        Args:
            block: `[batch, b, hidden_size]`, what goes into the first layer.
            context: `[batch, m, hidden_size]`.
            positions: `[batch, m + b]` in the text, of the context and of the rows.
            mask: which keys the rows see in a layer with this view, bool `[..., b, keys]`; `None` for all.
            known: all keys and values of a layer, made of these.
        """
        turns = [turn[:, None] for turn in self.rotary_emb(block, positions)]
        masks: dict[Any, Tensor | None] = {}
        for place, (layer, view) in enumerate(zip(self.layers, self.views, strict=True)):
            mixed = layer.input_layernorm(block)
            queries, keys, values = _heads(layer.self_attn, mixed, torch.cat((context, mixed), dim=1), turns)
            keys, values = known(place, keys, values)
            if view not in masks:
                masks[view] = mask(view, keys)
            attended = functional.scaled_dot_product_attention(
                queries, keys, values, attn_mask=masks[view], scale=layer.self_attn.scaling, enable_gqa=True
            )
            block = block + layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
            block = block + layer.mlp(layer.post_attention_layernorm(block))
        final: Tensor = self.norm(block)
        return final


def _heads(attention: Any, block: Tensor, seen: Tensor, turns: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[batch, heads, b, head_dim]` of a block, keys and values `[batch, kv_heads, m + b, head_dim]` of all."""
    queries, keys, values = (
        project(inputs).unflatten(-1, (-1, attention.head_dim))
        for project, inputs in ((attention.q_proj, block), (attention.k_proj, seen), (attention.v_proj, seen))
    )
    last = [turn[:, :, -block.shape[1] :] for turn in turns]
    queries = _turned(attention.q_norm(queries).transpose(1, 2), *last)
    return queries, _turned(attention.k_norm(keys).transpose(1, 2), *turns), values.transpose(1, 2)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned: Tensor = heads * cos + rotate_half(heads) * sin
    return turned


def _mask(reach: int | None, is_causal: bool, count: int, keys: Tensor) -> Tensor | None:
    """Which keys each of the last `count` rows sees, bool `[count, keys]`; `None` for all."""
    if reach is None and not is_causal:
        return None
    places = torch.arange(keys.shape[2], device=keys.device)
    back = places[-count:, None] - places
    seen = back >= 0 if is_causal else torch.ones_like(back, dtype=torch.bool)
    return seen if reach is None else seen & (back.abs() <= reach)
