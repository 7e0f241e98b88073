"""Compare everything that a generation returns."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, WatermarkingConfig
from transformers.cache_utils import LinearAttentionLayer

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import VOCAB_SIZE

RECORDS = ("scores", "logits", "hidden_states", "attentions")


def assert_same(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    """Compares nested tuples of tensors. Norms and attention weights are float32 in float64 models, too."""
    if plain is None or ours is None:
        assert ours is plain
    elif isinstance(plain, Tensor):
        assert ours.shape == plain.shape
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance, equal_nan=True)
    else:
        assert len(ours) == len(plain)
        for our, theirs in zip(ours, plain, strict=True):
            assert_same(our, theirs, tolerance)


def assert_same_cache(ours: Any, plain: Any, tolerance: float = 1e-5) -> None:
    assert len(ours.layers) == len(plain.layers)
    for our, theirs in zip(ours.layers, plain.layers, strict=True):
        assert type(our) is type(theirs)
        if isinstance(theirs, LinearAttentionLayer):
            assert_same([*our.conv_states.values()], [*theirs.conv_states.values()], tolerance)
            continue
        if theirs.keys is None:
            assert our.keys is None  # shares the keys of another layer
            continue
        assert our.get_seq_length() == theirs.get_seq_length()
        assert_same((our.keys, our.values), (theirs.keys, theirs.values), tolerance)


def prefill(target: CausalLM, ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=target.config)
    with torch.no_grad():
        target(ids, past_key_values=cache)
    return cache


STOP = {"eos_token_id": [1, 2, 3, 4, 5], "pad_token_id": 0}  # of 48 tokens, so that they are drawn sooner or later


class NoRepeat(LogitsProcessor):
    """A user's processor that depends on the prefix: never the same token twice in a row, written in place."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, input_ids[0, -1]] = float("-inf")
        return scores


def only_neighbours(_: int, input_ids: Tensor) -> list[int]:
    last = int(input_ids[-1])
    return [(last + step) % VOCAB_SIZE for step in range(1, 9)]


only_neighbours.reads_prefix_only = True  # type: ignore[attr-defined]

PROCESSORS: dict[str, dict[str, Any]] = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.7},
    "epsilon_cutoff": {"epsilon_cutoff": 0.02},
    "eta_cutoff": {"eta_cutoff": 0.02},
    "top_h": {"top_h": 0.5},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[3], [5, 7], [11, 12, 13]]},
    "sequence_bias": {"sequence_bias": {(4,): 3.0, (8, 9): -5.0}},
    "suppress_tokens": {"suppress_tokens": [1, 2, 3]},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(40))},
    "forced_eos_token_id": {"forced_eos_token_id": 7},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (10, 1.2), **STOP},
    "min_length": {"min_length": 30, **STOP},
    "min_new_tokens": {"min_new_tokens": 25, **STOP},
    "remove_invalid_values": {"remove_invalid_values": True},
    "renormalize_logits": {"renormalize_logits": True, "top_p": 0.9},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=3.0)},
    "watermark by itself": {"watermarking_config": WatermarkingConfig(bias=3.0, seeding_scheme="selfhash")},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": only_neighbours},
    "logits_processor": {"logits_processor": LogitsProcessorList([NoRepeat()])},
    "many": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "no_repeat_ngram_size": 3},
}
