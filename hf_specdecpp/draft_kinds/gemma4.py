"""Gemma 4 assistants, a model class of transformers: checkpoints (`Gemma4`), the `Draft` (`Gemma4Draft`), its session
(`SharedSession`), captured rounds (`SharedSteps`), and the rows of the target's cache to attend to (`SharedRows`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, StaticCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_specdecpp.config import value_checks
from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.config.value_checks import check_layers, check_numbers, shown
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps, Unrolled, Window, last_rows
from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.draft_kinds import checkpoints
from hf_specdecpp.draft_kinds.checkpoints import as_described, mapping
from hf_specdecpp.draft_kinds.draft_kind import Config, PublishedKind, pinned
from hf_specdecpp.drafting.draft import DraftingSession, StateDraft, by_id
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.early_exit import layer_stack
from hf_specdecpp.models.target_states import FINAL, StateReader
from hf_specdecpp.trees.tree import DraftTree

HEAD, EMBEDDINGS, ORDER = "lm_head.weight", "model.embed_tokens.weight", "masked_embedding.token_ordering"
OWN = (
    "backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k", "use_ordered_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
# Fields of the layers. Full and sliding layers may have different heads, in new (`per_layer_config`) or old fields.
TEXT = (
    *value_checks.LAYER, "hidden_activation", "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads",
    "per_layer_config", "use_bidirectional_attention", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "tie_word_embeddings",
)  # fmt: skip
HEADS_OF_LAYER = {"head_dim", "num_key_value_heads"}


@dataclass(frozen=True)
class SharedRows:
    """The target's keys and values that the draft attends to in a round: of all verified tokens but the last."""

    rows: dict[str, tuple[Tensor, Tensor]]  # by kind of layer: keys and values, `[1, kv_heads, n, head_dim]` each
    masks: dict[str, Tensor | None]  # by kind of layer: bool `[1, 1, 1, n]`, where attended to; `None`: everywhere
    position: Tensor  # `[1, 1]`, of the last token, used for all candidates of the round


def sources(config: Any) -> dict[str, int]:
    """Return, by kind of layer ("full_attention", "sliding_attention"), the index of the target's last layer of that
    kind with keys and values of its own: the draft's layers of that kind attend to these. `config`: the target's.

    Example: of six layers `s s f s s f` the last two share the keys and values of others: `{"s": 3, "f": 2}`."""
    with_own = config.layer_types[: config.num_hidden_layers - (config.num_kv_shared_layers or 0)]
    return {kind: place for place, kind in enumerate(with_own)}


def heads_of(attention: Any) -> tuple[int, int]:
    """Return the number of key-value heads of an attention module, and their size."""
    return attention.config.num_attention_heads // attention.num_key_value_groups, attention.head_dim


