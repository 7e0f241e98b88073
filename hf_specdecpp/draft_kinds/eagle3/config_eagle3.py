"""Settings of an EAGLE-3 draft (`Eagle3Settings`), read from a `config.json` of the original or the speculators format
(`read_config`); the target layers that its layer ids may mean (`meanings`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from hf_specdecpp.config.value_checks import LAYER, check_layers, check_numbers, check_values, hints_of, shown
from hf_specdecpp.draft_kinds import checkpoints
from hf_specdecpp.draft_kinds.checkpoints import DEFAULT_THETA, SPECULATORS, mapping

LAYER_TYPES = ("llama", "qwen3")
NUM_USUAL = 3  # number of layers whose outputs are read if a checkpoint lists none
OF_QWEN3 = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")  # not in Llama's config
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")  # settings, named as in configs
# Settings and layer arguments that `from_pretrained(..., eagle3={...})` may override, with their types.
# `own_embeddings=False` uses the target's embeddings although the file contains some.
OVERRIDES: dict[str, Any] = {**dict.fromkeys((*FLAGS, "own_embeddings"), bool), "rope_theta": float, "reads": list[int]}


@dataclass(frozen=True)
class Eagle3Settings:
    """Sizes and variants of an EAGLE-3 draft; `ValueError` for settings that exclude one another or unknown layers.

    Example: with a target of 32 layers `reads=[1, 15, 28]` reads the outputs of its layers 1, 15 and 28, counted from
    0. Checkpoints that identify a state by the layer whose input it is list the ids 2, 16 and 29."""

    layer: dict[str, Any]  # `model_type` ("llama" or "qwen3") of the draft's layers, and arguments of its config
    state_size: int  # hidden size of the target
    # Target layers whose outputs are read, in the order of concatenation; `None` if that depends on the target; `[]`
    # for the target's final state (after its final norm).
    reads: list[int] | None = None
    layer_ids: list[int] | None = None  # in the checkpoint; `None` for the usual layers
    num_reads: int = 3  # number of layers whose outputs are read; 0: only the final state
    draft_vocab_size: int | None = None  # number of tokens that the draft may propose; `None` for all
    norm_before_residual: bool = False  # the residual starts with the normed state, not with the state itself
    norm_before_fc: bool = False  # one norm over the concatenated states before fc (gpt-oss)
    fc_norm: bool = False  # one norm for each of the states (EAGLE-3.1)
    norm_output: bool = False  # the next step reads the normed output state (EAGLE-3.1)
    fc_bias: bool = False
    own_embeddings: bool = False  # otherwise the draft uses the target's
    own_head: bool = True  # otherwise the draft uses the target's LM head

    def __post_init__(self) -> None:
        check_values(vars(self), hints_of(type(self)))
        check_numbers({**vars(self), "layer": {}})
        check_layers(self.layer, known=("model_type", *LAYER))
        if self.layer.get("vocab_size") is None:
            raise ValueError("layer.vocab_size is missing, so it is not known how many tokens the draft was made for.")
        if (found := self.layer.get("model_type")) not in LAYER_TYPES:
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
        return AutoConfig.for_model(**self.layer)


def read_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Read arguments of `Eagle3Settings` from a `config.json`. `loading_eagle3.completed` adds arguments that tensors
    determine: `layer` lacks the number of layers, maybe their type. The mapping `eagle_config` may contain `OVERRIDES`.
    `ValueError` if a value is missing or invalid, or belongs to another kind of draft."""
    checkpoints.refuse_other_types(raw, "eagle3")
    is_nested, eagle = SPECULATORS in raw, mapping(raw, "eagle_config")
    inner = mapping(raw, "transformer_layer_config") if is_nested else raw
    layer = _layer(raw, inner, eagle.get("rope_theta"))
    given = {"fc_norm": raw.get("use_aux_norm"), **raw, **eagle}  # use_aux_norm is an older name
    sizes = {
        "state_size": raw.get("target_hidden_size") or layer.get("hidden_size"),
        "draft_vocab_size": raw.get("draft_vocab_size"),
    }
    check_numbers({"layer": layer, **sizes})
    needed = {name: layer.get(name) for name in ("vocab_size", "hidden_size")}
    check_values({**sizes, **needed}, {**dict.fromkeys((*sizes, *needed), int), "draft_vocab_size": int | None})
    reads_layers = given.get("use_aux_hidden_state") is not False
    ids, reads = _layers_to_read(raw, eagle, is_nested) if reads_layers else (None, None)
    return {
        **sizes,
        "layer": layer,
        "layer_ids": ids,
        "reads": reads,
        "num_reads": len(ids or range(NUM_USUAL)) if reads_layers else 0,
        "own_embeddings": eagle.get("own_embeddings", True),
        **{name: given.get(name) or False for name in FLAGS},
    }


