"""Which models and caches can be assisted at all, refused with the reason."""

from __future__ import annotations

from transformers.cache_utils import (
    Cache,
    QuantizedCache,
    StaticCache,
)

from hf_specdecpp.models.causal_lm import CausalLM

WITHOUT = "Generate without assistant_model="


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
