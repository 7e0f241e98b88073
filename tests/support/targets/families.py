"""Tiny random models of families that need special care, each built once, and a draft that knows its text."""

from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import VOCAB_SIZE
from support.targets.zoo import KINDS, LAYERS, tiny_of

IMAGE = VOCAB_SIZE - 1  # the token that stands for a place in an image
WINDOW = 8
# Nothing ends a text, and what is said is not what was read.
OWN: dict[str, Any] = {**dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")), "tie_word_embeddings": False}
WINDOWED = {"sliding_window": WINDOW}
ZERO = dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0)
CROSS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "cross_attention_layers": [1, 3]}
CHUNKED: dict[str, Any] = {
    "attention_chunk_size": WINDOW,
    "attn_temperature_tuning": False,
    "layer_types": ["chunked_attention", "full_attention"] * (LAYERS // 2),
}
# What the zoo calls them, and what is different from it.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dory": ("text", "dory", {}),
    "ettin": ("text", "modernbert-decoder", {**WINDOWED, **ZERO}),
    "gemma3n": ("text", "gemma3n_text", WINDOWED),
    "gemma4": ("text", "gemma4_text", WINDOWED),
    "git": ("text", "git", {"pad_token_id": 0}),
    "granite4 of attention": ("text", "granitemoehybrid", {"layer_types": ["attention"] * LAYERS}),
    "granite4": ("text", "granitemoehybrid", {}),
    "lfm2": ("text", "lfm2", {}),
    "lfm3": ("text", "lfm3", {**WINDOWED, "layer_types": ["conv", "conv", "sliding_attention", "full_attention"]}),
    "llama": ("text", "llama", {}),
    "llama4": ("text", "llama4_text", CHUNKED),
    "minimax": ("text", "minimax", {}),
    "mllama": ("image", "mllama", CROSS),
    "mllama text": ("text", "mllama", CROSS),
    "mpt": ("text", "mpt", {}),
    "openai-gpt": ("text", "openai-gpt", {}),
    "paligemma": ("image", "paligemma", {}),
    "xlnet": ("text", "xlnet", {}),
}
BYTES = {
    **dict.fromkeys(("hidden_size", "hidden_size_global"), 32),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 4),
    "num_hidden_layers": 1,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 260,
}
# By class and config: what the zoo cannot build.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "blt": (
        "BltForCausalLM",
        "BltConfig",
        {
            **{f"{part}_config": BYTES for part in ("patcher", "encoder", "decoder", "global")},
            "encoder_hash_byte_group_vocab": 50,
            "encoder_hash_byte_group_size": [3, 4],
            "cross_attn_k": 1,
            "encoder_hash_byte_group_nb_functions": 1,
            "vocab_size": 260,
        },
    ),
    "imagegpt": (
        "ImageGPTForCausalImageModeling",
        "ImageGPTConfig",
        {"vocab_size": VOCAB_SIZE, "n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4},
    ),
}


@lru_cache
def model_of(family: str, attn_implementation: str | None = None) -> CausalLM:
    """A random float64 model, the same object for the same arguments: leave it as it was."""
    if family in FAMILIES:
        kind, name, changes = FAMILIES[family]
        if name not in KINDS[kind][1]:
            pytest.skip(f"transformers {transformers.__version__} does not have {name}")
        return tiny_of(name, attn_implementation, kind, **{**OWN, **changes})
    model_class, config_class, sizes = OTHERS[family]
    if not hasattr(transformers, model_class):
        pytest.skip(f"transformers {transformers.__version__} does not have {model_class}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**sizes)
        return getattr(transformers, model_class)(config).to(torch.float64).eval()


def informed_draft(text: Tensor, vocab_size: int = VOCAB_SIZE) -> CausalLM:
    """A draft that reads `text` `[1, length]` off its table of positions, and guesses every fourth token wrongly.

    Its second guess is then the right one, so that trees accept what chains do not. It works for targets of every
    family, and rejects as often as it accepts whatever they say."""
    width = vocab_size + -vocab_size % 4
    config = GPT2Config(vocab_size=vocab_size, n_embd=width, n_layer=1, n_head=4, n_positions=512, bos_token_id=None,
                        eos_token_id=None, tie_word_embeddings=False)  # fmt: skip
    draft = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
        draft.lm_head.weight.copy_(torch.eye(vocab_size, width))
        draft.transformer.ln_f.weight.fill_(1.0)
        for place, token in enumerate(text[0, 1:].tolist()):
            guesses = [token, (token + 5) % vocab_size, (token + 9) % vocab_size]
            if place % 4 == 0:
                guesses[:2] = reversed(guesses[:2])
            for guess, weight in zip(guesses, (1.0, 0.6, 0.3), strict=True):
                draft.transformer.wpe.weight[place, guess] += weight
    return draft