def _layers_to_read(raw: Mapping[str, Any], eagle: Mapping[str, Any], is_nested: bool) -> tuple[Any, Any]:
    """Return `layer_ids` and `reads` of `Eagle3Settings`: the layer ids in a config, and the target's layers that they
    mean, `None` if that is not certain. `eagle`: its `eagle_config`; `is_nested`: the format is that of speculators."""
    outputs, name = raw.get("target_layer_ids"), "eagle_aux_hidden_state_layer_ids"  # the former: DeepSpec, outputs
    ids = outputs or eagle.get(name) or raw.get(name)
    if ids is not None and not (isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids)):
        raise ValueError(
            f"{'target_layer_ids' if outputs else name}={ids!r} must list layers of the target in whole numbers, since "
            "the draft reads their outputs. Correct it in config.json, or leave it out and say eagle3={'reads': [...]}."
        )
    if is_nested and ids and 0 in ids:
        raise ValueError(
            f"{name}={ids}: 0 is the target's embeddings in this dialect, and hf_specdecpp reads outputs of layers. "
            f"{checkpoints.INSTEAD}."
        )
    reads = eagle.get("reads") or outputs
    if reads is None and is_nested and ids and ids[0] > 1:  # a first id of 1 may count outputs (converted checkpoints)
        reads = [each - 1 for each in ids]
    return ids, reads


def check_overrides(overrides: Any) -> dict[str, Any]:
    """Return a copy of `from_pretrained(eagle3=...)`; `ValueError` for names not in `OVERRIDES`, or invalid values."""
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


def _layer(raw: Mapping[str, Any], inner: Mapping[str, Any], theta: Any) -> dict[str, Any]:
    """Return `Eagle3Settings.layer` without the number of layers, from the mapping `inner` with the layers' fields (the
    config `raw` itself unless the format is that of speculators). `ValueError` for an unsupported type of layers.

    In a config `raw` with a Llama architecture, `model_type` and sliding windows may be the target's: windows are
    dropped if `model_type` is not "llama" or "qwen3". `theta`: as in `checkpoints.layers_of`."""
    model_type = inner.get("model_type")
    is_its_own = model_type in (None, *LAYER_TYPES)
    is_flat_llama = inner is raw and isinstance(model_type, str) and "llama" in str(raw.get("architectures")).lower()
    if not is_its_own and not is_flat_llama:
        raise ValueError(
            f"The draft has layers of type {model_type!r}; EAGLE-3 drafts with 'llama' and 'qwen3' layers are "
            f"supported. {checkpoints.INSTEAD}."
        )
    cure = "Say what rope_theta it was trained with: eagle3={'rope_theta': 10000.0}."
    return checkpoints.layers_of(inner, ("num_hidden_layers", *(() if is_its_own else OF_QWEN3)), cure, theta)


def usual_reads(depth: int) -> list[int] | None:
    """Return the layers, counted from 0, whose outputs are read by default in a target of `depth` layers: a low, a
    middle and a high one. `None` for fewer than four layers, which have no valid high one.

    Example: with 32 layers, 1, 15 and 28, whose outputs are the inputs of layers 2, 16 and 29."""
    return [layer - 1 for layer in (2, depth // 2, depth - 3)] if depth > 3 else None


def meanings(settings: Eagle3Settings, depth: int) -> list[list[int]]:
    """Return the lists of layers whose outputs a draft may read in a target of `depth` layers, the likeliest first:
    only its `reads` if known (`[]` for the final state), else the meanings of its layer ids for which the target has
    all layers. `ValueError` if there is none, or without ids if the target has fewer than four layers.

    Two conventions exist. Ids of layer inputs (EAGLE, vLLM, speculators): id j is the output of layer j - 1. Ids of
    layer outputs (SpecForge, NVIDIA): id j is the output of layer j. If one meaning is the usual list (`usual_reads`),
    only that is returned, as without ids. Otherwise both are: outputs first if the first id is 1, else inputs first.

    Example: with a depth of 32 `[1, 15, 28]` means `[1, 15, 28]`, `[2, 16, 29]` means `[1, 15, 28]`, and `[2, 18, 30]`
    means `[1, 17, 29]` or `[2, 18, 30]`."""
    if settings.reads is not None or not settings.num_reads:
        return [settings.reads or []]
    ids, usual = settings.layer_ids, usual_reads(depth)
    if not ids:
        if usual is None:
            raise ValueError(
                f"The checkpoint names no layers, and a target of {depth} layers is too small for the usual ones. Say "
                "which, counted from 0: eagle3={'reads': [...]}."
            )
        return [usual]
    before = [each - 1 for each in ids]
    likelier_first = [ids, before] if ids[0] == 1 else [before, ids]
    found = [reads for reads in likelier_first if min(reads) >= 0 and max(reads) < depth]
    if not found:
        raise ValueError(
            f"The draft reads layers {ids} of its target, and this one has {depth}. It was trained for another target."
        )
    return [usual] if usual is not None and usual in found else found
