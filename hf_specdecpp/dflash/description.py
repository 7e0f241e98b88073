"""Read the `config.json` of a DFlash checkpoint, in each of three dialects (`read_settings`), and refuse relatives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hf_specdecpp.config.bounds import LAYER, check_fields
from hf_specdecpp.config.foreign import SPECULATORS, is_ours, rotary_parameters
from hf_specdecpp.dflash.settings import BOUNDS, NOT_NEGATIVE, DFlashSettings

TRANSFORMERS = "muse_glimmer_assistant"
COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "attention_bias", "layer_types",
    "sliding_window", "use_sliding_window", "max_window_layers",
)  # fmt: skip
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
NUMBERS = {
    **{name: BOUNDS[name] for name in ("block_size", "mask_token_id", "output_multiplier", "num_target_layers")},
    **dict.fromkeys(("input_embedding_scale", "final_logit_softcapping"), NOT_NEGATIVE),
}
OF_TRANSFORMERS = {"block_size", "mask_token_id", "target_layer_ids"}
INSTEAD = "Load a DFlash or EAGLE-3 draft of this target, or train a draft of this package (specdecpp train)"


def looks_like_one(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a DFlash checkpoint, or of a relative that is refused by name."""
    if is_ours(raw):
        return False
    names = f"{raw.get('architectures')} {raw.get(SPECULATORS)}".lower()
    return "dflash_config" in raw or "dflash" in names or "dspark" in names or set(raw) >= OF_TRANSFORMERS


def read_settings(raw: Mapping[str, Any]) -> DFlashSettings:
    """What a `config.json` says: the original dialect (z-lab), that of transformers, or that of speculators.

    Ids of layers count what comes out of them, from 0; those of speculators are one higher.

    Raises:
        ValueError: it is of a relative that is not supported, or a value is missing or makes no sense.
    """
    refuse_relatives(raw)
    is_nested, is_theirs = SPECULATORS in raw, raw.get("model_type") == TRANSFORMERS
    layers = raw.get("transformer_layer_config") if is_nested else raw
    own = raw.get("dflash_config") or {}
    if not isinstance(layers, Mapping) or not isinstance(own, Mapping):
        raise ValueError("The config.json of this DFlash draft lacks what describes its layers. Download it again.")
    said = {**raw, **own}
    check_fields({name: said.get(name) for name in NUMBERS}, NUMBERS)
    layer = _layer(layers, is_theirs)
    ids = said.get("aux_hidden_state_layer_ids" if is_nested else "target_layer_ids")
    for name, value in {"block_size": said.get("block_size"), "mask_token_id": said.get("mask_token_id"),
                        **{name: layers.get(name) for name in NEEDED}}.items():  # fmt: skip
        if type(value) is not int:
            raise ValueError(
                f"The config.json of this DFlash draft has {name}={value!r}, which must be a whole number. Download it "
                "again, or ask who made it."
            )
    if ids is None and not is_nested:
        ids = usual_reads(said.get("num_target_layers"), layers["num_hidden_layers"])
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < is_nested for each in ids):
        raise ValueError(f"The draft reads layers {ids!r} of its target; they must be listed as whole numbers.")
    if is_nested and raw.get("draft_vocab_size") not in (None, layers.get("vocab_size")):
        raise ValueError(
            f"The draft proposes {raw['draft_vocab_size']} of {layers.get('vocab_size')} tokens (draft_vocab_size) "
            f"with an LM head of its own, which hf_specdecpp does not read in DFlash drafts. {INSTEAD}."
        )
    causal = False if is_theirs or raw.get("sliding_window_non_causal") else raw.get("is_causal")
    return DFlashSettings(
        layer=layer,
        reads=[each - is_nested for each in ids],
        block_size=said["block_size"],
        mask_token_id=said["mask_token_id"],
        embedding_scale=_number(said, "input_embedding_scale", 1.0),
        output_multiplier=_number(said, "output_multiplier", 1.0),
        logit_cap=_number(said, "final_logit_softcapping", 0.0) or None,
        scales_as_target=is_theirs,
        is_causal=None if causal is None else bool(causal),
        includes_window=is_theirs,
        samples_anchor=bool(said.get("sample_from_anchor")),
        reads_normed=not is_nested,
        num_target_layers=said.get("num_target_layers"),
    )


def usual_reads(depth: Any, num_layers: int) -> list[int] | None:
    """The layers that are read where a config names none: one for each of the draft's, evenly from 1 to depth - 3.

    Example: a draft of 5 layers reads the layers 1, 9, 17, 25 and 33 of 36, one of a single layer the layer 18.
    """
    if type(depth) is not int:
        return None
    if num_layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (num_layers - 1)) for i in range(num_layers)]


def _number(said: Mapping[str, Any], name: str, default: float) -> float:
    value = said.get(name)
    return default if value is None else float(value)


def _layer(layers: Mapping[str, Any], has_windows: bool) -> dict[str, Any]:
    """The config of the draft's layers."""
    kind = layers.get("model_type", "qwen3")
    if kind not in ("qwen3", TRANSFORMERS):
        raise ValueError(
            f"The draft has layers of type {kind!r}; DFlash drafts with 'qwen3' layers are read. {INSTEAD}."
        )
    layer = {name: layers[name] for name in COPIED if layers.get(name) is not None}
    if has_windows:
        layer["use_sliding_window"] = True
    layer["rope_parameters"] = rotary_parameters(layers, f"{INSTEAD}.")
    check_fields(layer, LAYER)
    return layer


def refuse_relatives(raw: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> None:
    """Raise `ValueError` for other drafts, by their config, or by the names of their tensors."""
    names = f"{raw.get('architectures')} {raw.get(SPECULATORS)}".lower()
    own, held = raw.get("dflash_config") or {}, " ".join(tensors or {})
    found = None
    if "dspark" in names or "markov_rank" in raw or "markov_rank" in own or "markov_" in held:
        found = "DSpark, whose candidates depend on one another (a Markov head)"
    elif "dflash2" in names or "selector_rank" in own or "candidate_selector" in held or "_conv." in held:
        found = "DFlash2, whose candidates are selected one after another"
    elif raw.get(SPECULATORS, "dflash") != "dflash":
        found = f"a {raw[SPECULATORS]} draft of speculators"
    elif "mask_hidden" in held:
        found = "P-EAGLE"
    if found is not None:
        raise ValueError(f"This repository holds {found}, which hf_specdecpp cannot draft with. {INSTEAD}.")
