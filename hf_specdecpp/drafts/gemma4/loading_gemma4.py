"""Gemma 4 assistants (`Gemma4`), which are a class of transformers: how their checkpoints are read, and how a draft is
bound to its target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_specdecpp.config import checks
from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.config.checks import check_layers, check_numbers, shown
from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.drafts.checkpoints import as_described, mapping
from hf_specdecpp.drafts.draft_kind import Config, PublishedKind, pinned
from hf_specdecpp.drafts.gemma4.modeling_gemma4 import Gemma4Draft, heads_of, sources
from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder, num_processes
from hf_specdecpp.models.early_exit import layer_stack

HEAD, EMBEDDINGS, ORDER = "lm_head.weight", "model.embed_tokens.weight", "masked_embedding.token_ordering"

OWN = (
    "backbone_hidden_size", "num_centroids", "centroid_intermediate_top_k", "use_ordered_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
# Of its layers. Those of one kind may have heads of their own, as the newest versions write it or as older ones do.
TEXT = (
    *checks.LAYER, "hidden_activation", "num_kv_shared_layers", "global_head_dim", "num_global_key_value_heads",
    "per_layer_config", "use_bidirectional_attention", "hidden_size_per_layer_input", "vocab_size_per_layer_input",
    "attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp", "tie_word_embeddings",
)  # fmt: skip
HEADS_OF_LAYER = {"head_dim", "num_key_value_heads"}


class Gemma4(PublishedKind):
    """An assistant of transformers' class, beside the target that it was trained for: a few layers that attend to the
    keys and values in the target's own cache."""

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
        """transformers compares the size of the vocabulary."""
        size = {"vocab_size": mapping(raw, "text_config").get("vocab_size")}
        check_numbers(size)
        return size

    def settings(self, module: Any) -> dict[str, Any]:
        return {name: getattr(module.config, name) for name in OWN}

    def read(self, raw: Config, tensors: Mapping[str, Tensor], source: str) -> CausalLM:
        """`ValueError` also if this transformers has no such class."""
        kind = str(raw.get("model_type"))
        if kind not in CONFIG_MAPPING:
            raise ValueError(
                f"{source} is a {kind!r}, a class of transformers that version {transformers.__version__} does not "
                "have. Install a newer one: pip install -U transformers."
            )
        with as_described("Gemma 4 assistant"):
            config = CONFIG_MAPPING[kind].from_dict(_known(kind, raw))
            # Clusters, if there are any, are equally large, and some of them are chosen.
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
        if model.masked_embedding is not None:
            if order is not None and order.is_meta:  # its numbers are read later
                return model
            ids = None if order is None or order.is_floating_point() or order.shape != (tokens,) else order.cpu().long()
            if ids is None or not torch.equal(ids.sort().values, torch.arange(len(ids))):
                found = "is missing"
                if order is not None:
                    found = f"holds {order.numel()} numbers, {list(order.shape)} of {str(order.dtype)[6:]}"
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
        if (processes := num_processes(target)) > 1:
            return f"reads all heads of the keys and values, and each of {processes} processes has some of them"
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
    """A model of transformers' class without what it reads of its target, and without the order of its clusters."""
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.model.embed_tokens = None  # it reads the target's: its own are its LM head
    # Several rows of a pass are nodes of a tree, none of which follows another, and logits of all are needed.
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.model.first_kv_shared_layer_idx = None
    if model.masked_embedding is not None:
        model.masked_embedding.register_buffer("token_ordering", None)  # whole numbers, which are checked apart
    return model


def _known(kind: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """What a config says of an assistant. transformers would act upon more: `attn_implementation` can name code."""
    text = dict(mapping(raw, "text_config"))
    if (named := text.get("model_type")) not in (None, usual := f"{kind.removesuffix('_assistant')}_text"):
        raise ValueError(f"text_config.model_type={shown(named)} must be {usual!r}, as a {kind} has it.")
    differing = mapping(text, "per_layer_config")
    if strange := [each for each in differing.values() if not isinstance(each, Mapping) or set(each) - HEADS_OF_LAYER]:
        raise ValueError(f"text_config.per_layer_config has {shown(strange[0])}, which is not known. {checks.CURE}")
    own = {name: raw[name] for name in OWN if raw.get(name) is not None}
    layers = {name: text[name] for name in TEXT if text.get(name) is not None}
    check_numbers(own)
    check_layers(layers, "text_config.", TEXT)
    rope = mapping(layers, "rope_parameters")
    if rope and None in (rope.get(checks.FULL), rope.get(checks.SLIDING)):
        raise ValueError(
            f"text_config.rope_parameters={shown(rope)} must have both {checks.FULL} and {checks.SLIDING}. "
            f"{checks.CURE}"
        )
    return {**own, "text_config": {"model_type": usual, **layers}}
