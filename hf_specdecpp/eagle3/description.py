"""Read the `config.json` of an EAGLE-3 checkpoint, in either dialect (`read_description`), and refuse its relatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_specdecpp.eagle3.settings import LAYER_CONFIGS

SPECULATORS = "speculators_model_type"
DEFAULT_THETA = 10000.0  # of the original code, whatever the target's is
COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "mlp_bias",
)  # fmt: skip
COPIED_OF_QWEN3 = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TRAIN = "Train a draft of this package for the target (specdecpp train), or look for an EAGLE-3 head of it"


@dataclass(frozen=True)
class Description:
    """What a checkpoint's config says, before its tensors are looked at.

    Attributes:
        layer: as in `Eagle3Settings`, without the number of layers, which tensors tell.
        ids: of the target's layers, as they stand there; `None` for the usual ones.
        reads: the layers that these mean, where somebody says so, or where the dialect does.
        reads_states: whether outputs of layers are read, or the final state alone.
        flags: those of `FLAGS` that are set, and `fc_bias`.
        state_size: of the target.
        draft_vocab_size: `None` for all tokens.
        target_id: the target that it names, if it does.
    """

    layer: dict[str, Any]
    ids: list[int] | None
    reads: list[int] | None
    reads_states: bool
    flags: dict[str, bool]
    state_size: int
    draft_vocab_size: int | None
    target_id: str | None


def looks_like_one(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of an EAGLE-3 checkpoint, or of a relative that is refused by name.

    Of EAGLE's own first drafts it says nothing but that a Llama has one layer.
    """
    if raw.get("model_type") == "specdecpp" or "draft_kind" in raw:  # of ours, or a damaged one of ours
        return False
    names = " ".join(map(str, raw.get("architectures") or [])).lower()
    marks = {SPECULATORS, "draft_vocab_size", "eagle_config", "medusa_num_heads", "hydra_num_heads"}
    is_small_llama = raw.get("model_type") in LAYER_CONFIGS and raw.get("num_hidden_layers") == 1
    return bool(marks & set(raw)) or any(name in names for name in ("eagle", "medusa", "hydra")) or is_small_llama


def read_description(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> Description:
    """What a `config.json` says.

    Args:
        overrides: of its values: those of `FLAGS`, `rope_theta`, and `reads`, the target's layers whose outputs are
            read, counted from 0.

    Raises:
        ValueError: it is of a relative that is not supported, or a value is missing or makes no sense.
    """
    overrides = overrides or {}
    if unknown := sorted(set(overrides) - {*FLAGS, "rope_theta", "reads"}):
        raise ValueError(
            f"eagle3 has {', '.join(unknown)}, which is not known. It may have {', '.join(FLAGS)}, rope_theta and "
            "reads."
        )
    _refuse_relatives(raw)
    is_nested = SPECULATORS in raw
    inner: Mapping[str, Any] = raw.get("transformer_layer_config") or {} if is_nested else raw
    if not isinstance(inner, Mapping) or (missing := [name for name in NEEDED if type(inner.get(name)) is not int]):
        where = "its transformer_layer_config" if is_nested else "it"
        raise ValueError(
            f"The config.json is of an EAGLE-3 draft, but {where} lacks whole numbers for {', '.join(missing)}. "
            "Download it again."
        )
    eagle = raw.get("eagle_config") or {}
    said = {"fc_norm": raw.get("use_aux_norm"), **raw, **eagle, **overrides}  # the former is an older name
    flags = {name: bool(said.get(name)) for name in FLAGS}
    ids = eagle.get("eagle_aux_hidden_state_layer_ids", raw.get("eagle_aux_hidden_state_layer_ids"))
    if ids is not None and not (isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids)):
        raise ValueError(f"eagle_aux_hidden_state_layer_ids={ids!r} must list layers of the target, or be left out.")
    if is_nested and ids and 0 in ids:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={ids}: 0 is the target's embeddings in this dialect, and "
            f"hf_specdecpp reads outputs of layers. {TRAIN}."
        )
    reads = overrides.get("reads")
    if reads is None and is_nested and ids and ids[0] > 1:  # else it may be a converted checkpoint with its own ids
        reads = [each - 1 for each in ids]
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    return Description(
        layer=_layer(inner, "qwen3" if is_nested else "llama", overrides.get("rope_theta")),
        ids=ids,
        reads=reads,
        reads_states=eagle.get("use_aux_hidden_state", raw.get("use_aux_hidden_state")) is not False,
        flags={**flags, "fc_bias": bool(raw.get("bias", False))},
        state_size=raw.get("target_hidden_size") or inner["hidden_size"],
        draft_vocab_size=raw.get("draft_vocab_size"),
        target_id=verifier.get("name_or_path"),
    )


def _layer(inner: Mapping[str, Any], default: str, theta: float | None) -> dict[str, Any]:
    """The config of the draft's layers. Its frequencies are its own: a target's would be wrong."""
    kind = inner.get("model_type") or default
    if kind not in LAYER_CONFIGS:
        raise ValueError(
            f"The draft has layers of type {kind!r}; EAGLE-3 drafts with 'llama' and 'qwen3' layers are supported. "
            f"{TRAIN}."
        )
    copied = COPIED + (COPIED_OF_QWEN3 if kind == "qwen3" else ())
    layer = {name: inner[name] for name in copied if inner.get(name) is not None}
    if kind == "llama" and "sliding_attention" in (inner.get("layer_types") or []):
        raise ValueError("The draft is a Llama layer with a sliding window, which transformers' Llama does not have.")
    rope = dict(inner.get("rope_parameters") or inner.get("rope_scaling") or {})
    found = theta or rope.pop("rope_theta", None) or inner.get("rope_theta") or DEFAULT_THETA
    kind_of_rope = rope.pop("type", None) or rope.pop("rope_type", None) or "default"
    rope.pop("rope_type", None)
    if (rope.get("partial_rotary_factor") or inner.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ValueError("The draft rotates a part of each head only (partial_rotary_factor), which is not supported.")
    if kind_of_rope in ("mrope", "default") or "mrope_section" in rope:
        rope, kind_of_rope = {}, "default"  # a draft's positions are those of text
    return {"model_type": kind, **layer, "rope_parameters": {"rope_type": kind_of_rope, "rope_theta": found, **rope}}


def _refuse_relatives(raw: Mapping[str, Any]) -> None:
    """Raise `ValueError` for other drafts that such a config may be of."""
    names = " ".join(map(str, raw.get("architectures") or []))
    found = None
    if (kind := raw.get(SPECULATORS, "eagle3")) != "eagle3":
        found = {"peagle": "P-EAGLE"}.get(str(kind), f"a {kind} draft of speculators")
    elif "medusa_num_heads" in raw or "medusa" in names.lower():
        found = "Medusa heads"
    elif "hydra_num_heads" in raw or "hydra" in names.lower():
        found = "Hydra heads"
    elif raw.get("parallel_drafting") or "mask_token_id" in raw or "ptd_token_id" in raw or "pard_token" in raw:
        found = "P-EAGLE"
    elif "Deepseek" in names or "kv_lora_rank" in raw or "MLA" in names:
        found = "an EAGLE-3 draft with an MLA layer (DeepSeek's attention)"
    if found is not None:
        raise ValueError(f"This repository holds {found}, which hf_specdecpp cannot draft with. {TRAIN}.")
