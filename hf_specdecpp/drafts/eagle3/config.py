"""What an EAGLE-3 draft is made of (`Eagle3Settings`), by a `config.json` in either dialect (`read_config`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config

from hf_specdecpp.config import checks
from hf_specdecpp.config.checks import Bounds, check_fields, check_layers, check_values, shown
from hf_specdecpp.drafts.checkpoints import DEFAULT_THETA, SPECULATORS, Relative, layers_of, mapping, relative_by

LAYER_CONFIGS: dict[str, type[PreTrainedConfig]] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
NUM_USUAL = 3  # outputs of layers are read where a checkpoint names none
BOUNDS: dict[str, Bounds] = {
    "state_size": checks.SIZE,
    "reads": [checks.OF_TARGET],
    "layer_ids": [range(checks.OF_TARGET.stop + 1)],
    "num_reads": range(checks.DEPTH.stop),
    "draft_vocab_size": checks.TOKENS,
}
OF_QWEN3 = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
ABOVE: dict[str, Bounds] = {"target_hidden_size": checks.SIZE, "draft_vocab_size": checks.TOKENS}  # beside the layers
RELATIVES = (
    Relative("Medusa heads", "medusa", {"medusa_num_heads"}, r"^(medusa_head|heads|blocks|lm_heads|\d+)\.\d+\."),
    Relative("Hydra heads", "hydra", {"hydra_num_heads"}),
    Relative("P-EAGLE", "peagle", {"parallel_drafting", "mask_token_id", "ptd_token_id", "pard_token"}, "mask_hidden"),
    Relative(
        "an EAGLE-3 draft with an MLA layer (DeepSeek's attention)",
        "deepseek|(?-i:MLA)",
        {"kv_lora_rank"},
        "kv_[ab]_proj",
    ),
    Relative(
        "an EAGLE-3 draft with a mixture of experts",
        r"/\w*moe",
        {"num_experts", "num_local_experts", "n_routed_experts"},
        r"\.experts\.|mlp\.gate\.weight",
    ),
    Relative("a quantised EAGLE-3 draft", fields={"quantization_config", "compression_config"}),
)
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What somebody may know better than a config: `from_pretrained(..., eagle3={...})`. The names are those of the settings
# and of their layers; `own_embeddings=False` takes the target's where the file has some.
OVERRIDES: dict[str, Any] = {
    **dict.fromkeys((*FLAGS, "own_embeddings"), bool),
    "rope_theta": float,
    "reads": list[int],
}
TRAIN = "Train a draft of this package for the target (specdecpp train), or look for an EAGLE-3 head of it"


@dataclass(frozen=True)
class Eagle3Settings:
    """The shape of a draft, and how its step is computed; `ValueError` for settings that exclude one another, or a
    layer of another type.

    Example: of a target of 32 layers `reads=[1, 15, 28]` reads the outputs of its layers 1, 15 and 28, counted from 0.
    These are the ids 2, 16 and 29 of checkpoints that count what goes into a layer.

    Args:
        layer: of the draft's layers: `model_type` ("llama" or "qwen3") and arguments of its transformers config.
        state_size: of the target's hidden states.
        reads: the target's layers whose outputs are read, in the order in which they are put together; `None` where
            that depends on the target. Without any, its final state is read, after its final norm.
        layer_ids: what a checkpoint calls them (`eagle3.layer_ids`); `None` for the usual ones.
        num_reads: how many these are.
        draft_vocab_size: how many tokens it may propose; `None` for all.
        norm_before_residual: the residual begins with the normed state instead of the state itself.
        norm_before_fc: one norm over all states together before they are mixed (gpt-oss).
        fc_norm: a norm for each of them (EAGLE-3.1).
        norm_output: the state that a step goes on from is the normed one (EAGLE-3.1).
        fc_bias: whether what mixes the states has a bias.
        own_embeddings, own_head: whether it brings these or takes the target's.
    """

    layer: dict[str, Any]
    state_size: int
    reads: list[int] | None = None
    layer_ids: list[int] | None = None
    num_reads: int = 3
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    fc_bias: bool = False
    own_embeddings: bool = False
    own_head: bool = True

    def __post_init__(self) -> None:
        check_fields({name: getattr(self, name) for name in BOUNDS}, BOUNDS)
        check_layers(self._arguments())
        if self.layer.get("vocab_size") is None:
            raise ValueError("layer.vocab_size is missing, so it is not known how many tokens the draft was made for.")
        if (found := self.layer.get("model_type")) not in tuple(LAYER_CONFIGS):
            raise ValueError(f"A draft with layers of type {found!r} is not known; there are 'llama' and 'qwen3'.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError(
                "norm_before_fc and fc_norm are both set and exclude one another: the states are normed once. Unset "
                "the wrong one, for example eagle3={'norm_before_fc': False}."
            )
        if self.num_reads * self.state_size == self.layer["hidden_size"]:
            raise ValueError(
                f"What the draft reads of the target ({self.num_reads} x {self.state_size}) is as wide as its own "
                f"state ({self.layer['hidden_size']}), so they cannot be told apart. Read another number of layers."
            )
        named = self.reads or self.layer_ids or [0] * (NUM_USUAL if self.num_reads else 0)
        if len(named) != self.num_reads:
            name = "reads" if self.reads else "eagle_aux_hidden_state_layer_ids"
            raise ValueError(
                f"{name}={self.reads or self.layer_ids} must name {self.num_reads} layers of the target, since the "
                "outputs of so many are mixed. Say which, counted from 0: eagle3={'reads': [...]}."
            )
        if self.state_size != self.layer["hidden_size"] and not (self.own_embeddings and self.own_head):
            raise ValueError(
                f"The draft is {self.layer['hidden_size']} wide and its target {self.state_size}, so it cannot take "
                "the target's embeddings and LM head, and it lacks one of them (embed_tokens.weight, lm_head.weight). "
                "The checkpoint is incomplete: download it again."
            )

    def layer_config(self) -> Any:
        return LAYER_CONFIGS[self.layer["model_type"]](**self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {name: value for name, value in self.layer.items() if name != "model_type"}


def looks_like_one(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of an EAGLE-3 checkpoint, or of a relative that is refused by name.

    Of EAGLE's own first drafts it says nothing but that a Llama has one layer.
    """
    return is_marked(raw) or (raw.get("model_type") in tuple(LAYER_CONFIGS) and raw.get("num_hidden_layers") == 1)


