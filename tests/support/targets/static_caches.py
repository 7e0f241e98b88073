"""Static caches, and what is in them."""

from typing import Any

from torch import Tensor
from transformers import StaticCache

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import assistant_of
from support.targets.outputs import assert_same, prefill
from support.targets.tree_generation import TREES

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
