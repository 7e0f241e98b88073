"""Settings of a DFlash or DSpark draft (`DFlashSettings`), read from a `config.json` in one of several formats
(`read_block`) and from the draft's tensors (`read_settings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor
from transformers import Qwen3Config

from hf_specdecpp.config.value_checks import CURE, FULL, check_layers, check_numbers, check_values, hints_of, shown
from hf_specdecpp.draft_kinds import checkpoints
from hf_specdecpp.draft_kinds.checkpoints import SPECULATORS, mapping

TRANSFORMERS = "muse_glimmer_assistant"  # `model_type` of configs in transformers' format
SCALES = {"input_embedding_scale": "embedding_scale", "output_multiplier": "output_multiplier"}  # config: setting
OF_TRANSFORMERS = {"block_size", "mask_token_id", "target_layer_ids"}  # top-level fields of that format
NESTED = ("dflash_config", "dspark_config")  # mappings in a config
# Architectures of DeepSpec. Their config is a copy of the target's, whose fields `OF_THE_TARGET` are not the draft's.
GEMMA4 = "Gemma4DSparkModel"
COPIES = ("Qwen3DSparkModel", "LingDSparkModel", GEMMA4)
OF_THE_TARGET = (
    "model_type", "partial_rotary_factor", "rope_scaling", "layer_types", "sliding_window", "use_sliding_window",
    "max_window_layers",
)  # fmt: skip
# Names with "dspark" in them, of architectures and of a field, that are read; others belong to relatives of DSpark.
KNOWN = (*COPIES, "Lfm2DSparkDraftModel", "DSparkDraftModel", "DSparkSpeculator", "dspark_config")
RELATIVES = {  # fields of relatives of DSpark, and what is different in them
    "dspark_block_size": "layers within the target's own checkpoint (DeepSeek-V4)",
    "enable_qwen35_gated_q_proj": "queries with an output gate",
    "has_embed_tokens": "attention sinks and quantised weights (Nemotron 3.5)",
    "pard_token": "attention sinks and quantised weights (Nemotron 3.5)",
}
MARKOV_HEADS = {"gated": "gate_proj", "rnn": "joint_proj"}  # kinds of Markov head: a tensor that only they have
OF_DRAFT_VOCAB = ("markov_head.markov_w2.weight", "lm_head.weight", "d2t")  # one row for each of the draft's tokens
ROPE_OF_GEMMA4 = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}  # the defaults


@dataclass(frozen=True)
class DFlashSettings:
    """Sizes and variants of a DFlash or DSpark draft; `ValueError` for invalid numbers.

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
    says_layout: bool = True  # whether the config determines `samples_anchor`
    reads_normed: bool = True  # whether the output of the target's last layer is read after the target's final norm
    num_target_layers: int | None = None  # of the target that the draft was trained for, if known
    draft_vocab_size: int | None = None  # number of tokens that the draft may propose; `None` for all
    own_embeddings: bool = False  # otherwise the draft uses the target's
    own_head: bool = False  # otherwise the draft uses the target's LM head
    gemma4_layers: bool = False  # layers of Gemma 4 (`block_layers.Gemma4Layer`), rather than Qwen3's
    markov_rank: int = 0  # of the bias by the token before a candidate; 0 without a bias
    markov_head: Literal["vanilla", "gated", "rnn"] = "vanilla"  # how the bias is computed (`MarkovHead`)
    confidence_head: bool = False  # whether the draft has one
    confidence_with_markov: bool = False  # whether that head also reads the Markov embedding of the token before

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


