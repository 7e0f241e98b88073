"""A Gemma 4 assistant as one generation sees it (`Gemma4Draft`), its side of a text (`SharedReading`), or of captured
rounds (`SharedSteps`), and what of the target's cache it attends to (`SharedRows`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import StaticCache

from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window, at_last
from hf_specdecpp.cuda_graphs.room_cache import RoomCache
from hf_specdecpp.drafting.draft import Reading, SharedText, StateDraft
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.reader import as_wide_as
from hf_specdecpp.models.target_states import FINAL, StateReader
from hf_specdecpp.trees.tree import DraftTree


@dataclass(frozen=True)
class SharedRows:
    """What the draft sees in one round: the verified text but for its last token, which the target has not read yet.

    Attributes:
        rows: by kind of layer: keys and values, `[1, kv_heads, n, head_dim]` each.
        masks: by kind of layer: bool `[1, 1, 1, n]`, or `None` where all of them are seen.
        position: `[1, 1]`, of the text's last token. All candidates of a round stand there.
    """

    rows: dict[str, tuple[Tensor, Tensor]]
    masks: dict[str, Tensor | None]
    position: Tensor


def sources(config: Any) -> dict[str, int]:
    """The target's layer whose keys and values the draft's layers of each kind read: the last that has its own.

    Example: of six layers `s s f s s f` the last two read those of others. Layer 3 is the source of kind s, 2 of f.
    """
    with_own = config.layer_types[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
    return {kind: place for place, kind in enumerate(with_own)}


def heads_of(attention: Any) -> tuple[int, int]:
    """How many heads of keys a layer attends to, and how many numbers they have."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


