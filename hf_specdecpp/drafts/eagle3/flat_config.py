"""The `config.json` of the original dialect, which vLLM, SGLang and llama.cpp read (`flat_config`)."""

from __future__ import annotations

from typing import Any

from hf_specdecpp.drafts.eagle3.description import FLAGS
from hf_specdecpp.drafts.eagle3.layer_ids import usual_reads
from hf_specdecpp.drafts.eagle3.settings import Eagle3Settings

WRITTEN = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "vocab_size", "max_position_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip


def flat_config(settings: Eagle3Settings, reads: list[int], target: Any) -> dict[str, Any]:
    """The config that describes a draft to other engines.

    What is usual is left out, since engines differ in what they understand by it. Layers that are not the usual ones
    stand there twice: in `eagle_config` by what comes out of them (SGLang), at the top by what goes into them (vLLM).

    Example: of a target of 32 layers `reads=[1, 15, 28]` is usual. `[3, 15, 28]` stands there as itself and as
    `[4, 16, 29]`.

    Args:
        settings: of a draft with Llama layers.
        reads: the target's layers whose outputs it reads.
        target: the config of the target's text model.

    Raises:
        ValueError: its layers are of another type.
    """
    if settings.layer["model_type"] != "llama":
        raise ValueError(
            f"The draft has layers of type {settings.layer['model_type']!r}, which only vLLM serves, from the "
            "repository that it was loaded from. Nothing is exported."
        )
    layer = settings.layer_config().to_dict()
    rope = dict(layer["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.pop("rope_type", "default")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: layer[name] for name in WRITTEN},
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else {"rope_type": kind, **rope},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": settings.draft_vocab_size or layer["vocab_size"],
        **{name: getattr(target, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **{name: True for name in FLAGS if getattr(settings, name)},
    }
    if settings.state_size != layer["hidden_size"]:
        config["target_hidden_size"] = settings.state_size
    if reads != usual_reads(target.num_hidden_layers):
        ids: dict[str, Any] = {"use_aux_hidden_state": bool(reads)}
        if reads:
            ids["eagle_aux_hidden_state_layer_ids"] = reads
            config["eagle_aux_hidden_state_layer_ids"] = [read + 1 for read in reads]
            config["num_aux_hidden_states"] = len(reads)
        config["eagle_config"] = ids
    return config


def notes(settings: Eagle3Settings, reads: list[int], depth: int) -> list[str]:
    """What of it some engine does not serve, in whole sentences."""
    found = []
    if reads != usual_reads(depth):
        found.append(
            f"The draft reads the outputs of layers {reads} of its target, where {usual_reads(depth)} are usual: "
            "llama.cpp, and vLLM and SGLang before 2026, read the usual ones whatever the config says, and would draft "
            "badly."
        )
    flags = [name for name in ("fc_norm", "norm_output", "norm_before_fc") if getattr(settings, name)]
    if flags:
        found.append(
            f"The draft has {' and '.join(flags)} (EAGLE-3.1): new versions of vLLM and SGLang serve that, llama.cpp "
            "and older ones do not."
        )
    return found
