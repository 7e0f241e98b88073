"""The DFlash draft (arXiv 2602.06036): Qwen3 layers in which the rows of a block attend to the target's states
(`DFlashModel`), that model as one generation sees it (`DFlashDraft`), and its side of a text (`BlockReading`), or of
captured rounds (`BlockSteps`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window
from hf_specdecpp.cuda_graphs.room_cache import RoomCache
from hf_specdecpp.drafting.draft import Reading, StateDraft
from hf_specdecpp.drafting.draft_model import as_wide_as
from hf_specdecpp.drafts.dflash.config_dflash import DFlashSettings
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.trees.tree import DraftTree

# How far back a row sees (`None`: all the way), and whether it sees no later rows of its block.
View: TypeAlias = "tuple[int | None, bool]"


class Context(StateReader):
    """What the rows of a block see of a verified token: c = norm(fc(a)), a the outputs of the target's layers there."""

    def __init__(self, settings: DFlashSettings, config: Qwen3Config) -> None:
        super().__init__()
        self.hidden_size = self.embedding_size = config.hidden_size
        self.reads = list(settings.reads)
        self.fc = nn.Linear(len(self.reads) * config.hidden_size, config.hidden_size, bias=False)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        """`[batch, m, hidden_size]` of `[batch, m, width]` states of the target."""
        normed: Tensor = self.norm(self.fc(states))
        return normed


class Rows:
    """Keys and values of the verified text, in each layer `[1, heads, n, head_dim]`; none before the first pass."""

    def __init__(self, depth: int) -> None:
        self.layers: list[tuple[Tensor, Tensor] | None] = [None] * depth

    def extended(self, layer: int, keys: Tensor, values: Tensor, block: int, most: int | None) -> tuple[Tensor, Tensor]:
        """All that the block attends to: of what was kept at most `most`, then these, of which `block` are not kept."""
        if (known := self.layers[layer]) is not None:
            keys, values = torch.cat((known[0], keys), dim=2), torch.cat((known[1], values), dim=2)
        end = keys.shape[2] - block
        begin = 0 if most is None else max(end - most, 0)
        self.layers[layer] = keys[:, :, begin:end], values[:, :, begin:end]
        return keys, values


