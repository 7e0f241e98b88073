"""Static caches, and what is in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp.generation.prefix import Prefix
from hf_specdecpp.models.causal_lm import CausalLM
from support.outputs import assert_same, prefill

# Without repetitions, in which rows could be mistaken for one another.
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "no_repeat_ngram_size": 2}
STATIC: dict[str, Any] = {**OPTIONS, "cache_implementation": "static"}


def static_cache(target: CausalLM, room: int = 192) -> StaticCache:
    return StaticCache(config=target.config, max_cache_len=room)


def held(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of the rows that each layer holds."""
    layers = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    lengths = [int(layer.get_seq_length()) for layer in layers]
    return [(each.keys[:, :, :n], each.values[:, :, :n]) for each, n in zip(layers, lengths, strict=True)]


def assert_prefilled(rows: list[tuple[Tensor, Tensor]], target: CausalLM, text: Tensor) -> None:
    """Rows that are held are those of a fresh pass over the text, which keeps only the last where there is a window."""
    layers: list[Any] = prefill(target, text).layers
    for (keys, values), layer in zip(rows, layers, strict=True):
        count = layer.keys.shape[2]
        assert_same((keys[:, :, -count:], values[:, :, -count:]), (layer.keys, layer.values))


def settled(monkeypatch: pytest.MonkeyPatch, then: Callable[[Prefix], None]) -> None:
    """Have something done after each round."""
    settle = Prefix.settle

    def and_then(prefix: Prefix, *args: Any, **kwargs: Any) -> None:
        settle(prefix, *args, **kwargs)
        then(prefix)

    monkeypatch.setattr(Prefix, "settle", and_then)
