"""Tiny random models of families that need special care, each built once, and a draft that knows its text."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from hf_specdecpp.models.causal_lm import CausalLM

VOCAB_SIZE = 48
IMAGE = VOCAB_SIZE - 1  # the token that stands for a place in an image
LAYERS = 4
WINDOW = 8
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
GPT_SIZES = {"vocab_size": VOCAB_SIZE, "n_positions": 512, "n_embd": 32, "n_layer": 2, "n_head": 4}
VISION = {**dict.fromkeys(("hidden_size", "intermediate_size"), 32), "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8}  # four places an image
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
COHERE2 = {"model_type": "cohere2", **SIZES, "sliding_window": WINDOW, "layer_types": MIXED}
MISTRAL = {"model_type": "mistral", **SIZES, "sliding_window": WINDOW}
WINDOWED = {"head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB_SIZE, "hidden_size_per_layer_input": 8}
GRANITE4 = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 48}
PERCEIVER = {"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
MLLAMA_VISION = {
    "hidden_size": 32,
    "attention_heads": 4,
    "num_hidden_layers": 1,
    "num_global_layers": 1,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 8,
    "max_num_tiles": 1,
    "intermediate_layers_indices": [0],
    "supported_aspect_ratios": [[1, 1]],
    "vision_output_dim": 64,
}
MLLAMA_TEXT = {
    **SIZES,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "cross_attention_layers": [1, 3],
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BYTES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 1,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 260,
    "max_position_embeddings": 512,
    "hidden_size_global": 32,
}
# The class of the model, that of its config, and its sizes.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "aya vision": (
        "AyaVisionForConditionalGeneration",
        "AyaVisionConfig",
        {"text_config": COHERE2, "vision_config": SIGLIP, "image_token_index": IMAGE, "downsample_factor": 1},
    ),
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
    "cohere2 vision": (
        "Cohere2VisionForConditionalGeneration",
        "Cohere2VisionConfig",
        {
            "text_config": COHERE2,
            "vision_config": SIGLIP,
            "image_token_id": IMAGE,
            "downsample_factor": 1,
            "alignment_intermediate_size": 64,
        },
    ),
    "ettin": (
        "ModernBertDecoderForCausalLM",
        "ModernBertDecoderConfig",
        {
            **SIZES,
            "sliding_window": WINDOW,
            "layer_types": MIXED,
            **dict.fromkeys(("pad_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0),
        },
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        {**SIZES, **WINDOWED, **PER_LAYER, "laurel_rank": 8, "altup_num_inputs": 2, "num_kv_shared_layers": 2},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {**SIZES, **WINDOWED, **PER_LAYER, "global_head_dim": 8, "num_kv_shared_layers": 0},
    ),
    "git": ("GitForCausalLM", "GitConfig", {**SIZES, "pad_token_id": 0, "vision_config": VISION}),
    "granite4 of attention": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**SIZES, **GRANITE4, "layer_types": ["attention"] * LAYERS, "mamba_n_heads": 8},
    ),
    "granite4": (
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        {**SIZES, **GRANITE4, "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8},
    ),
    "idefics2": (
        "Idefics2ForConditionalGeneration",
        "Idefics2Config",
        {
            "text_config": MISTRAL,
            "vision_config": VISION,
            "image_token_id": IMAGE,
            "perceiver_config": {"hidden_size": 32, "num_key_value_heads": 1, **PERCEIVER},
        },
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        {"text_config": MISTRAL, "vision_config": VISION, "image_token_id": IMAGE, "scale_factor": 1},
    ),
    "imagegpt": ("ImageGPTForCausalImageModeling", "ImageGPTConfig", GPT_SIZES),
    "lfm2": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {**SIZES, "layer_types": ["conv", "full_attention"] * 2, "block_auto_adjust_ff_dim": False},
    ),
    "lfm3": (
        "Lfm3ForCausalLM",
        "Lfm3Config",
        {
            **SIZES,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["conv", "conv", "sliding_attention", "full_attention"],
        },
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **SIZES,
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": WINDOW,
            "attn_temperature_tuning": False,
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
    "minimax": (
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        {**SIZES, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "block_size": 4},
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {"vision_config": MLLAMA_VISION, "text_config": MLLAMA_TEXT, "image_token_index": IMAGE},
    ),
    "mllama text": ("MllamaForCausalLM", "MllamaTextConfig", MLLAMA_TEXT),
    "mpt": (
        "MptForCausalLM",
        "MptConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 512},
    ),
    "openai-gpt": ("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", GPT_SIZES),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        {
            "text_config": {"model_type": "gemma", **SIZES, "head_dim": 8},
            "image_token_id": IMAGE,
            "vision_config": {**SIGLIP, "projection_dim": 32},
            "projection_dim": 32,
            "hidden_size": 32,
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        {"text_config": MISTRAL, "vision_config": VISION, "image_token_id": IMAGE, "scale_factor": 1},
    ),
    "xlnet": (
        "XLNetLMHeadModel",
        "XLNetConfig",
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
    ),
}


@lru_cache
def model_of(family: str, attn_implementation: str | None = None) -> CausalLM:
    """A random float64 model, the same object for the same arguments: leave it as it was."""
    model_class, config_class, sizes = FAMILIES[family]
    if not hasattr(transformers, model_class):
        pytest.skip(f"transformers {transformers.__version__} does not have {model_class}")
    config = getattr(transformers, config_class)(**copy.deepcopy(sizes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, model_class)._from_config(
            config, attn_implementation=attn_implementation, experts_implementation="eager"
        )
    return model.to(torch.float64).eval()


def informed_draft(text: Tensor, vocab_size: int = VOCAB_SIZE) -> CausalLM:
    """A draft that reads `text` `[1, length]` off its table of positions, and guesses every fourth token wrongly.

    Its second guess is then the right one, so that trees accept what chains do not. It works for targets of every
    family, and rejects as often as it accepts whatever they say.
    """
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
