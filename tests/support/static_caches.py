"""Static caches, and what is in them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StaticCache

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.generation.prefix import Prefix
from hf_specdecpp.models.causal_lm import CausalLM
from support.models import assistant_of, prompt
from support.outputs import assert_same, prefill
from support.tree_generation import TREES

# Without repetitions, in which rows could be mistaken for one another.
OPTIONS: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0, "no_repeat_ngram_size": 2}
STATIC: dict[str, Any] = {**OPTIONS, "cache_implementation": "static"}
COSTS = {"draft": 0.1, "verify": [1.0, 1.0, 1.05, 1.1, 1.2]}
RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4}, "fills its width": {"rule": "fixed", "num_tokens": 7},
    "threshold": {"rule": "threshold", "threshold": 0.9}, "throughput": {"rule": "throughput", "costs": COSTS},
}  # fmt: skip
GROWTHS: dict[str, dict[str, Any]] = {
    **TREES,
    "tree, throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 12, "costs": COSTS},
    "looked up": {"tree": "dyspec", "tree_budget": 6, "lookup": True},
}


def attached(target: CausalLM, how: str = "fixed", kind: str = "independent", **more: Any) -> SpecDecPPAssistant:
    return assistant_of(kind, target, **{**RULES, **GROWTHS}[how], **more)


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


def assert_held_rows_are_text(target: CausalLM, assistant: SpecDecPPAssistant, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every round of a text to `prompt()`."""
    found: list[Any] = []

    def note(prefix: Prefix) -> None:
        found.append((prefix.text.held, [(keys.clone(), values.clone()) for keys, values in held(prefix.cache)]))

    with monkeypatch.context() as patch:
        settled(patch, note)
        text = target.generate(prompt(), assistant_model=assistant, **STATIC)
    assert (found[0][0], found[-1][0]) == (12, text.shape[1] - 1)
    for length, rows in found:
        assert {keys.shape[2] for keys, _ in rows} == {length}
        assert_prefilled(rows, target, text[:, :length])


def assert_others_unattended(target: CausalLM, assistant: SpecDecPPAssistant, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is that of plain generation though rows that are not held are spoilt after every round."""
    plain = target.generate(prompt(), **STATIC)

    def poison(prefix: Prefix) -> None:
        for layer in prefix.cache.layers:
            layer.keys[:, :, prefix.text.held :] = 1e8
            layer.values[:, :, prefix.text.held :] = 1e8

    settled(monkeypatch, poison)
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, **STATIC), plain)
