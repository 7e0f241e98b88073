"""What assisted generation cannot serve, refused before any work, with the reason."""

from __future__ import annotations

import inspect
import sys
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    QuantizedCache,
    StaticCache,
)
from transformers.generation import GenerationMode

from hf_specdecpp.tree_attention import layer_types, tree_error
from hf_specdecpp.typing import CausalLM

WITHOUT = "Generate without assistant_model="
CHAIN = "Draft chains instead (tree=None)"
TREE_ATTENTION = ("sdpa", "eager")
# Layers of models that share keys between layers hold nothing of their own (transformers 5.18 has no class for them).
TREE_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
TREE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Relative error of the logits that rounding alone does not reach; wrong masks and positions are far above it. Some
# families compute partly in float32 whatever their dtype.
TREE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
HALF_TREE_TOLERANCE = 0.1
# Config fields of families that attend to a choice of earlier tokens, made over rows or blocks of rows of the cache.
SPARSE = ("keep_window_size", "index_topk_blocks", "num_random_blocks")
# Kinds of layer with a window, the config field of its size, and transformers' function that makes its mask.
WINDOWS = (
    ("sliding_attention", "sliding_window", "create_sliding_window_causal_mask"),
    ("chunked_attention", "attention_chunk_size", "create_chunked_causal_mask"),
)

# Attention implementation and dtype with which a model has passed the test of `tree_error`.
_passed: WeakKeyDictionary[CausalLM, tuple[str, torch.dtype]] = WeakKeyDictionary()


def check_target(target: CausalLM) -> None:
    """Raise `ValueError` if nothing that `target` generates can be assisted."""
    name = type(target).__name__
    if not target.can_generate():
        raise ValueError(f"{name} cannot generate, so there is nothing to assist. Load it with AutoModelForCausalLM.")
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder model; hf_specdecpp assists decoder-only models. {WITHOUT}.")
    if getattr(target, "_is_stateful", False):
        raise ValueError(
            f"{name} keeps a recurrent state, which cannot be rolled back when a candidate is rejected. {WITHOUT}."
        )