def is_marked(raw: Mapping[str, Any]) -> bool:
    """The same where a config says so itself; a causal LM of one layer does not."""
    marks = {SPECULATORS, "draft_vocab_size", "eagle_config", "medusa_num_heads", "hydra_num_heads"}
    names = str(raw.get("architectures")).lower()
    return bool(marks & set(raw)) or any(name in names for name in ("eagle", "medusa", "hydra"))


def read_config(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a `config.json` says before its tensors are looked at: arguments of `Eagle3Settings`. `ValueError` if it is
    of a relative that is not supported, or a value is missing or makes no sense.

    `layer` is without the number of layers, and perhaps of the other type; `num_reads` is 0 where the final state alone
    is read, else there is none: tensors tell both.

    Args:
        overrides: of its values (`OVERRIDES`).
    """
    overrides = check_overrides(overrides or {})
    is_nested = SPECULATORS in raw
    inner = mapping(raw, "transformer_layer_config") if is_nested else raw
    eagle = mapping(raw, "eagle_config")
    if (found := relative_by(RELATIVES, raw, "eagle3", "transformer_layer_config", "eagle_config")) is not None:
        raise ValueError(f"This repository holds {found}, which hf_specdecpp cannot draft with. {TRAIN}.")
    place = "transformer_layer_config." if is_nested else ""
    check_fields({name: inner.get(name) for name in NEEDED}, checks.LAYER, place, NEEDED)
    check_fields({name: raw.get(name) for name in ABOVE}, ABOVE)
    said = {"fc_norm": raw.get("use_aux_norm"), **raw, **eagle, **overrides}  # the former is an older name
    check_fields({name: said.get(name) or None for name in FLAGS}, dict.fromkeys(FLAGS, bool))
    ids, reads = _layer_ids(raw, eagle, is_nested), overrides.get("reads")
    if reads is None and is_nested and ids and ids[0] > 1:  # else it may be a converted checkpoint with its own ids
        reads = [each - 1 for each in ids]
    reads_states = eagle.get("use_aux_hidden_state", raw.get("use_aux_hidden_state")) is not False
    return {
        "layer": _layer(raw, inner, overrides.get("rope_theta")),
        "layer_ids": ids,
        "reads": reads,
        "state_size": raw.get("target_hidden_size") or inner["hidden_size"],
        "draft_vocab_size": raw.get("draft_vocab_size"),
        "own_embeddings": overrides.get("own_embeddings", True),
        **{name: bool(said.get(name)) for name in FLAGS},
        **({} if reads_states else {"num_reads": 0}),
    }


def _layer_ids(raw: Mapping[str, Any], eagle: Mapping[str, Any], is_nested: bool) -> list[int] | None:
    """The target's layers as the config names them, if it does."""
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids)):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={ids!r} must list layers of the target in whole numbers, since the "
            "draft reads their outputs. Correct it in config.json, or leave it out and say eagle3={'reads': [...]}."
        )
    if is_nested and ids and 0 in ids:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={ids}: 0 is the target's embeddings in this dialect, and "
            f"hf_specdecpp reads outputs of layers. {TRAIN}."
        )
    return ids