def read_settings(raw: Mapping[str, Any], named: Mapping[str, Tensor], kind: str) -> DFlashSettings:
    """Read the settings of a block from a `config.json` (`read_block`), and those of its heads from the tensors, by
    their names in the module. `ValueError` as in `read_block`, and for a field that contradicts the tensors."""
    block, given = read_block(raw, kind), fields_of(raw)
    if GEMMA4 in architectures(raw):
        block = _in_gemma4(block, raw, named)
    rows, columns = ({name: tensor.shape[at] for name, tensor in named.items() if tensor.dim()} for at in (0, -1))
    vocab_size, width = block.layer.get("vocab_size"), columns.get("confidence_head.proj.weight")
    rank = columns.get("markov_head.markov_w1.weight", 0)
    found: dict[str, Any] = {
        "markov_rank": rank,
        "enable_confidence_head": width is not None,
        "draft_vocab_size": next((rows[name] for name in OF_DRAFT_VOCAB if name in rows), vocab_size),
    }
    if rank:
        types = (each for each, part in MARKOV_HEADS.items() if f"markov_head.{part}.weight" in named)
        found["markov_head_type"] = next(types, "vanilla")
    if width is not None:
        found["confidence_head_with_markov"] = rank > 0 and width == block.layer["hidden_size"] + rank
    for name, value in found.items():
        if given.get(name) not in (None, value):
            raise ValueError(
                f"config.json says {name}={shown(given[name])}, and by the draft's tensors that is {value}. The two do "
                "not belong together: download the repository again."
            )
    return replace(
        block,
        markov_rank=rank,
        markov_head=found.get("markov_head_type", "vanilla"),
        confidence_head=width is not None,
        confidence_with_markov=found.get("confidence_head_with_markov", False),
        **checkpoints.own_modules(named, found["draft_vocab_size"], vocab_size),
    )


def read_block(raw: Mapping[str, Any], kind: str = "dflash") -> DFlashSettings:
    """Read the settings of a block from a `config.json`: in the original format (z-lab), transformers', that of
    speculators, or a dialect of DSpark. `kind`: "dflash" or "dspark". `ValueError` if it describes an unsupported
    variant, or a value is missing or invalid.

    `reads` counts layers from 0, as most formats do; the ids in speculators' format are one higher. Settings that
    depend on tensors keep their defaults."""
    if kind == "dspark":
        refuse_relatives(raw)
    if set(COPIES) & set(architectures(raw)):
        rope = {"rope_theta": mapping(raw, "rope_parameters").get("rope_theta")}
        raw = {name: value for name, value in raw.items() if name not in OF_THE_TARGET} | {"rope_parameters": rope}
    check_numbers(raw)
    checkpoints.refuse_other_types(raw, kind)
    is_nested, is_theirs = SPECULATORS in raw, raw.get("model_type") == TRANSFORMERS
    layers = mapping(raw, "transformer_layer_config") if is_nested else raw
    given: Any = fields_of(raw)
    layer, has_other_windows = _layer(layers, given, is_theirs)
    causal = False if is_theirs or raw.get("sliding_window_non_causal") else _is_causal(given)
    if causal is None and has_other_windows:
        causal = False
    samples_anchor, says_layout = _layout(given, kind)
    return DFlashSettings(
        layer=layer,
        reads=_reads(given, layers, is_nested, kind),
        block_size=given.get("block_size"),
        mask_token_id=given.get("mask_token_id"),
        **{field: given[name] for name, field in SCALES.items() if given.get(name) is not None},
        logit_cap=given.get("final_logit_softcapping") or None,
        scales_as_target=is_theirs,
        is_causal=causal,
        includes_window=is_theirs,
        samples_anchor=samples_anchor,
        says_layout=says_layout,
        reads_normed=not is_nested,
        num_target_layers=given.get("num_target_layers"),
    )


