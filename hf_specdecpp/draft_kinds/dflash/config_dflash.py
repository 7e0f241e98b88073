"""Settings of a DFlash draft (`DFlashSettings`), read from a `config.json` in one of 3 formats (`read_settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import Qwen3Config

from hf_specdecpp.config.value_checks import CURE, check_layers, check_numbers, check_values, hints_of
from hf_specdecpp.draft_kinds import checkpoints

TRANSFORMERS = "muse_glimmer_assistant"  # `model_type` of configs in transformers' format
SCALES = {"input_embedding_scale": "embedding_scale", "output_multiplier": "output_multiplier"}  # config: setting
OF_TRANSFORMERS = {"block_size", "mask_token_id", "target_layer_ids"}  # top-level fields of that format


@dataclass(frozen=True)
class DFlashSettings:
    """Sizes and variants of a DFlash draft; `ValueError` for invalid numbers.

    Example: with `block_size=8` and `reads=[1, 9, 17]` one forward pass over the last token and 7 mask tokens returns
    the distributions of 7 candidates. The rows attend to the outputs of the target's layers 1, 9 and 17 (from 0)."""

    layer: dict[str, Any]  # arguments of the `Qwen3Config` of the draft's layers
    reads: list[int]  # target layers whose outputs are read, in the order of concatenation
    block_size: int  # rows of a block: the last token of the sequence, then mask tokens
    mask_token_id: int  # in the target's vocabulary
    embedding_scale: float = 1.0  # factor of the embeddings
    output_multiplier: float = 1.0  # factor of the logits
    logit_cap: float | None = None  # bound of the multiplied logits: cap * tanh(logits / cap); `None` for no bound
    scales_as_target: bool = False  # take `output_multiplier` and `logit_cap` from the target's config (Muse Glimmer)
    is_causal: bool | None = None  # whether rows see no later rows of their block; `None`: in layers with a window only
    includes_window: bool = False  # whether a window of w covers the w tokens before a row, rather than w - 1
    samples_anchor: bool = False  # whether the row of the last token proposes the first candidate; else it is unused
    reads_normed: bool = True  # whether the output of the target's last layer is read after the target's final norm
    num_target_layers: int | None = None  # of the target that the draft was trained for, if known
    draft_vocab_size: int | None = None  # number of tokens that the draft may propose; `None` for all
    own_embeddings: bool = False  # otherwise the draft uses the target's
    own_head: bool = False  # otherwise the draft uses the target's LM head

    def __post_init__(self) -> None:
        check_values(vars(self), hints_of(type(self)))
        check_numbers({**vars(self), "layer": {}})
        check_layers(self.layer)
        if not self.reads or self.places < 1:
            raise ValueError(
                f"A DFlash draft with block_size={self.block_size} that reads layers {self.reads} proposes nothing: a "
                f"block has at least 2 rows, made of outputs of the target. {CURE}"
            )

    @property
    def places(self) -> int:
        """Number of candidates that a block proposes."""
        return self.block_size - (not self.samples_anchor)

    def layer_config(self) -> Qwen3Config:
        return Qwen3Config(**self.layer)


def read_settings(raw: Mapping[str, Any], kind: str = "dflash") -> DFlashSettings:
    """Read the settings from a `config.json` in the original format (z-lab), transformers' or that of speculators.
    `ValueError` if it describes an unsupported variant, or a value is missing or invalid.

    `reads` counts layers from 0, as the first two formats do; the ids in speculators' format are one higher.
    `own_embeddings` and `own_head` keep their defaults. `kind`: the draft's type in speculators' format."""
    check_numbers(raw)
    checkpoints.refuse_other_types(raw, kind)
    is_nested, is_theirs = checkpoints.SPECULATORS in raw, raw.get("model_type") == TRANSFORMERS
    layers = checkpoints.mapping(raw, "transformer_layer_config") if is_nested else raw
    own = nested(raw)
    given: Any = {**raw, **own}
    layer, has_other_windows = _layer(layers, given, is_theirs)
    ids = given.get("aux_hidden_state_layer_ids" if is_nested else "target_layer_ids")
    if ids is None and not is_nested:
        ids = usual_reads(given.get("num_target_layers"), layers["num_hidden_layers"])
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < is_nested for each in ids):
        raise ValueError(f"The draft reads layers {ids!r} of its target; they must be listed as whole numbers.")
    causal = False if is_theirs or raw.get("sliding_window_non_causal") else _is_causal(raw, own)
    if causal is None and has_other_windows:
        causal = False
    return DFlashSettings(
        layer=layer,
        reads=[each - is_nested for each in ids],
        block_size=given.get("block_size"),
        mask_token_id=given.get("mask_token_id"),
        **{field: given[name] for name, field in SCALES.items() if given.get(name) is not None},
        logit_cap=given.get("final_logit_softcapping") or None,
        scales_as_target=is_theirs,
        is_causal=causal,
        includes_window=is_theirs,
        samples_anchor=bool(given.get("sample_from_anchor")),
        reads_normed=not is_nested,
        num_target_layers=given.get("num_target_layers"),
        draft_vocab_size=raw.get("draft_vocab_size"),
    )