def check_overrides(overrides: Any) -> dict[str, Any]:
    """The overrides, if they are known and make sense; else `ValueError`."""
    if not isinstance(overrides, dict):
        raise ValueError(f"eagle3={shown(overrides)} must be a mapping.")
    if unknown := sorted(set(map(str, overrides)) - set(OVERRIDES)):
        raise ValueError(f"eagle3 has {', '.join(unknown)}, which is not known. It may have {', '.join(OVERRIDES)}.")
    check_values(overrides, OVERRIDES, "eagle3.")
    if (theta := overrides.get("rope_theta")) is not None and theta <= 0:
        raise ValueError(f"eagle3.rope_theta={theta} must be above 0. Most drafts have {DEFAULT_THETA:.0f}.")
    if (reads := overrides.get("reads")) is not None and (not reads or min(reads) < 0):
        raise ValueError(f"eagle3.reads={reads} must list layers of the target, counted from 0.")
    return dict(overrides)


def of_type(layer: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The config of layers of this type, as their tensors say; `ValueError` for layers of Llama with a window."""
    if kind == "qwen3":
        return {**layer, "model_type": kind}
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise ValueError(
            "The draft is a Llama layer with a sliding window (layer_types), which transformers' Llama does not have, "
            f"so it would see too much. {TRAIN}."
        )
    return {name: value for name, value in layer.items() if name not in OF_QWEN3} | {"model_type": kind}


def _layer(raw: Mapping[str, Any], inner: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    """The config of the draft's layers, whose number tensors tell.

    Where a flat config's architecture is a Llama's, its `model_type`, and windows, may be the target's.
    """
    said = inner.get("model_type")
    kind = said or ("qwen3" if SPECULATORS in raw else "llama")
    is_its_own = said in (None, *LAYER_CONFIGS)
    if isinstance(kind, str) and not is_its_own and inner is raw and "llama" in str(raw.get("architectures")).lower():
        kind = "llama"
    if kind not in tuple(LAYER_CONFIGS):
        raise ValueError(
            f"The draft has layers of type {kind!r}; EAGLE-3 drafts with 'llama' and 'qwen3' layers are supported. "
            f"{TRAIN}."
        )
    cure = "Say what rope_theta it was trained with: eagle3={'rope_theta': 10000.0}."
    layer = layers_of(inner, ("num_hidden_layers", *(() if is_its_own else OF_QWEN3)), cure, theta)
    check_fields(layer, checks.LAYER)
    return {"model_type": kind, **layer}
