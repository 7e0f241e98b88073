"""The DFlash draft (arXiv 2602.06036): layers in which the rows of a block attend to the target's states
(`DFlashModel`), its `Draft` (`DFlashDraft`), session (`BlockSession`) and captured rounds (`BlockSteps`).

A DSpark draft is a DFlash draft with a Markov head (`markov_head.MarkovHead`), and maybe with a confidence head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, rotate_half

from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.draft_kinds.dflash.block_layers import BlockLayer, Gemma4Layer
from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings
from hf_specdecpp.draft_kinds.dflash.markov_head import MarkovHead
from hf_specdecpp.drafting.draft import DraftingSession, StateDraft, by_id
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.trees.tree import DraftTree

# Attention of a layer: how many positions away a row sees (`None`: any number), and whether later rows are masked.
View: TypeAlias = "tuple[int | None, bool]"


class Context(StateReader):
    """Computes the context vector of a verified token: c = norm(fc(a)), with a the outputs of target layers at it."""

    def __init__(self, settings: DFlashSettings, config: Qwen3Config) -> None:
        super().__init__()
        self.hidden_size = self.embedding_size = config.hidden_size
        self.reads = list(settings.reads)
        self.fc = nn.Linear(len(self.reads) * config.hidden_size, config.hidden_size, bias=False)
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, states: Tensor) -> Tensor:
        """Return context `[batch, m, hidden_size]` for the target's states `[batch, m, width]`."""
        return self.norm(self.fc(states))


class DFlashModel(PreTrainedModel):
    """The weights of a DFlash or DSpark draft. `reader` computes the context from the target's states; `embed_tokens`
    and `lm_head` are `None` if the target's are used; `token_ids` `[draft_vocab_size]` are the target's ids of the
    draft's tokens, `None` for all. `markov_head` and `confidence_head` are `None` in a draft without them."""

    config_class = None
    _supports_sdpa = True
    token_ids: Tensor | None

    def __init__(self, settings: DFlashSettings) -> None:
        config = settings.layer_config()
        super().__init__(config)
        self.settings, self.reader = settings, Context(settings, config)
        layer_class = Gemma4Layer if settings.gemma4_layers else BlockLayer
        self.layers: Any = nn.ModuleList(layer_class(config, place) for place in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        vocab_size, size = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(vocab_size, size) if settings.own_embeddings else None
        count = settings.draft_vocab_size or vocab_size
        self.lm_head = nn.Linear(size, count, bias=False) if settings.own_head else None
        self.markov_head = MarkovHead(settings, size, vocab_size) if settings.markov_rank else None
        # A linear layer on a row's state, and maybe on the embedding of the token before, for `DFlash.head_of`.
        width = size + settings.markov_rank * settings.confidence_with_markov
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)}) if settings.confidence_head else None
        self.register_buffer("token_ids", None, persistent=False)
        slides = [kind == "sliding_attention" for kind in config.layer_types or []]
        reach = None if config.sliding_window is None else config.sliding_window - (not settings.includes_window)
        causal = [is_sliding if settings.is_causal is None else settings.is_causal for is_sliding in slides]
        self.views: list[View] = [(reach if slid else None, each) for slid, each in zip(slides, causal, strict=True)]

    def to_config(self) -> dict[str, Any]:
        return asdict(self.settings)

    def through(
        self,
        block: Tensor,
        context: Tensor,
        positions: Tensor,
        mask: Callable[[View, Tensor], Tensor | None],
        known: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]] = lambda _, keys, values: (keys, values),
    ) -> Tensor:
        """Run all layers: return final states `[batch, b, hidden_size]` of the b rows of one or several blocks, which
        attend to a context and to one another.

        Args:
            block: `[batch, b, hidden_size]`, inputs of the first layer.
            context: `[batch, m, hidden_size]`, context vectors of verified tokens.
            positions: `[batch, m + b]`, of the context and of the rows.
            mask: called once for all layers of a `View`, with this view and the keys of the first of them; returns bool
                `[..., b, keys]`, True where a row attends to a key, or `None` for everywhere.
            known: called with a layer's index and its keys and values of context and rows; returns all keys and values
                to attend to, such as these after stored ones. By default it returns its arguments."""
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
            block = layer.added(block, layer.self_attn.o_proj(attended.transpose(1, 2).flatten(2)))
        return self.norm(block)


class DSparkModel(DFlashModel):
    """A `DFlashModel` from files that call it a DSpark draft, so that it is stored and described as one."""