class SharedSession(DraftingSession):
    """Session for one sequence. Between rounds it keeps only the last token and the target's state at the token before.

    Example: "a b c" is verified, and the target has read "a b". The first step reads c with the target's state at b,
    and proposes d; the second reads d with the state from the first step. Both steps attend to the target's keys and
    values of "a b", and have the position of c."""

    length = 0

    def __init__(self, draft: Gemma4Draft, vocab_size: int) -> None:
        super().__init__()
        self.draft, self.vocab_size, self.embed = draft, vocab_size, draft.embed
        self._text: Any = None  # see `bind_cache`
        self._seen: SharedRows | None = None  # in this round
        self._states: dict[int, Tensor] = {}  # `[embedding_size]` by tree node; a chain uses 0

    def bind_cache(self, text: Any) -> None:
        cache = text.cache
        if isinstance(cache, StaticCache) or (cache is not None and cache.offloading):
            raise ValueError(
                f"A Gemma 4 assistant reads the keys and values in the target's cache, which a {type(cache).__name__} "
                "keeps in another order or on another device (cache_implementation='static' or 'offloaded'). Leave "
                "cache_implementation unset."
            )
        self._text = text

    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        self.length += new_tokens.shape[1]
        self._last, self._seen, self.passes = new_tokens[:, -1:].clone(), None, 0
        if states is not None:
            self._state = states[:, -1:].clone()
        self.unread = 1

    def propose_next(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens = candidates[-1].view(1, 1) if candidates else self._last
        logits, hidden = self._pass(tokens, self._states[0][None, None] if candidates else self._state, [0])
        return logits[0], hidden[0]

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        if nodes == [0]:
            return self._pass(self._last, self._state, nodes)
        tokens = torch.tensor([[tree.tokens[node] for node in nodes]], device="cpu")
        return self._pass(tokens, torch.stack([self._states[tree.parents[node]] for node in nodes])[None], nodes)

    def _pass(self, tokens: Tensor, states: Tensor, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Run a draft pass over `tokens` `[1, n]` with the states `[1, n, embedding_size]` before them: logits `[n,
        vocab_size]` and hidden states after each. Store the states for the children of `nodes`, the tokens' indices."""
        draft = self.draft
        self._seen = self._seen or draft.rows(self._text)
        logits, hidden, further = draft.run(tokens.to(draft.device), states.to(draft.device, draft.dtype), self._seen)
        self._states.update(zip(nodes, further, strict=True))
        self.passes, self.unread = self.passes + 1, 0
        return by_id(logits, self.vocab_size), hidden


class SharedSteps(RoundSteps):
    """`SharedSession` for captured rounds: each node is read with the state of its parent, and attends to the target's
    cache. Of the window only the last token and its state are used."""

    num_layers = 0

    def read(self, cache: FixedCache, window: Window) -> None:
        """Add the window's number of tokens to `cache.length`: the draft stores no keys and values."""
        cache.length.add_(window.last + 1)

    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        own: Any = window.states
        tokens, states = window.tokens.gather(1, window.last[:, None]), last_rows(own, window.last)[:, None]
        seen = self.drafter.rows_in(cache)
        while True:
            logits, hidden, further = self.drafter.run(tokens, states, seen)
            level = yield by_id(logits, self.vocab_size)[None], hidden[None]
            tokens = level.tokens
            states = level.of_parents(further[None])


class Gemma4Draft(StateDraft):
    """Drafts with a Gemma 4 assistant that is bound to its target (`PublishedKind.bind`).

    A step reads a token and the state at the token before: the target's final state for the last verified token, the
    draft's own state for candidates. The draft has no keys and values; it attends to the target's, and uses the
    target's embeddings."""

    shares_cache = True
    session_class, steps_class = SharedSession, SharedSteps
    cannot = {
        "batches": "A Gemma 4 assistant reads the keys and values in the target's cache, and those of the rows of a "
        "batch lie among one another's there. Call generate() once a sequence."
    }

    def __init__(self, model: CausalLM, target: CausalLM) -> None:
        reader = StateReader()
        reader.reads = [FINAL]
        reader.hidden_size = reader.embedding_size = model.config.backbone_hidden_size
        super().__init__(model, reader)
        self.own = model.config.get_text_config()
        self.hidden_size = int(self.own.hidden_size)
        found = sources(target.config.get_text_config(decoder=True))
        self.sources = {kind: found[kind] for kind in dict.fromkeys(self.own.layer_types)}
        self.embeddings = target.get_input_embeddings()

    @property
    def parts(self) -> list[nn.Module]:
        model = self.model  # with token clusters only some rows of the head are read
        head = model.lm_head if model.masked_embedding is None else model.masked_embedding
        return [model.pre_projection, model.model, model.post_projection, head]

    def rows_in(self, cache: FixedCache) -> SharedRows:
        """Return the keys, values and masks for a captured round, from the target's `FixedCache`."""
        layers: list[Any] = cache.layers
        rows = {kind: (layers[place].keys, layers[place].values) for kind, place in self.sources.items()}
        position = cache.length[:, None]
        if cache.prompt is not None:
            position = position + cache.prompt.offset
        masks: dict[str, Tensor | None] = {}
        for kind, place in self.sources.items():
            tokens = cache.tokens_of(layers[place].capacity, length := cache.length[:, None])
            seen = cache.shown(tokens.expand(len(length), -1)) & (tokens < length)
            if kind == "sliding_attention":  # the target's window includes the token itself
                seen = seen & (tokens > length - self.own.sliding_window)
            masks[kind] = seen[:, None, None]
        return SharedRows(rows, masks, position)

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's input embeddings `[..., embedding_size]` of token ids; unknown ids count as id 0."""
        known = tokens.where(tokens < len(self.embeddings.weight), 0)
        return self.embeddings(known.to(self.embeddings.weight.device)).to(tokens.device)

    def rows(self, text: Any) -> SharedRows:
        """Return the keys, values and masks for a round; `text` as in `bind_cache`. Layers with a sliding window get
        the last `window - 1` rows of the cache, as the target's window includes the token itself."""
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
        """Run one draft step for each of n tokens, which do not attend to one another.

        Args:
            tokens: `[1, n]`.
            states: `[1, n, embedding_size]`, the state at the token before each.
            seen: the target's keys and values, from `rows` or `rows_in`.

        Returns:
            Logits `[n, vocab]` float32, the hidden states `[n, hidden_size]` that they were computed from, and the
            states `[n, embedding_size]` that the next step reads."""
        inputs = self.model.pre_projection(torch.cat((self.embed(tokens), states), dim=-1))
        count = tokens.shape[1]
        masks = {kind: None if each is None else each.expand(-1, -1, count, -1) for kind, each in seen.masks.items()}
        hidden = self.model.model(
            inputs_embeds=inputs, attention_mask=masks, position_ids=seen.position,
            shared_kv_states=seen.rows, use_cache=False,
        ).last_hidden_state[0]  # fmt: skip
        return self._logits(hidden).float(), hidden, self.model.post_projection(hidden)

    def _logits(self, hidden: Tensor) -> Tensor:
        """Return logits `[n, vocab_size]` of `[n, hidden_size]`; with token clusters, -inf outside the likeliest ones.

        transformers fills all other logits with a number below the least of the pass: q would depend on the other rows
        of the pass, and give every token some probability."""
        head, clusters = self.model.lm_head, self.model.masked_embedding
        if clusters is None:
            return head(hidden)
        chosen = clusters.centroids(hidden).topk(clusters.centroid_intermediate_top_k, dim=-1).indices
        ids = clusters.token_ordering.view(clusters.num_centroids, -1)[chosen].flatten(1)
        found = (head.weight[ids] @ hidden[..., None]).squeeze(-1)
        return hidden.new_full((len(hidden), head.weight.shape[0]), float("-inf")).scatter_(1, ids, found)


class Gemma4(PublishedKind):
    """Draft with a Gemma 4 assistant: a few layers that attend to the cache of the target they were trained for."""

    name = "gemma4"
    is_named = True
    untrainable = "Gemma 4 assistants are loaded, not trained: load one, or train with draft: eagle3"
    belongs = (
        "It reads the keys and values in the target's cache, so it works with the Gemma 4 that it was trained for "
        "alone: load that one, or a draft of this target."
    )
    drafter = Gemma4Draft
    served_by = "engines that serve such assistants read its own repository"

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        if config.draft_id is None:
            return f"a Gemma 4 assistant, which reads the cache of {target}"
        return f"Gemma 4 assistant {pinned(config)}"

    def recognises(self, raw: Config) -> bool:
        return re.fullmatch(r"gemma\d\w*_assistant", str(raw.get("model_type"))) is not None

    def fields(self, raw: Config) -> dict[str, Any]:
        """Return `vocab_size` only, which transformers compares with the target's."""
        size = {"vocab_size": mapping(raw, "text_config").get("vocab_size")}
        check_numbers(size)
        return size

    def settings(self, module: Any) -> dict[str, Any]:
        return {name: getattr(module.config, name) for name in OWN}

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> CausalLM:
        """As in `PublishedKind`; `ValueError` also if the installed transformers lacks the model class."""
        kind = str(raw.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise ValueError(
                f"{source} is a {kind!r}, a class of transformers that version {transformers.__version__} does not "
                "have. Install a newer one: pip install -U transformers."
            )
        with as_described("Gemma 4 assistant"):
            config = CONFIG_MAPPING[kind].from_dict(_known(kind, raw))
            # Token clusters have equal sizes, and a step chooses some of them.
            count, chosen = config.num_centroids, config.centroid_intermediate_top_k
            tokens = config.text_config.vocab_size
            if config.use_ordered_embeddings and (not 1 <= chosen <= count or tokens % count):
                raise ValueError(
                    f"vocab_size={tokens} tokens cannot lie in num_centroids={count} clusters of one size, of which "
                    f"centroid_intermediate_top_k={chosen} are read."
                )
        named = dict(tensors)
        embeddings = named.pop(EMBEDDINGS, None)
        if config.tie_word_embeddings and embeddings is not None:
            named[HEAD] = embeddings
        order = named.pop(ORDER, None) if config.use_ordered_embeddings else None
        depth = config.text_config.num_hidden_layers
        model = checkpoints.build(lambda: _bare(config), named, depth, source, "Gemma 4 assistant")
        if model.masked_embedding is None or (order is not None and order.is_meta):  # an outline: without values
            return model
        ids = None if order is None or order.is_floating_point() or order.shape != (tokens,) else order.cpu().long()
        if ids is None or not torch.equal(ids.sort().values, torch.arange(len(ids))):
            found = "is missing" if order is None else f"holds {list(order.shape)} numbers of {str(order.dtype)[6:]}"
            raise ValueError(
                f"{source}: {ORDER} {found}, and must list each of {tokens} token ids once, so that a cluster says "
                "which tokens are its own. Download the repository again."
            )
        model.masked_embedding.token_ordering = ids
        return model

    def misfit(self, module: Any, target: CausalLM) -> str | None:
        config, own = target.config.get_text_config(decoder=True), module.config.get_text_config()
        if not config.model_type.startswith("gemma4_"):
            return f"drafts for a Gemma 4, and there is a model of type {config.model_type!r}"
        if (width := module.config.backbone_hidden_size) != config.hidden_size:
            return f"reads states of {width} numbers, and they have {config.hidden_size}"
        if own.vocab_size != config.vocab_size:
            return f"proposes {own.vocab_size} token ids, and there are {config.vocab_size}"
        found, stack = sources(config), layer_stack(inner_decoder(target), target)[1]
        for layer, kind in zip(module.model.layers, own.layer_types, strict=True):
            if kind not in found:
                return f"reads a layer with {kind}, and there is none"
            ours, theirs = heads_of(layer.self_attn), heads_of(stack[found[kind]].self_attn)
            if ours != theirs:
                return f"reads {ours[0]} heads of {ours[1]} numbers ({kind}), and there are {theirs[0]} of {theirs[1]}"
        return None


def _bare(config: Any) -> Any:
    """Make the model of a config, without embeddings and without values in the buffer `token_ordering`."""
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.model.embed_tokens = None  # the target's are used
    # The rows of a pass are nodes of a tree that do not attend to one another, and logits of all are needed.
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.model.first_kv_shared_layer_idx = None
    if model.masked_embedding is not None:
        model.masked_embedding.register_buffer("token_ordering", None)  # integers, checked separately
    return model


def _known(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields of a config of model type `kind`, checked: `ValueError` for invalid values. Unknown
    fields, such as `attn_implementation`, could make transformers run code."""
    text, usual = mapping(raw, "text_config"), f"{kind.removesuffix('_assistant')}_text"
    if (named := text.get("model_type")) not in (None, usual):
        raise ValueError(f"text_config.model_type={shown(named)} must be {usual!r}, as a {kind} has it.")
    differing = mapping(text, "per_layer_config")
    if strange := [each for each in differing.values() if not isinstance(each, Mapping) or set(each) - HEADS_OF_LAYER]:
        raise ValueError(
            f"text_config.per_layer_config has {shown(strange[0])}, which is not known. {value_checks.CURE}"
        )
    own = {name: raw[name] for name in OWN if raw.get(name) is not None}
    layers = {name: text[name] for name in TEXT if text.get(name) is not None}
    check_numbers(own)
    check_layers(layers, "text_config.", TEXT)
    rope = mapping(layers, "rope_parameters")
    if rope and None in (rope.get(value_checks.FULL), rope.get(value_checks.SLIDING)):
        raise ValueError(
            f"text_config.rope_parameters={shown(rope)} must have both {value_checks.FULL} and {value_checks.SLIDING}. "
            f"{value_checks.CURE}"
        )
    return {**own, "text_config": {"model_type": usual, **layers}}
