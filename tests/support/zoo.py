"""A tiny random model of every causal LM family that transformers knows and that generic sizes suffice to build."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdecpp.models.causal_lm import CausalLM
from support.models import VOCAB_SIZE

LAYERS = 4
WINDOW = 12  # of every kind of window; longer than what `check_tree` tries on the model itself
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_chunk_size": WINDOW,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "is_decoder": True,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "decoder_layers": LAYERS,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "n_embd": 32,
    "n_layer": LAYERS,
    "n_layers": LAYERS,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 512,
    "n_ctx": 512,
    "rotary_dim": 4,
    "num_layers": LAYERS,
    "attention_types": [[["global", "local"], 2]],  # GPT-Neo
    "window_size": WINDOW,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "alibi": False,
    "new_decoder_architecture": False,
}
# What a family needs besides, or instead.
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
CHUNKS = {"mamba_chunk_size": 8}  # to which each pass is filled up; by default 256 tokens
EQUAL_HEADS = {"num_key_value_heads": 4}  # of multi-head latent attention
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"), EQUAL_HEADS),
    "big_bird": {"block_size": 2, "num_random_blocks": 1, "attention_type": "block_sparse"},
    "bamba": {**MAMBA, **CHUNKS, "attn_layer_indices": [1, 3]},
    "cohere_compass_text": {"layer_types": MIXED},
    "doge": {"keep_window_size": WINDOW},
    "dots1": {**EQUAL_HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "ernie4_5_moe": {"moe_k": 2},
    "falcon": {"num_ln_in_parallel_attn": None},
    "falcon_h1": {**MAMBA, **CHUNKS, "mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 2, "layer_types": MIXED},
    "gemma4_text": {
        "layer_types": MIXED,
        "num_kv_shared_layers": 0,
        "num_experts": None,
        "moe_intermediate_size": None,
    },
    "gemma4_unified_text": {"layer_types": MIXED},
    "granitemoehybrid": {
        **MAMBA,
        **CHUNKS,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"] * (LAYERS // 2),
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {**EQUAL_HEADS, "linear_head_dim": 8, "linear_num_heads": 4, "num_experts_per_token": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "llama4_text": {"floor_scale": WINDOW, "intermediate_size_mlp": 48},
    "longcat_flash": {**EQUAL_HEADS, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 8},
    "minimax_m3_vl_text": {"index_block_size": 2, "index_topk_blocks": 2, "index_head_dim": 8},
    "modernbert-decoder": {"layer_types": MIXED},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * LAYERS},
    "zamba2": {"layer_types": ["mamba", "hybrid"] * (LAYERS // 2), **MAMBA},
}
# Minutes to build or gigabytes in memory, because their sizes sit in further configs inside the config.
HUGE = {"blt", "git", "phi4_multimodal", "xlm", "roc_bert", "cpmant", "gemma3"}


def families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **overrides: Any) -> Any:
    """A config of tiny sizes: of the generic ones, those that the family's default config knows."""
    config_class: Any = CONFIG_MAPPING[family]
    known = set(config_class().to_dict())
    text = getattr(config_class, "sub_configs", {}).get("text_config")
    if text is not None and "text_config" in known:
        inner = {name: value for name, value in SIZES.items() if name in text().to_dict()}
        return config_class(text_config={**inner, **SPECIAL.get(family, {}), **overrides})
    sizes = {name: value for name, value in SIZES.items() if name in known}
    return config_class(**{**sizes, **SPECIAL.get(family, {}), **overrides})


def tiny_of(family: str, attn_implementation: str | None = None, **overrides: Any) -> CausalLM:
    """A random float64 model. Raises whatever its family raises if it cannot be built."""
    if family in HUGE:
        raise ValueError("too large")
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attn_implementation, experts_implementation="eager"
        )
        if model.num_parameters() > 3_000_000:
            raise ValueError(f"{model.num_parameters()} parameters")
        if hasattr(model, "set_default_language"):
            model.set_default_language("en_XX")  # X-MOD
    return model.to(torch.float64).eval()
