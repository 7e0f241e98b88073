"""Tiny models that read images or sound beside text, and one prompt for each."""

import copy
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.families import IMAGE, WINDOW
from support.targets.models import COMMON, ROTARY, prompt
from support.targets.zoo import LAYERS, MIXED

SIZES: dict[str, Any] = {**COMMON, **ROTARY, "num_hidden_layers": LAYERS, "max_position_embeddings": 512}
VISION = {**dict.fromkeys(("hidden_size", "intermediate_size"), 32), "num_hidden_layers": 1, "num_attention_heads": 4}
VISION |= {"image_size": 16, "patch_size": 8}  # four places an image
SIGLIP = {"model_type": "siglip_vision_model", **VISION}
VIDEO, BEGIN, END = 46, 45, 44  # ids of further placeholders, and around an image
LLAMA, QWEN2 = {"model_type": "llama", **SIZES}, {"model_type": "qwen2", **SIZES}
# Positions in several dimensions (mrope).
TEXT = {**SIZES, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}
PATCHES = {
    "depth": 2, "embed_dim": 32, "hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 4,
    "mlp_ratio": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "in_channels": 3,
    "image_size": 16, "window_size": 8, "fullatt_block_indexes": [1], "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}  # fmt: skip
PLACEHOLDERS = {"image_token_id": IMAGE, "video_token_id": VIDEO}
AROUND = {"vision_start_token_id": BEGIN, "vision_end_token_id": END}
SOUND = {"num_mel_bins": 8, "max_source_positions": 16}


def _features(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _ids(places: int, around: bool = False) -> Tensor:
    """A prompt whose first tokens stand for an image or a sound."""
    text = prompt(12)
    text = text.where(text < END, text - 10)  # without placeholders
    media = [BEGIN, *[IMAGE] * places, END] if around else [IMAGE] * places
    return torch.cat((torch.tensor([media]), text), dim=1)


def _image() -> dict[str, Tensor]:
    return {"input_ids": _ids(4), "pixel_values": _features(1, 3, 16, 16)}


def _patches() -> dict[str, Tensor]:
    ids, grid = _ids(4, around=True), torch.tensor([[1, 4, 4]])
    return {"input_ids": ids, "pixel_values": _features(16, 96), "image_grid_thw": grid,
            "mm_token_type_ids": (ids == IMAGE).int()}  # fmt: skip


# How names of its classes begin, its sizes, and its prompt.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "gemma3": (
        "Gemma3",
        {"text_config": {**SIZES, "head_dim": 8, "sliding_window": WINDOW, "layer_types": MIXED},
         "vision_config": SIGLIP, "image_token_index": IMAGE, "mm_tokens_per_image": 4, "boi_token_index": BEGIN,
         "eoi_token_index": END},
        {**_image(), "token_type_ids": (_ids(4) == IMAGE).long()},
    ),
    "glm4v": (
        "Glm4v",
        {"text_config": TEXT, "vision_config": PATCHES, **PLACEHOLDERS, "image_start_token_id": BEGIN,
         "image_end_token_id": END, "video_start_token_id": 43, "video_end_token_id": 42},
        _patches(),
    ),
    "internvl": (
        "InternVL",
        {"text_config": QWEN2, "vision_config": {**VISION, "image_size": [16, 16], "patch_size": [4, 4]},
         "image_token_id": IMAGE, "downsample_ratio": 0.5},
        _image(),
    ),
    "llava": (
        "Llava",
        {"text_config": LLAMA, "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 32},
         "image_token_index": IMAGE, "vision_feature_layer": -1, "vision_feature_select_strategy": "default"},
        _image(),
    ),
    "mistral3": (
        "Mistral3",
        {"text_config": {"model_type": "mistral", **SIZES, "head_dim": 8, "sliding_window": None},
         "vision_config": {"model_type": "pixtral", **VISION, "head_dim": 8}, "image_token_index": IMAGE,
         "spatial_merge_size": 1, "vision_feature_layer": -1},
        {**_image(), "image_sizes": torch.tensor([[16, 16]])},
    ),
    "qwen2 audio": (
        "Qwen2Audio",
        {"text_config": QWEN2, "audio_token_index": IMAGE,
         "audio_config": {"model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 1,
                          "encoder_attention_heads": 4, "encoder_ffn_dim": 32, **SOUND}},
        {"input_ids": _ids(8), "input_features": _features(1, 8, 32),
         "feature_attention_mask": torch.ones(1, 32, dtype=torch.long)},
    ),
    **{
        name: (base, {"text_config": text, "vision_config": PATCHES, **PLACEHOLDERS, **AROUND}, _patches())
        for name, base, text in (
            ("qwen2 vl", "Qwen2VL", TEXT),
            ("qwen2.5 vl", "Qwen2_5_VL", TEXT),
            ("qwen3 vl", "Qwen3VL", {**TEXT, "head_dim": 8}),
        )
    },
    "voxtral": (
        "Voxtral",
        {"text_config": {**LLAMA, "head_dim": 8}, "audio_token_id": IMAGE,
         "audio_config": {"model_type": "voxtral_encoder", "hidden_size": 32, "num_hidden_layers": 1,
                          "num_attention_heads": 4, "intermediate_size": 128, **SOUND}},
        {"input_ids": _ids(4), "input_features": _features(1, 8, 32)},
    ),
}  # fmt: skip


def multimodal(name: str) -> tuple[CausalLM, dict[str, Tensor]]:
    """A random float64 model, and a prompt with an image or a sound."""
    base, sizes, inputs = MODELS[name]
    config = getattr(transformers, f"{base}Config")(**copy.deepcopy(sizes))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{base}ForConditionalGeneration")._from_config(config)
    inputs = {**inputs, "attention_mask": torch.ones_like(inputs["input_ids"])}
    return model.to(torch.float64).eval(), inputs
