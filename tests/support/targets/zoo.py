"""A tiny random model of every family of causal LMs, and of models that read images beside text, that transformers
knows and that generic sizes suffice to build."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import VOCAB_SIZE

LAYERS, MOST_PARAMETERS = 4, 20_000_000
FLOAT32 = {"kosmos-2", "xglm", "xlnet", "xlstm"}  # which do not compute in float64
WINDOW = 12  # of every kind of window; longer than what `check_tree` tries on the model itself
SIZES: dict[str, Any] = {  # by all names that families have for them
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embed_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("intermediate_size", "d_ff", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "rotary_dim"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("laurel_rank", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "altup_num_inputs", "max_window_layers"), 2),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 512),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), WINDOW),
    **dict.fromkeys(("use_sliding_window", "is_decoder"), True),
    **dict.fromkeys(("alibi", "new_decoder_architecture"), False),
    **dict.fromkeys(("initializer_range", "init_std"), 0.2),
    "attention_types": [[["global", "local"], 2]],  # GPT-Neo
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family needs besides, or instead.
MIXED = ["sliding_attention", "full_attention"] * (LAYERS // 2)
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
CHUNKS = {"mamba_chunk_size": 8}  # to which each pass is filled up; by default 256 tokens
EQUAL_HEADS = {"num_key_value_heads": 4}  # of multi-head latent attention
KIMI = {
    **EQUAL_HEADS,
    **dict.fromkeys(("linear_head_dim", "linear_key_head_dim", "linear_value_head_dim"), 8),
    "linear_num_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
}
MULTI_HEAD_LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "glm4_moe_lite", "glm_moe_dsa",
    "minicpm3", "mistral_large4_text", "sarvam_mla", "youtu",
)  # fmt: skip
MROPE = {  # positions in several dimensions
    "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
    "partial_rotary_factor": 1.0,
}
WITH_MROPE = (
    "glm4v_moe_text", "glm4v_text", "glm_ocr_text", "glmga_text", "paddleocr_vl_text", "qwen2_5_omni_text",
    "qwen2_5_vl_text", "qwen2_vl_text",
)  # fmt: skip
PERCEIVER = {"resampler_n_latents": 2, "resampler_depth": 1, "resampler_n_heads": 2, "resampler_head_dim": 8}
AROUND = {"vision_start_token_id": VOCAB_SIZE - 4, "vision_end_token_id": VOCAB_SIZE - 5}  # an image
SPECIAL: dict[str, dict[str, Any]] = {
    **dict.fromkeys(WITH_MROPE, MROPE),
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), AROUND),
    **dict.fromkeys(MULTI_HEAD_LATENT, EQUAL_HEADS),
    "aya_vision": {"downsample_factor": 1},
    "cohere2_vision": {"downsample_factor": 1, "alignment_intermediate_size": 64},
    "idefics2": {"perceiver_config": {"hidden_size": 32, "num_key_value_heads": 1, **PERCEIVER}},
    **dict.fromkeys(("idefics3", "smolvlm"), {"scale_factor": 1}),
    "paligemma": {"projection_dim": 32},
    "big_bird": {"block_size": 2, "num_random_blocks": 1, "attention_type": "block_sparse"},
    "bailing_hybrid": {**KIMI, "n_group": 1, "num_local_experts": 4, "num_experts_per_tok": 2},
    "bamba": {**MAMBA, **CHUNKS, "attn_layer_indices": [1, 3]},
    "doge": {"keep_window_size": WINDOW},
    "dory": {"n_input_layers": 1, "n_recurrent_layers": LAYERS - 2, "n_output_layers": 1},
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
    "kimi_linear": {**KIMI, "num_experts_per_token": 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "llama4_text": {"floor_scale": WINDOW, "intermediate_size_mlp": 48},
    "longcat_flash": {**EQUAL_HEADS, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 24, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "chunk_size": 8},
    "minimax_m3_vl_text": {"index_block_size": 2, "index_topk_blocks": 2, "index_head_dim": 8},
    "modernbert-decoder": {"layer_types": MIXED},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid"] * LAYERS},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * (LAYERS // 2), **MAMBA},
}
# Beside the sizes of a text model: tokens that stand for an image, a video or a sound.
PLACEHOLDERS = {
    f"{kind}_token_{name}": VOCAB_SIZE - place
    for place, kind in enumerate(("image", "video", "audio"), start=1)
    for name in ("id", "index")
}
TEXT = {"text_config", "llm_config", "decoder_config", "language_config", "thinker_config"}
OTHER: dict[str, Any] = {  # of the parts that read images and sound
    **dict.fromkeys(("hidden_size", "intermediate_size", "embed_dim", "projection_dim", "out_hidden_size"), 32),
    **dict.fromkeys(("d_model", "encoder_ffn_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "depth", "layers", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "num_heads", "encoder_attention_heads"), 4),
    "head_dim": 8,
    "image_size": 16,
    "patch_size": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 64,
}
# By kind and name: what is not built, or does not generate, and why.
NOT_BUILT: dict[str, str] = {
    **dict.fromkeys(
        (
            "image apertus1p5", "image chameleon", "image cohere_compass", "image deepseek_ocr2", "image dots3_note",
            "image emu3", "image ernie4_5_vl_moe", "image florence2", "image glm5_next", "image granite4_vision",
            "image hunyuan_vl", "image inkling2", "image inkling2_loop", "image mistral4", "image molmo2",
            "image muse_spark", "image nemotron_h_omni", "image qwen4_exp", "text cohere_compass_text", "text dbrx",
            "text dots3_note", "text gemma4_assistant", "text musicgen", "text musicgen_melody", "text qwen4_exp",
            "text qwen4_exp_text", "text reformer", "text xlstm", "text zamba",
        ),
        "its sizes have to agree with one another in a way that generic ones do not",
    ),
    **dict.fromkeys(
        (
            "image inkling_mm_model", "image janus", "image muse_glimmer", "text blt", "text dots3_note_text",
            "text inkling2_loop_text", "text inkling2_text",
        ),
        "it is large, or has another vocabulary, by sizes that have names of their own",
    ),
    **dict.fromkeys(("image fast_vlm", "image perception_lm", "text gemma3n"), "it needs timm"),
    **dict.fromkeys(
        (
            "image blip", "image idefics", "image instructblip", "image instructblipvideo", "image pix2struct",
            "image pp_formulanet", "image udop", "image vision-encoder-decoder", "text gemma4_unified_assistant",
        ),
        "it does not generate from a text alone",
    ),
    **dict.fromkeys(("image diffusion_gemma", "image pi0"), "it does not generate token by token"),
    "image evolla": "the Auto class does not take its config",
    "image llama4": "transformers' own forward fails",
}  # fmt: skip
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "text": (AutoModelForCausalLM, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image": (AutoModelForImageTextToText, modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}


def families(kind: str = "text") -> list[str]:
    """Those of causal LMs, or of models that read images and are no causal LMs by name."""
    known = {name: str(classes) for name, classes in KINDS[kind][1].items()}
    return sorted(name for name in known if kind == "text" or known[name] not in map(str, KINDS["text"][1].values()))


def tiny_config(family: str, **overrides: Any) -> Any:
    """A config of tiny sizes: of the generic ones, those that the family's default config knows."""
    config_class: Any = CONFIG_MAPPING[family]
    return config_class(**_sizes(config_class, SIZES, overrides))