class Gemma4Draft(StateDraft):
    """Drafts with an assistant of transformers' class, on the device of the target that it was bound to
    (`PublishedKind.bind`).

    Its step reads a token and the state before it, which after the verified text is the target's final state, and
    further on its own. It has no keys and values: all that it sees are the target's. So are the embeddings.
    """

    shares_cache = True
    cannot = {
        "batches": "A Gemma 4 assistant reads the keys and values in the target's cache, and those of the rows of a "
        "batch lie among one another's there. Call generate() once a sequence.",
    }

    def __init__(self, model: CausalLM, target: CausalLM) -> None:
        reader = StateReader()
        reader.reads = [FINAL]
        reader.hidden_size = reader.embedding_size = model.config.backbone_hidden_size
        super().__init__(model, reader, target)
        self.own = model.config.get_text_config()
        found = sources(target.config.get_text_config(decoder=True))
        self.sources = {kind: found[kind] for kind in dict.fromkeys(self.own.layer_types)}
        self.embeddings = target.get_input_embeddings()

    @property
    def parts(self) -> list[nn.Module]:
        model = self.model  # of the head only some rows are read where tokens are in clusters
        head = model.lm_head if model.masked_embedding is None else model.masked_embedding
        return [model.pre_projection, model.model, model.post_projection, head]

    @property
    def hidden_size(self) -> int:
        return int(self.own.hidden_size)

    def round_steps(self, vocab_size: int) -> SharedSteps | None:
        return None if self.captured_copy is None else SharedSteps(self.captured_copy, vocab_size)

    def rows_in(self, cache: RoomCache) -> SharedRows:
        """What it sees of a text in a target's room."""
        layers: list[Any] = cache.layers
        rows = {kind: (layers[place].keys, layers[place].values) for kind, place in self.sources.items()}
        position = cache.length[:, None]
        if cache.prompt is not None:
            position = position + cache.prompt.offset
        places, length = torch.arange(cache.room, device=position.device), cache.length[:, None]
        held = places < length
        shown = held if cache.prompt is None else held & cache.prompt.shown
        near = places > length - self.own.sliding_window  # what the target sees: the token itself, and those before
        masks: dict[str, Tensor | None] = {}
        for kind in rows:
            masks[kind] = (shown & (near if kind == "sliding_attention" else held))[:, None, None]
        return SharedRows(rows, masks, position)

    def session(self, vocab_size: int) -> SharedReading:
        return SharedReading(self, vocab_size)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's input embeddings `[..., embedding_size]` of token ids; unknown ids count as 0."""
        known = tokens.where(tokens < len(self.embeddings.weight), 0)
        embeddings: Tensor = self.embeddings(known.to(self.embeddings.weight.device))
        return embeddings.to(tokens.device)

    def rows(self, text: SharedText) -> SharedRows:
        """What it sees of a target's text: in layers with a window the token itself, and `window - 1` before."""
        shown, rows, masks = text.shown, {}, {}
        for kind, place in self.sources.items():
            layer = text.cache.layers[place]
            first = max(layer.keys.shape[2] - self.own.sliding_window + 1, 0) if kind == "sliding_attention" else 0
            keys, values = (each[:, :, first:].to(self.device) for each in (layer.keys, layer.values))
            rows[kind] = keys, values
            seen = None if shown is None else shown[shown.shape[0] - keys.shape[2] :].to(self.device)
            masks[kind] = None if seen is None or not bool(seen.any()) else seen[None, None, None]
        return SharedRows(rows, masks, text.position.to(self.device))

    def run(self, tokens: Tensor, states: Tensor, seen: SharedRows) -> tuple[Tensor, Tensor, Tensor]:
        """A step after each of n tokens, none of which sees another.

        Args:
            tokens: `[1, n]`.
            states: `[1, n, embedding_size]`, before them.

        Returns:
            Logits `[n, vocab]` float32, the states `[n, hidden_size]` that they are of, and `[n, embedding_size]`
            those that a further step reads.
        """
        inputs = self.model.pre_projection(torch.cat((self.embed(tokens), states), dim=-1))
        count = tokens.shape[1]
        masks = {kind: None if each is None else each.expand(-1, -1, count, -1) for kind, each in seen.masks.items()}
        hidden = self.model.model(
            inputs_embeds=inputs, attention_mask=masks, position_ids=seen.position,
            shared_kv_states=seen.rows, use_cache=False,
        ).last_hidden_state[0]  # fmt: skip
        return self._logits(hidden).float(), hidden, self.model.post_projection(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """`[n, vocab_size]` of `[n, hidden_size]`; where tokens are in clusters, -inf outside the likeliest of these.

        transformers gives the others a number below the least of the pass, so that q would depend on what else is in
        the pass, and have some mass on every token.
        """
        head, clusters = self.model.lm_head, self.model.masked_embedding
        if clusters is None:
            logits: Tensor = head(hidden)
            return logits
        chosen = clusters.centroids(hidden).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        ids = clusters.token_ordering.view(clusters.num_centroids, -1)[chosen].flatten(1)
        found = (head.weight[ids] @ hidden[..., None]).squeeze(-1)
        return hidden.new_full((len(hidden), head.weight.shape[0]), float("-inf")).scatter_(1, ids, found)


class SharedReading(Reading):
    """An assistant's side of one text. Between rounds it keeps but the text's last token and the state before it.

    Example: the text "a b c" is verified, and the target has read "a b". The first step reads c with the target's state
    at b, and gives d; the second reads d with the first one's state. Both attend to the target's rows of "a b", and
    both stand at the position of c.
    """

    length = 0

    def __init__(self, draft: Gemma4Draft, vocab_size: int) -> None:
        super().__init__()
        self.draft, self.vocab_size, self.embed = draft, vocab_size, draft.embed
        self._text: Any = None  # a `SharedText`
        self._seen: SharedRows | None = None  # in this round
        self._states: dict[int, Tensor] = {}  # `[embedding_size]`: its own after nodes of a tree, or of a chain after 0

    def share(self, text: SharedText) -> None:
        cache = text.cache
        if isinstance(cache, StaticCache) or (cache is not None and cache.offloading):
            raise ValueError(
                f"A Gemma 4 assistant reads the keys and values in the target's cache, which a {type(cache).__name__} "
                "keeps in another order or on another device (cache_implementation='static' or 'offloaded'). Leave "
                "cache_implementation unset."
            )
        self._text = text

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:  # noqa: ARG002
        self.length += new_tokens.shape[1]
        self._last, self._seen, self.passes = new_tokens[:, -1:].clone(), None, 0
        if states is not None:
            self._state = states[:, -1:].clone()
        self.unread = 1

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens = candidates[-1].view(1, 1) if candidates else self._last
        logits, hidden = self._pass(tokens, self._states[0][None, None] if candidates else self._state, [0])
        return logits[0], hidden[0]

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        if nodes == [0]:
            return self._pass(self._last, self._state, nodes)
        tokens = torch.tensor([[tree.tokens[node] for node in nodes]])
        return self._pass(tokens, torch.stack([self._states[tree.parents[node]] for node in nodes])[None], nodes)

    def keep(self, path: list[int]) -> None:
        """What was accepted is read anew, in the target's rows and with its state."""

    def _pass(self, tokens: Tensor, states: Tensor, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Logits and hidden states after some nodes; the states that further steps read are kept."""
        draft = self.draft
        self._seen = self._seen or draft.rows(self._text)
        logits, hidden, further = draft.run(tokens.to(draft.device), states.to(draft.device, draft.dtype), self._seen)
        self._states.update(zip(nodes, further, strict=True))
        self.passes, self.unread = self.passes + 1, 0
        return as_wide_as(self.vocab_size, logits), hidden


class SharedSteps(RoundSteps):
    """As `SharedReading`: each node is read with the state before it, and sees the verified text but for its last
    token in the target's cache. Of the window the last token counts alone."""

    shares_cache, num_layers = True, 0

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__(draft, vocab_size, draft.model, draft.reads.width)
        self.draft = draft

    def read(self, cache: RoomCache, window: Window) -> None:
        """The target has read it; the draft has no cache but a length."""
        cache.length.add_(window.last + 1)

    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:  # noqa: ARG002 - all stand alike
        if window.states is None:
            raise ValueError("A Gemma 4 assistant reads the target's states, and none were handed over.")
        tokens, states = window.tokens.gather(1, window.last[:, None]), at_last(window.states, window.last)[:, None]
        seen = self.draft.rows_in(cache)
        while True:
            logits, hidden, further = self.draft.run(tokens, states, seen)
            level = yield as_wide_as(self.vocab_size, logits)[None], hidden[None]
            tokens = level.tokens
            states = further[None].gather(1, level.parents[..., None].expand(-1, -1, further.shape[-1]))