def fields_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields of a config: those in its mappings `NESTED`, unless `None`, replace those at the top level."""
    nested = [item for part in NESTED for item in mapping(raw, part).items() if item[1] is not None]
    return {**raw, **dict(nested)}


def architectures(raw: Mapping[str, Any]) -> list[str]:
    found = raw.get("architectures")
    return list(map(str, found)) if isinstance(found, list) else [str(found)]


def refuse_relatives(raw: Mapping[str, Any]) -> None:
    """Raise `ValueError` for a config with a field of `RELATIVES`, or with an unknown name of DSpark."""
    unknown = [name for name in (*architectures(raw), *raw) if "dspark" in name.lower() and name not in KNOWN]
    if found := [name for name in RELATIVES if name in raw] + unknown:
        different = RELATIVES.get(found[0], "layers that are not known")
        checkpoints.refuse(f"relative of DSpark ({found[0][:80]}) with {different}")


# Parts of the settings. -----------------------------------------------------------------------------------------------


def _reads(given: Mapping[str, Any], layers: Mapping[str, Any], is_nested: bool, kind: str) -> list[int]:
    """Return `DFlashSettings.reads`; arguments as in `read_block`."""
    ids = given.get("aux_hidden_state_layer_ids" if is_nested else "target_layer_ids")
    if ids is None and not is_nested:
        ids = usual_reads(given.get("num_target_layers"), layers["num_hidden_layers"])
    if not isinstance(ids, list) or not ids or any(type(each) is not int or each < is_nested for each in ids):
        raise ValueError(f"The draft reads layers {ids!r} of its target; they must be listed as whole numbers.")
    if kind == "dspark" and ids != sorted(set(ids)):
        raise ValueError(f"The draft reads layers {ids} of its target, which must ascend in a DSpark draft. {CURE}")
    return [each - is_nested for each in ids]


def usual_reads(depth: Any, num_layers: int) -> list[int] | None:
    """Return the target's layers that a draft of `num_layers` layers reads by default: `num_layers` layers, evenly from
    1 to depth - 3, where `depth` is the target's number of layers. `None` if `depth` is not an `int`.

    Example: of 36 layers a draft of 5 layers reads 1, 9, 17, 25 and 33; a draft of one layer reads 18."""
    if type(depth) is not int:
        return None
    if num_layers == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (num_layers - 1)) for i in range(num_layers)]


def _is_causal(given: Mapping[str, Any]) -> bool | None:
    """Return whether rows of a block see no later rows, by the fields of a config; `None` if it has no such field:
    `is_causal` or `causal`, or `causal_head` of JetSpec."""
    given = {name: given[name] for name in ("is_causal", "causal", "causal_head") if given.get(name) is not None}
    if len(set(map(repr, given.values()))) > 1 or not all(isinstance(value, bool) for value in given.values()):
        raise ValueError(
            f"The config.json of this DFlash draft has {', '.join(f'{name}={each!r}' for name, each in given.items())}"
            ", and must say in one way, true or false, whether rows of a block see later rows. Correct it, or ask who "
            "made it."
        )
    return next(iter(given.values()), None)


def _layout(given: Mapping[str, Any], kind: str) -> tuple[Any, bool]:
    """Return `samples_anchor` and `says_layout` of `DFlashSettings`; `given`: all fields of a config.

    A DFlash config without such a field means false. A DSpark config without one is clear if it is in speculators'
    format and declares as many candidates as a block has rows (true), or one less (false). Otherwise false is assumed
    in this format, and true in others."""
    for name in ("sample_from_anchor", "query_zero_predicts_next"):
        if given.get(name) is not None:
            return given[name], True
    if kind != "dspark":
        return False, True
    if SPECULATORS not in given:
        return True, False
    methods = mapping(given, "speculators_config").get("proposal_methods")
    methods = methods if isinstance(methods, list) else []
    widths = [each.get("speculative_tokens") for each in methods if isinstance(each, Mapping)]
    missing = [count for count in (0, 1) if (given.get("block_size") or 0) - count in widths]
    return missing == [0], len(missing) == 1


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


def _in_gemma4(block: DFlashSettings, raw: Mapping[str, Any], named: Mapping[str, Tensor]) -> DFlashSettings:
    """Return the settings `block` with Gemma 4's layers; sizes and rotation of heads are those of Gemma 4's layers with
    full attention. Size and number of key heads are the global ones of the config `raw`, or computed from the first
    layer's tensors: newer configs list them by target layer (`per_layer_config`)."""
    first, layer = "layers.0.self_attn", dict(block.layer)
    size, width = (len(named.get(f"{first}.{part}.weight", ())) for part in ("k_norm", "k_proj"))
    head_dim = raw.get("global_head_dim") or size
    shared = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    layer |= {
        "head_dim": head_dim or None,
        "num_key_value_heads": shared or width // max(head_dim, 1) or None,
        "hidden_act": raw.get("hidden_activation", "gelu_pytorch_tanh"),
        "rope_parameters": {**ROPE_OF_GEMMA4, **mapping(mapping(raw, "rope_parameters"), FULL)},
    }
    return replace(block, layer=layer, embedding_scale=layer["hidden_size"] ** 0.5, gemma4_layers=True)