def _sizes(config_class: Any, sizes: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """What a config is made of, and the configs inside it; `overrides` belong to its text model."""
    default = config_class()
    known = default.to_dict()
    parts = {name: getattr(default, name, None) for name in getattr(config_class, "sub_configs", {})}
    parts = {name: part for name, part in parts.items() if isinstance(part, PreTrainedConfig)}
    chosen = {name: value for name, value in {**PLACEHOLDERS, **sizes}.items() if name in known}
    if (known.get("rope_parameters") or {}).get("mrope_section"):
        chosen["rope_parameters"] = {**known["rope_parameters"], "mrope_section": [1, 1, 2]}
    if has_text := bool(TEXT & set(parts)):
        chosen = {name: value for name, value in chosen.items() if name not in ("hidden_size", "initializer_range")}
    for name, part in parts.items():
        is_text = name in TEXT
        inner = _sizes(type(part), SIZES if is_text else OTHER, overrides if is_text else {})
        kind: Any = part
        chosen[name] = {**inner, "model_type": kind.model_type}
    if sizes is OTHER:
        return chosen
    return {**chosen, **SPECIAL.get(config_class.model_type, {}), **({} if has_text else overrides)}


def tiny_of(family: str, attn_implementation: str | None = None, kind: str = "text", **overrides: Any) -> CausalLM:
    """A random float64 model. Raises whatever its family raises if it cannot be built."""
    config, auto = tiny_config(family, **overrides), KINDS[kind][0]
    options = {"attn_implementation": attn_implementation, "experts_implementation": "eager"}
    with torch.device("meta"):
        size = auto.from_config(config, **options).num_parameters()
    if size > MOST_PARAMETERS:
        raise ValueError(f"{size} parameters")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = auto.from_config(config, **options)
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")  # X-MOD
    return model.to(torch.float32 if family in FLOAT32 else torch.float64).eval()