def nested(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields within `dflash_config` and `dspark_config` of a config: they override its top-level fields."""
    return {**checkpoints.mapping(raw, "dflash_config"), **checkpoints.mapping(raw, "dspark_config")}


def usual_reads(depth: Any, num_layers: int) -> list[int] | None:
    """Return the target's layers that a draft of `num_layers` layers reads by default: `num_layers` layers, evenly from
    1 to depth - 3, where `depth` is the target's number of layers. `None` if `depth` is not an `int`.

    Example: of 36 layers a draft of 5 layers reads 1, 9, 17, 25 and 33; a draft of one layer reads 18."""
    if type(depth) is not int:
        return None
    if num_layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (num_layers - 1)) for i in range(num_layers)]


def _is_causal(raw: Mapping[str, Any], own: Mapping[str, Any]) -> bool | None:
    """Return whether rows of a block see no later rows, by the config; `None` if the config has no such field. z-lab
    writes it at the top level, vLLM and Model Optimizer in `dflash_config` (`own`), JetSpec as `causal_head`."""
    places = {name: raw.get(name) for name in ("is_causal", "causal")}
    places |= {f"dflash_config.{name}": own.get(name) for name in ("causal", "is_causal", "causal_head")}
    given = {name: value for name, value in places.items() if value is not None}
    if len(set(map(repr, given.values()))) > 1 or not all(isinstance(value, bool) for value in given.values()):
        raise ValueError(
            f"The config.json of this DFlash draft has {', '.join(f'{name}={each!r}' for name, each in given.items())}"
            ", and must say in one way, true or false, whether rows of a block see later rows. Correct it, or ask who "
            "made it."
        )
    return next(iter(given.values()), None)


def _layer(layers: Mapping[str, Any], given: Mapping[str, Any], is_theirs: bool) -> tuple[dict[str, Any], bool]:
    """Return `DFlashSettings.layer`, and whether `use_swa` gives all layers sliding windows (MiMo's drafts, vLLM).
    `layers`: the mapping with the layers' fields; `given`: all fields; `is_theirs`: the format is transformers'."""
    kind = layers.get("model_type", "qwen3")
    if kind not in ("qwen3", TRANSFORMERS):
        raise ValueError(
            f"The draft has layers of type {kind!r}; DFlash drafts with 'qwen3' layers are read. {checkpoints.INSTEAD}."
        )
    layer = checkpoints.layers_of(layers, ["mlp_bias"], f"{checkpoints.INSTEAD}.")
    types, size = layer.get("layer_types"), given.get("swa_window_size") or layer.get("sliding_window")
    some_have = isinstance(types, list) and "sliding_attention" in types
    all_have = bool(given.get("use_swa")) and not some_have
    if all_have:
        if size is None:
            raise ValueError(
                "The config.json of this DFlash draft gives its layers windows (use_swa) of no size (swa_window_size, "
                "or sliding_window). Download it again, or ask who made it."
            )
        layer.pop("layer_types", None)
        layer |= {"use_sliding_window": True, "max_window_layers": 0}
    if is_theirs or (some_have and size is not None and layer.get("use_sliding_window") is None):
        layer["use_sliding_window"] = True  # otherwise Qwen3's config drops the size
    if size is not None and (all_have or some_have):
        layer["sliding_window"] = size
    check_layers(layer, "")
    return layer, all_have