def _heads(attention: Any, block: Tensor, seen: Tensor, turns: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[batch, heads, b, head_dim]` of the b rows of `block`; keys, values `[batch, kv_heads, m + b, head_dim]`
    of `seen`: m context vectors, then these rows. `turns`: cos and sin at the positions of `seen`."""
    queries, keys, values = (
        project(inputs).unflatten(-1, (-1, attention.head_dim))
        for project, inputs in ((attention.q_proj, block), (attention.k_proj, seen), (attention.v_proj, seen))
    )
    last = [turn[:, :, -block.shape[1] :] for turn in turns]
    queries = _turned(attention.q_norm(queries).transpose(1, 2), *last)
    return queries, _turned(attention.k_norm(keys).transpose(1, 2), *turns), values.transpose(1, 2)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return heads * cos + rotate_half(heads) * sin


def visible(view: View, rows: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Return the attention mask of layers with this view, bool `[batch, 1, b, keys]`, given the positions `[batch, b]`
    of `rows` and `[batch, keys]` of `keys`. `seen` `[batch, 1 or b, keys]`: the mask without the view's limits."""
    reach, is_causal = view
    back = rows[..., None] - keys[:, None]
    seen = seen & (back >= 0) if is_causal else seen.expand_as(back)
    return (seen if reach is None else seen & (back.abs() <= reach))[:, None]


class BlockSession(DraftingSession):
    """Session for one sequence. A round has at most one draft pass, over the target's unread states and a block."""

    length = 0

    def __init__(self, draft: DFlashDraft, vocab_size: int) -> None:
        super().__init__()
        self.draft, self.vocab_size, self.embed, self.size = draft, vocab_size, draft.embed, draft.settings.block_size
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}  # by layer: keys and values of verified tokens
        self._pending: list[Tensor] = []  # unread states `[1, m, width]`
        self._found: tuple[Tensor, Tensor] | None = None
        self._memory: dict[int, Tensor] = {}  # `[m]`, by tree node or place in a chain: memory after it
        self._nothing = torch.zeros(draft.memory_size, dtype=draft.dtype, device=draft.device)

    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        self.length += new_tokens.shape[1]
        self._anchor, self._found, self._memory, self.passes = new_tokens[:, -1:].clone(), None, {}, 0
        if states is not None:
            # Fewer states than tokens if the call continues a cache; the last token has no state yet.
            known = min(states.shape[1], self.length - 1)
            self._pending.append(states[:, states.shape[1] - known :])
        self.unread = max(sum(each.shape[1] for each in self._pending), 1)

    def propose_next(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        logits, hidden = self._block()
        if (place := len(candidates)) >= len(logits):
            return None
        previous = (candidates[-1] if candidates else self._anchor[0, 0]).to(hidden.device)
        memory = self._memory.get(place - 1, self._nothing)
        after, state, self._memory[place] = self.draft.after(previous, logits[place], hidden[place], memory)
        return self.draft.of_target(after, self.vocab_size), state

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Nodes of equal depth share the logits of a row of the block, which `after` adjusts to the path of each node.

        Example: in a block of three candidates the root gets row 0, its children row 1, and nodes at depth 3 only -inf.
        """
        logits, hidden = self._block()
        depths = torch.tensor([tree.depths[node] for node in nodes], device=hidden.device)
        rows = depths.clamp_max(len(hidden) - 1)
        previous = torch.tensor([tree.tokens[node] for node in nodes], device=hidden.device)
        previous = previous.where(depths > 0, self._anchor[0].to(hidden.device))
        memory = torch.stack([self._memory.get(tree.parents[node], self._nothing) for node in nodes])
        after, states, memory = self.draft.after(previous, logits[rows], hidden[rows], memory)
        self._memory.update(zip(nodes, memory, strict=True))
        after = after.masked_fill((depths > rows)[:, None], float("-inf"))
        return self.draft.of_target(after, self.vocab_size), states

    def _block(self) -> tuple[Tensor, Tensor]:
        """Logits `[places, d]` of the LM head and final states `[places, hidden_size]` of the round's only block.

        Example: a sequence has 10 tokens; the last is in the block, and 6 were read in earlier rounds. The target's
        states of the 3 tokens at 6, 7 and 8 are read, and the block is at 9, 10, ..."""
        if self._found is None:
            draft = self.draft
            context = draft.model.reader(torch.cat([each.to(draft.device, draft.dtype) for each in self._pending], 1))
            last = self.length - 1
            positions = torch.arange(last - context.shape[1], last + self.size, device=context.device)[None]
            block = draft.block_after(self._anchor)
            hidden = draft.model.through(block, context, positions, self._mask, self._extended)[0, -draft.places :]
            self._found = draft.head_logits(hidden), hidden
            self._pending, self.unread, self.passes = [], 0, 1
        return self._found

    def _mask(self, view: View, keys: Tensor) -> Tensor | None:
        if view == (None, False):
            return None
        places = torch.arange(keys.shape[2], device=keys.device)[None]
        return visible(view, places[:, -self.size :], places, places[:, None] >= 0)[0, 0]

    def _extended(self, layer: int, *new: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer: the stored ones, then `new`, which are those of unread tokens and of the block.
        Stores all but the block's; in a layer with a window only the last ones, which later blocks may see."""
        known = self._rows.get(layer)
        keys, values = new if known is None else (torch.cat(each, dim=2) for each in zip(known, new, strict=True))
        end, reach = keys.shape[2] - self.size, self.draft.model.views[layer][0]
        begin = 0 if reach is None else max(end - reach, 0)
        self._rows[layer] = keys[:, :, begin:end], values[:, :, begin:end]
        return keys, values


class BlockSteps(RoundSteps):
    """`BlockSession` for captured rounds: one pass over the window and the block, which starts with the last token,
    gives the logits of all levels. The cache keeps the window's keys and values; those of the block are overwritten."""

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__(draft, vocab_size)
        self.model = draft.model
        self.num_layers, self.most = len(self.model.layers), draft.settings.places
        self.behind = draft.settings.block_size

    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        draft = self.drafter
        states: Any = window.states
        anchor = window.tokens.gather(1, window.last[:, None])
        block = draft.block_after(anchor).to(self.dtype)
        count, size = states.shape[1], block.shape[1]
        places = self._places(count, size, window.last)
        keys, seen = self._keys(cache, places[:, count, None], count, size)
        cache.begin_pass(count + size)
        positions = cache.length[:, None] + places
        if cache.prompt is not None:
            positions = positions + cache.prompt.offset
        layers: list[Any] = cache.layers
        hidden = self.model.through(
            block,
            self.model.reader(states),
            positions,
            lambda view, _: visible(view, places[:, count:], keys, seen),
            lambda place, *rows: layers[place].update(*rows),
        )[:, -draft.settings.places :]
        logits, previous = draft.head_logits(hidden), anchor
        memory = hidden.new_zeros((*previous.shape, draft.memory_size))
        for place in range(hidden.shape[1]):
            row, width = slice(place, place + 1), previous.shape[1]
            own, given = (each[:, row].expand(-1, width, -1) for each in (hidden, logits))
            given, states, memory = draft.after(previous, given, own, memory)
            level = yield draft.of_target(given, self.vocab_size), states
            previous, memory = level.tokens, level.of_parents(memory)

    def _places(self, count: int, size: int, last: Tensor) -> Tensor:
        """Positions `[texts, count + size]`, counted from the cache's length, of the window's `count` rows and the
        block's `size` rows. Example: with `last=1`, 3 rows (one is a dummy) and a block of 2: 0, 1, 2, 2, 3."""
        span = torch.arange(count + size, device=last.device)
        return torch.where(span < count, span, span - count + last[:, None] + 1)

    def _keys(self, cache: FixedCache, first: Tensor, count: int, size: int) -> tuple[Tensor, Tensor]:
        """Positions `[texts, capacity]` of all rows of the cache, counted as in `_places`, and bool `[texts, 1,
        capacity]`: whether a row is of the sequence or the block. `first` `[texts, 1]`: the block's first position."""
        rows = torch.arange(cache.capacity, device=first.device) - cache.length[:, None]  # negative: before the pass
        own = rows - count
        is_block, is_text = (own >= 0) & (own < size), rows < first
        if cache.prompt is not None:
            is_text = is_text & cache.prompt.shown
        return torch.where(own >= 0, own + first, rows), (is_text | is_block)[:, None]


class DFlashDraft(StateDraft):
    """The `Draft` of a `DFlashModel` that is bound to a target (`PublishedKind.bind`), with its own embeddings and LM
    head or the target's. `memory_size`: size m of the vector that `after` passes from candidate to candidate."""

    model: Any
    session_class, steps_class = BlockSession, BlockSteps

    def __init__(self, model: DFlashModel, target: CausalLM) -> None:
        super().__init__(model, model.reader)
        self.settings, markov = model.settings, model.markov_head
        self.memory_size = 0 if markov is None else markov.memory_size
        self.hidden_size += model.settings.markov_rank
        self.block = self.places = model.settings.places
        self.embeddings = target.get_input_embeddings() if model.embed_tokens is None else model.embed_tokens
        self.head = target.get_output_embeddings() if model.lm_head is None else model.lm_head

    @property
    def parts(self) -> list[nn.Module]:
        return [self.model, self.head]

    def embed(self, tokens: Tensor) -> Tensor:
        """Return unscaled embeddings `[..., hidden_size]` of token ids, on their device; unknown ids count as id 0."""
        weight = self.embeddings.weight
        known = tokens.where(tokens < len(weight), 0)
        return functional.embedding(known.to(weight.device), weight).to(tokens.device)

    def block_after(self, anchor: Tensor) -> Tensor:
        """Return the input embeddings `[..., block_size, hidden_size]` of a block: of the token id `anchor` `[..., 1]`,
        the last of the sequence, and of mask tokens."""
        settings = self.settings
        ids = functional.pad(anchor.to(self.device), (0, settings.block_size - 1), value=settings.mask_token_id)
        embeddings, scale = self.embed(ids), settings.embedding_scale
        return embeddings if scale == 1.0 else embeddings * scale

    def blocks_after(self, input_ids: Tensor, states: Tensor, anchors: Tensor) -> Tensor:
        """For training: return final states `[batch, a, places, hidden_size]` of a block at each of `anchors`, computed
        in one pass, as in rounds of which each begins with an anchor as the last token.

        The rows of a block attend to the tokens before its anchor and to one another, not to other blocks.

        Example: anchors 3 and 5, blocks of 2 rows. Rows 0 and 1 have the positions 3 and 4 and see the target's states
        at 0, 1 and 2; rows 2 and 3 have the positions 5 and 6 and see the states at 0 to 4.

        Args:
            input_ids: `[batch, n]`.
            states: `[batch, n, width]`, the target's at each token.
            anchors: `[batch, a]`, indices of the tokens that start a block, each at least 1."""
        size = self.settings.block_size
        blocks = self.block_after(input_ids.gather(1, anchors)[..., None]).to(self.dtype).flatten(1, 2)
        context = self.model.reader(states)
        batch, length = context.shape[:2]
        text = torch.arange(length, device=anchors.device)
        rows = (anchors[..., None] + torch.arange(size, device=anchors.device)).flatten(1)
        positions = torch.cat((text.expand(batch, -1), rows), dim=1)
        own = torch.arange(rows.shape[1], device=anchors.device) // size
        before = text < anchors.repeat_interleave(size, dim=1)[..., None]  # [batch, a * b, n]
        seen = torch.cat((before, (own[:, None] == own).expand(batch, -1, -1)), dim=2)
        hidden = self.model.through(blocks, context, positions, lambda view, _: visible(view, rows, positions, seen))
        return hidden.unflatten(1, (-1, size))[:, :, -self.settings.places :]

    def after(self, previous: Tensor, logits: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Adjust logits to the token before: return logits, hidden states (for `logits` and acceptance heads) and
        memories of candidates. A draft without a Markov head does not depend on candidates, and returns the arguments.
        With one, its bias is added to the logits, and the state of candidate k is [h_k; e; s] (`MarkovHead`):

        previous: `[...]` ids of the token before each candidate: a candidate, or the last token of the sequence.
        logits, hidden: of the candidates' rows in the block: `[..., d]` (`head_logits`) and `[..., hidden_size]`.
        memory: `[..., m]`, the memory returned for the candidate before; 0 for the first candidate."""
        if (markov := self.model.markov_head) is None:
            return logits, hidden, memory
        e = markov.embed(previous)
        bias, later = markov(e, hidden, memory)
        return logits + bias, torch.cat((hidden, e, memory), dim=-1), later

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        """Return float32 logits `[..., vocab_size]` by the target's token ids, given states that `after` returned. They
        are -inf for tokens that the draft cannot propose."""
        if (markov := self.model.markov_head) is None:
            return self.of_target(self.head_logits(hidden), vocab_size)
        rank = self.settings.markov_rank
        own, e, memory = hidden.split((self.hidden_size - rank, rank, self.memory_size), dim=-1)
        return self.of_target(self.head_logits(own) + markov(e, own, memory)[0], vocab_size)

    def of_target(self, logits: Tensor, vocab_size: int) -> Tensor:
        """Return logits `[..., vocab_size]` by the target's token ids, given `logits` `[..., d]` of the draft's."""
        return by_id(logits, vocab_size, self.model.token_ids, self.settings.layer.get("vocab_size", 0))

    def head_logits(self, hidden: Tensor) -> Tensor:
        """Return the LM head's float32 logits `[..., d]`, scaled and capped, of final states `[..., hidden_size]`."""
        logits = self.head(hidden).to(hidden.device) * self.settings.output_multiplier
        if (cap := self.settings.logit_cap) is not None:
            logits = torch.tanh(logits / cap) * cap
        return logits.float()