def check_mode(mode: GenerationMode, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if this kind of generation cannot be assisted."""
    if config.num_beams not in (None, 1) or mode is not GenerationMode.ASSISTED_GENERATION:
        raise ValueError(
            f"An assistant cannot help with {mode.value.replace('_', ' ')} (num_beams={config.num_beams}): it proposes "
            f"one continuation of one sequence. Set num_beams=1, or generate without assistant_model=."
        )
    if (config.num_return_sequences or 1) > 1:
        raise ValueError(
            f"num_return_sequences={config.num_return_sequences}: candidates are verified for one sequence at a time. "
            "Call generate() once a sequence."
        )
    if config.use_cache is False:
        raise ValueError("use_cache=False: verifying candidates needs the target's key-value cache. Leave it on.")
    if config.cache_implementation not in (None, "dynamic", "offloaded"):
        raise ValueError(
            f"cache_implementation={config.cache_implementation!r} cannot be rolled back when a candidate is rejected. "
            "Leave it unset, or generate without assistant_model=."
        )
    check_lossless(config)
    if mode_kwargs.get("synced_gpus"):
        raise ValueError(
            "synced_gpus=True: ranks would run different numbers of rounds. Generate without assistant_model= under "
            "FSDP or ZeRO-3."
        )


def check_lossless(config: GenerationConfig) -> None:
    """Raise `ValueError` if assisted generation is asked to change the output."""
    if getattr(config, "assistant_ensemble_weight", None) is not None:
        raise ValueError("assistant_ensemble_weight changes the output; hf_specdecpp is lossless. Leave it unset.")


def check_inputs(input_ids: Tensor, model_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` for inputs that cannot be assisted. Runs before the first forward."""
    if input_ids.shape[0] != 1:
        raise ValueError(
            f"A batch of {input_ids.shape[0]} sequences: candidates are verified for one sequence at a time, since "
            "each would accept a different number. Call generate() once a sequence (in a pipeline: batch_size=1)."
        )
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise ValueError("The prompt was given as inputs_embeds, which the draft cannot read. Pass input_ids.")
    check_cache(model_kwargs.get("past_key_values"))


def check_cache(cache: object) -> None:
    """Raise `ValueError` unless `cache` can be rolled back."""
    if not isinstance(cache, Cache):
        raise ValueError(
            f"The target made no cache ({type(cache).__name__}), so candidates cannot be verified. {WITHOUT}."
        )
    if isinstance(cache, StaticCache | QuantizedCache):
        raise ValueError(
            f"{type(cache).__name__} cannot be rolled back when a candidate is rejected. Use a DynamicCache, or "
            "generate without assistant_model=."
        )


def check_tree(target: CausalLM, role: str = "target", cache: Cache | None = None) -> None:
    """Raise `ValueError` unless `target` reads a token tree in one pass as it reads each path of it.

    What is known not to work is refused by name; then the model itself is tried on a small tree, once.

    Args:
        target: the target, or the draft.
        role: what to call it in messages.
        cache: the one that it will use, where it is not the model's own kind.
    """
    check_target(target)
    subject, config = f"The {role} {type(target).__name__}", target.config.get_text_config(decoder=True)
    if (implementation := config._attn_implementation) not in TREE_ATTENTION:
        raise ValueError(
            f"{subject} runs attn_implementation={implementation!r}, which takes no mask of a tree's shape. Load it "
            f'with attn_implementation="sdpa", or call its set_attn_implementation("sdpa"). {CHAIN} otherwise.'
        )
    layers = [*DynamicCache(config=config).layers, *(cache.layers if cache is not None else [])]
    if (reason := _no_tree(target, config, layers)) is not None:
        raise ValueError(f"{subject} {reason}, so it cannot read a token tree. {CHAIN}.")
    if _passed.get(target) == (implementation, target.dtype):
        return
    try:
        error = tree_error(target)
    except Exception as failure:  # whatever goes wrong in a foreign forward, trees are refused
        raise ValueError(f"{subject} fails on a token tree ({failure}). {CHAIN}.") from failure
    tolerance = TREE_TOLERANCE.get(target.dtype, HALF_TREE_TOLERANCE)
    if not error <= tolerance:
        raise ValueError(
            f"{subject} reads a token tree differently from each of its paths: its logits are off by {error:.2g} of "
            f"their spread (rounding explains {tolerance:g}), so the output would be wrong. {CHAIN}."
        )
    _passed[target] = (implementation, target.dtype)


def _no_tree(target: CausalLM, config: Any, layers: list[Any]) -> str | None:
    """What is known about the model, without running it, that rules out trees."""
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "measures distances along the rows of its cache (ALiBi)"
    if "position_ids" not in inspect.signature(target.forward).parameters:
        return "takes no position_ids, but siblings in a tree stand at one position"
    if getattr(config, "attn_temperature_tuning", False):
        return "scales its attention by the row of the cache that a token lies in (attn_temperature_tuning)"
    if name := next((name for name in SPARSE if hasattr(config, name)), None):
        return f"chooses by their place which rows of its cache it reads ({name})"
    if "local" in getattr(config, "attention_layers", ()):
        return "measures its local attention along the rows of its cache"
    if getattr(config, "cross_attention_layers", None):
        return "keeps rows of another length in its cache (cross-attention)"
    rope = getattr(config, "rope_parameters", None) or {}
    if any("mrope_section" in part for part in (rope, *rope.values()) if isinstance(part, dict)):
        return "has positions in several dimensions (mrope)"
    types = set(getattr(config, "layer_types", None) or ())
    if unknown := types - TREE_LAYER_TYPES:
        return f"has layers of type {', '.join(sorted(unknown))}"
    if unknown := {type(layer).__name__ for layer in layers if type(layer) not in TREE_LAYERS}:
        return f"keeps {', '.join(sorted(unknown))} in its cache"
    return _unknown_window(target, config)


def _unknown_window(target: CausalLM, config: Any) -> str | None:
    """Whether some window may be measured in another way than `tree_inputs` does: no short test reaches past it."""
    module = sys.modules[type(target.base_model).__module__]
    layers = DynamicCache(config=config).layers
    for kind, size, maker in WINDOWS:
        windows = {
            layer.sliding_window
            for layer, layer_type in zip(layers, layer_types(config, len(layers)), strict=True)
            if layer_type == kind and isinstance(layer, DynamicSlidingWindowLayer)
        }
        if windows and (windows != {getattr(config, size, None)} or not hasattr(module, maker)):
            return f"has {kind.replace('_', ' ')} over {sorted(windows)} tokens whose mask hf_specdecpp does not know"
    return None