class DFlashModel(PreTrainedModel):
    """The weights of a draft. Embeddings and LM head are the target's, unless it brings its own; `reader` makes the
    context of the target's states."""

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
        return asdict(self.settings)

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

        def mask(view: View, keys: Tensor) -> Tensor | None:
            if view == (None, False):
                return None
            places = torch.arange(keys.shape[2], device=keys.device)[None]
            return visible(view, places[:, -count:], places, places[:, None] >= 0)[0, 0]

        def known(place: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            return rows.extended(place, keys, values, count, self.views[place][0])

        return self.through(block, context, positions, mask, known)

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


def visible(view: View, rows: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Which keys rows see, bool `[batch, 1, b, keys]`, of those that are `seen` from everywhere, `[batch, 1 or b,
    keys]`, by the positions of the rows `[batch, b]` and of the keys `[batch, keys]`."""
    reach, is_causal = view
    back = rows[..., None] - keys[:, None]
    seen = seen & (back >= 0) if is_causal else seen.expand_as(back)
    return (seen if reach is None else seen & (back.abs() <= reach))[:, None]


class DFlashDraft(StateDraft):
    """Drafts blocks with a `DFlashModel` on the device of the target that it has met, whose embeddings and LM head it
    takes where it has none of its own."""

    model: DFlashModel

    def __init__(self, model: DFlashModel, target: CausalLM) -> None:
        super().__init__(model, model.reader, target)
        self.settings = model.settings
        self.block = self.places = model.settings.places
        own, head = model.embed_tokens, model.lm_head
        self.embeddings = target.get_input_embeddings() if own is None else own
        self.head = target.get_output_embeddings() if head is None else head

    @property
    def parts(self) -> list[nn.Module]:
        return [self.model, self.head]

    def round_steps(self, vocab_size: int) -> BlockSteps | None:
        return None if self.captured_copy is None else BlockSteps(self.captured_copy, vocab_size)

    def session(self, vocab_size: int) -> BlockReading:
        return BlockReading(self, vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """The bare embeddings `[..., hidden_size]` of token ids, on their device; unknown ids count as 0."""
        weight = self.embeddings.weight
        known = tokens.where(tokens < len(weight), 0)
        return functional.embedding(known.to(weight.device), weight).to(tokens.device)

    def block_after(self, anchor: Tensor) -> Tensor:
        """The inputs `[..., block_size, hidden_size]` of a block after the text's last token, `[..., 1]`."""
        ids = functional.pad(
            anchor.to(self.device), (0, self.settings.block_size - 1), value=self.settings.mask_token_id
        )
        embeddings = self.embed(ids)
        scale = self.settings.embedding_scale
        return embeddings if scale == 1.0 else embeddings * scale

    def blocks_after(self, input_ids: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """Final states `[batch, a, places, hidden_size]` of the block after each anchor, as in a round there.

        A block sees the text before its anchor and its own rows, and nothing of the other blocks.

        Example: anchors 3 and 5, blocks of 2 rows. Rows 0 and 1 stand at the positions 3 and 4 of the text and see the
        target's states at 0, 1 and 2; rows 2 and 3 stand at 5 and 6 and see those at 0 to 4.

        Args:
            input_ids: `[batch, n]`.
            states: `[batch, n, width]`, the target's at each token.
            anchors: `[batch, a]`, places of tokens in the text, each at least 1.
        """
        size = self.settings.block_size
        blocks = self.block_after(input_ids.gather(1, anchors)[..., None]).to(self.dtype)  # [batch, a, b, hidden_size]
        context = self.model.reader(states)
        batch, length = context.shape[:2]
        text = torch.arange(length, device=anchors.device)
        rows = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        positions = torch.cat((text.expand(batch, -1), rows), dim=1)
        own = torch.arange(rows.shape[1], device=anchors.device) // size
        is_own = own[:, None] == own
        before = text < anchors.repeat_interleave(size, dim=1)[..., None]  # [batch, a * b, n]
        seen = torch.cat((before, is_own.expand(batch, -1, -1)), dim=2)
        hidden = self.model.through(
            blocks.flatten(1, 2), context, positions, lambda view, _: visible(view, rows, positions, seen)
        )
        return hidden.unflatten(1, (-1, size))[:, :, -self.settings.places :]

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Logits `[..., vocab_size]` float32 of final states `[..., hidden_size]`; -inf for ids that there are not."""
        return as_wide_as(vocab_size, self.head_logits(hidden))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Logits float32 of the LM head's own ids."""
        logits = self.head(hidden).to(hidden.device) * self.settings.output_multiplier
        if (cap := self.settings.logit_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()


class BlockReading(Reading):
    """What was read of one text: the target's states at verified tokens. A round takes one pass, or none."""

    length = 0

    def __init__(self, draft: DFlashDraft, vocab_size: int) -> None:
        super().__init__()
        self.draft, self.vocab_size, self.embed = draft, vocab_size, draft.embed
        self.rows = Rows(len(draft.model.layers))
        self._pending: list[Tensor] = []  # states `[1, m, width]` that were not read yet
        self._found: tuple[Tensor, Tensor] | None = None

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:  # noqa: ARG002
        self.length += new_tokens.shape[1]
        self._anchor, self._found, self.passes = new_tokens[:, -1:].clone(), None, 0
        if states is not None:
            # Fewer than the tokens where a cache is carried on; the text's last token never has any.
            known = min(states.shape[1], self.length - 1)
            self._pending.append(states[:, states.shape[1] - known :])
        self.unread = max(sum(each.shape[1] for each in self._pending), 1)

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        logits, hidden = self._block()
        place = len(candidates)
        return (logits[place], hidden[place]) if place < len(logits) else None

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """By depth: all nodes of a depth have the same distribution, which is the marginal of that place.

        Example: a block of three places a, b, c. The root asks for a, each of its children for b, and nodes at depth 3
        propose nothing.
        """
        logits, hidden = self._block()
        depths = [tree.depths[node] for node in nodes]
        nothing = torch.full_like(logits[0], float("-inf"))
        rows = [logits[depth] if depth < len(logits) else nothing for depth in depths]
        return torch.stack(rows), torch.stack([hidden[min(depth, len(hidden) - 1)] for depth in depths])

    def keep(self, path: list[int]) -> None:
        """What was accepted comes with the next round, with the target's states."""

    def _block(self) -> tuple[Tensor, Tensor]:
        """Logits `[places, vocab_size]` and final states `[places, hidden_size]` of this round's block."""
        if self._found is None:
            draft = self.draft
            pieces = [each.to(draft.device, draft.dtype) for each in self._pending]
            states = torch.cat(pieces, dim=1)
            first = self.length - 1 - states.shape[1]
            hidden = draft.model(draft.block_after(self._anchor), states, first, self.rows)[0, -draft.settings.places :]
            self._found = draft.logits(hidden, self.vocab_size), hidden
            self._pending, self.unread, self.passes = [], 0, 1
        return self._found


class BlockSteps(RoundSteps):
    """As `BlockReading`: one pass over the block after the text's last token, which all levels of a round are drawn
    from. The cache holds the verified tokens; the block's rows lie behind the window's and are not kept.
    """

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__(draft, vocab_size, draft.model, draft.reads.width)
        self.draft, self.model = draft, draft.model
        self.num_layers, self.most = len(self.model.layers), draft.settings.places

    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:  # noqa: ARG002 - one for all
        draft, states = self.draft, window.states
        if states is None:
            raise ValueError("A DFlash draft reads the target's states, and none were handed over.")
        block = draft.block_after(window.tokens.gather(1, window.last[:, None])).to(self.dtype)
        count, size = states.shape[1], block.shape[1]
        places = self._places(count, size, window.last)
        rows = _Rows(cache, places, count, size)
        cache.begin_pass(count + size)
        positions = cache.length[:, None] + places
        if cache.prompt is not None:
            positions = positions + cache.prompt.offset
        hidden = self.model.through(block, self.model.reader(states), positions, rows.mask, rows.extended)
        hidden = hidden[:, -draft.settings.places :]
        logits, width = draft.logits(hidden, self.vocab_size), 1
        for place in range(hidden.shape[1]):
            own = slice(place, place + 1)
            level = yield logits[:, own].expand(-1, width, -1), hidden[:, own].expand(-1, width, -1)
            width = level.tokens.shape[1]

    def _places(self, count: int, size: int, last: Tensor) -> Tensor:
        """`[texts, count + size]`, where the rows of the window and of the block stand after the cache: the block's
        first row after `last`, whatever dummies lie between."""
        span = torch.arange(count + size, device=last.device)
        return torch.where(span < count, span, span - count + last[:, None] + 1)


class _Rows:
    """All rows of a cache in a pass over a window of `count` and a block of `size` rows, at these `places`."""

    def __init__(self, cache: RoomCache, places: Tensor, count: int, size: int) -> None:
        self.cache, self.size = cache, size
        begin = cache.length[:, None]
        rows = torch.arange(cache.room, device=places.device) - begin  # negative: what was held
        own = rows - count
        self.is_block = (own >= 0) & (own < size)
        first = places[:, count, None]  # of the block: as many tokens of the window are no dummies
        self.is_text = rows < first
        if cache.prompt is not None:
            self.is_text = self.is_text & cache.prompt.shown
        self.keys = torch.where(own >= 0, own + first, rows)
        self.queries = places[:, count:]

    def mask(self, view: tuple[int | None, bool], _keys: Tensor) -> Tensor:
        return visible(view, self.queries, self.keys, (self.is_text | self.is_block)[:, None])

    def extended(self, place: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.cache.layers[place]
        both: tuple[Tensor, Tensor] = layer.update(keys, values)
        return both
