"""Static caches of a target: what is refused, and how the cache is made fit for candidates."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_specdecpp.caches.batches import ATTENTION_LAYERS
from hf_specdecpp.caches.text import room_of, width_of
from hf_specdecpp.models.causal_lm import CACHE_NAMES, CausalLM, cache_among

WITHOUT = "Leave cache_implementation unset and pass no StaticCache"


def check_static(target: CausalLM, input_ids: Tensor, model_kwargs: dict[str, Any], config: GenerationConfig) -> None:
    """Raise `ValueError` if the cache is a static one that cannot be made fit for candidates."""
    cache = cache_among(model_kwargs)
    if not isinstance(cache, StaticCache):
        return
    mask = model_kwargs.get("attention_mask")
    read = mask.shape[1] if mask is not None else getattr(config, "_mask_length", input_ids.shape[1])
    # With the text of earlier turns, of which perhaps nothing but the rows in the cache is left.
    longest = config.max_length + read - input_ids.shape[1]
    keeps_windows = config.cache_implementation is None
    if (reason := _unfit(target, input_ids, cache, longest, keeps_windows)) is not None:
        raise ValueError(f"A static cache cannot be used here: {reason}. {WITHOUT}.")


def prepare_static(model_kwargs: dict[str, Any], config: GenerationConfig, most_in_tree: int) -> None:
    """Make the cache fit for candidates if it is a static one, before anything is read and once nothing is refused.

    Layers with a window keep all tokens of a text: a full window moves on with each token, and what has left it cannot
    come back. A tree, of up to `most_in_tree` candidates, is not cut to the room that is left: it has room after the
    longest text.
    """
    cache = cache_among(model_kwargs)
    # Else the user's own; made by `generate()` for this text, nobody else uses it.
    if isinstance(cache, StaticCache) and config.cache_implementation is not None:
        further = width_of(most_in_tree + 1) if most_in_tree else 0
        room = max(config.max_length - 1, cache.get_max_length()) + further
        kinds = (StaticLayer, StaticSlidingWindowLayer) if further else (StaticSlidingWindowLayer,)
        cache.layers = [_with_room(layer, room) if type(layer) in kinds else layer for layer in cache.layers]


def _unfit(target: CausalLM, input_ids: Tensor, cache: StaticCache, longest: int, keeps_windows: bool) -> str | None:
    name = type(target).__name__
    if input_ids.shape[0] > 1:
        return f"the {input_ids.shape[0]} rows of a batch accept different numbers of candidates, and it has one length"
    kinds = {type(layer) for layer in cache.layers}
    if others := kinds - {StaticLayer, StaticSlidingWindowLayer, *ATTENTION_LAYERS}:
        kept = ", ".join(sorted(kind.__name__ for kind in others))
        return f"{name} keeps {kept} in it, which cannot be taken back in place when a candidate is rejected"
    if cache.offloading:
        return "it is offloaded, with which assistants were never tried"
    if keeps_windows and StaticSlidingWindowLayer in kinds and room_of(cache) < longest - 1:
        return (
            f"{name} has windows of {room_of(cache)} tokens in it, the text may grow to {longest}, and what "
            "has left a window cannot come back when a candidate is rejected (the cache that "
            'cache_implementation="static" makes keeps it)'
        )
    return None


def as_growing(
    target: CausalLM, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> tuple[GenerationConfig, dict[str, Any]]:
    """With a cache that grows in the place of a static one that `generate()` has made for this text: captured passes
    have a cache of their own, into which a growing one is copied."""
    cache = cache_among(model_kwargs)
    if not isinstance(cache, StaticCache) or cache.offloading or config.cache_implementation is None:
        return config, model_kwargs
    config = copy.copy(config)
    config.cache_implementation = None
    growing = DynamicCache(config=target.config.get_text_config(decoder=True))
    return config, {name: growing if name in CACHE_NAMES else each for name, each in model_kwargs.items()}


def as_static(config: GenerationConfig, model_kwargs: dict[str, Any]) -> GenerationConfig:
    """The config with a static cache's name in it, also where the cache is the user's own."""
    if isinstance(cache_among(model_kwargs), StaticCache) and config.cache_implementation is None:
        config = copy.copy(config)
        config.cache_implementation = "static"
    return config


def _with_room(layer: Any, room: int) -> StaticLayer:
    """An empty layer in the place of one."""
    wider = StaticLayer(room)
    if layer.is_initialized:  # before a prompt that is read in chunks
        wider.lazy_initialization(layer.keys, layer.values)
    return wider
