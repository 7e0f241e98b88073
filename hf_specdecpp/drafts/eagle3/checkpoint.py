"""Make an EAGLE-3 draft of a checkpoint (`read_model`): of its `config.json`, in either dialect (`read_config`), and of
its tensors, whose names differ by dialect, too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.config.checks import SLIDING, check_numbers, check_values, shown
from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.drafts.checkpoints import DEFAULT_THETA, SPECULATORS, Names, mapping
from hf_specdecpp.drafts.eagle3.model import LAYER_CONFIGS, NUM_USUAL, Eagle3Model, Eagle3Settings

logger = logging.get_logger("hf_specdecpp")

# Configs. -------------------------------------------------------------------------------------------------------------

OF_QWEN3 = ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers")
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What somebody may know better than a config: `from_pretrained(..., eagle3={...})`. The names are those of the settings
# and of their layers; `own_embeddings=False` takes the target's where the file has some.
OVERRIDES: dict[str, Any] = {
    **dict.fromkeys((*FLAGS, "own_embeddings"), bool),
    "rope_theta": float,
    "reads": list[int],
}


def looks_like_one(raw: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of an EAGLE-3 checkpoint, or of a draft like those, which is refused.

    Of EAGLE's own first drafts it says nothing but that a Llama has one layer.
    """
    return is_marked(raw) or (raw.get("model_type") in tuple(LAYER_CONFIGS) and raw.get("num_hidden_layers") == 1)


def is_marked(raw: Mapping[str, Any]) -> bool:
    """The same where a config says so itself; a causal LM of one layer does not."""
    marks = {SPECULATORS, "draft_vocab_size", "eagle_config"}
    return bool(marks & set(raw)) or "eagle" in str(raw.get("architectures")).lower()


def read_config(raw: Mapping[str, Any], overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What a `config.json` says before its tensors are looked at: arguments of `Eagle3Settings`. `ValueError` if a
    value is missing, makes no sense, or is of another kind of draft.

    `layer` is without the number of layers, and perhaps of the other type; `num_reads` is 0 where the final state alone
    is read, else there is none: tensors tell both.

    Args:
        overrides: of its values (`OVERRIDES`).
    """
    overrides = check_overrides(overrides or {})
    checkpoints.refuse_other_types(raw, "eagle3")
    is_nested = SPECULATORS in raw
    inner = mapping(raw, "transformer_layer_config") if is_nested else raw
    eagle = mapping(raw, "eagle_config")
    layer = _layer(raw, inner, overrides.get("rope_theta"))
    said = {"fc_norm": raw.get("use_aux_norm"), **raw, **eagle, **overrides}  # the former is an older name
    sizes = {
        "state_size": raw.get("target_hidden_size") or layer.get("hidden_size"),
        "draft_vocab_size": raw.get("draft_vocab_size"),
    }
    check_numbers({"layer": layer, **sizes})
    needed = {name: layer.get(name) for name in ("vocab_size", "hidden_size")}
    check_values({**sizes, **needed}, {**dict.fromkeys((*sizes, *needed), int), "draft_vocab_size": int | None})
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or raw.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None and not (isinstance(ids, list) and ids and all(type(each) is int and each >= 0 for each in ids)):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={ids!r} must list layers of the target in whole numbers, since the "
            "draft reads their outputs. Correct it in config.json, or leave it out and say eagle3={'reads': [...]}."
        )
    if is_nested and ids and 0 in ids:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids={ids}: 0 is the target's embeddings in this dialect, and "
            f"hf_specdecpp reads outputs of layers. {checkpoints.INSTEAD}."
        )
    reads = overrides.get("reads")
    if reads is None and is_nested and ids and ids[0] > 1:  # else it may be a converted checkpoint with its own ids
        reads = [each - 1 for each in ids]
    reads_states = eagle.get("use_aux_hidden_state", raw.get("use_aux_hidden_state")) is not False
    return {
        **sizes,
        "layer": layer,
        "layer_ids": ids,
        "reads": reads,
        "own_embeddings": overrides.get("own_embeddings", True),
        **{name: said.get(name) or False for name in FLAGS},
        **({} if reads_states else {"num_reads": 0}),
    }


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


def _layer(raw: Mapping[str, Any], inner: Mapping[str, Any], theta: float | None) -> dict[str, Any]:
    """The config of the draft's layers, whose number tensors tell.

    Where a flat config's architecture is a Llama's, its `model_type`, and windows, may be the target's.
    """
    said = inner.get("model_type")
    is_its_own = said in (None, *LAYER_CONFIGS)
    is_flat_llama = inner is raw and isinstance(said, str) and "llama" in str(raw.get("architectures")).lower()
    if not is_its_own and not is_flat_llama:
        raise ValueError(
            f"The draft has layers of type {said!r}; EAGLE-3 drafts with 'llama' and 'qwen3' layers are supported. "
            f"{checkpoints.INSTEAD}."
        )
    cure = "Say what rope_theta it was trained with: eagle3={'rope_theta': 10000.0}."
    return checkpoints.layers_of(inner, ("num_hidden_layers", *(() if is_its_own else OF_QWEN3)), cure, theta)


# Tensors. -------------------------------------------------------------------------------------------------------------

# Names that mean the same, in order: what stands in the file, what it is called here.
# Example: `midlayer.self_attn.q_proj.weight` is `decoder.layers.0.self_attn.q_proj.weight`.
RENAMED = (
    (r"^model\.", ""),
    (r"^midlayer\.", "layers.0."),
    (r"^layers\.([1-9]\d*)\.hidden_norm\.", r"layers.\1.input_layernorm."),  # SGLang's name in further layers
    (r"^draft_id_to_target_id$", "d2t"),
    (r"^aux_norm_(low|mid|high)\.", r"fc_norm.\1."),
    (r"^fc_norm\.low\.", "fc_norm.0."), (r"^fc_norm\.mid\.", "fc_norm.1."), (r"^fc_norm\.high\.", "fc_norm.2."),
    (r"^(layers|embed_tokens)\.", r"decoder.\1."),
    (r"^(fc|fc_norm|input_norm)\.", r"reader.\1."),
)  # fmt: skip
EMBEDDINGS, MARK = "decoder.embed_tokens.weight", "decoder.layers.0.hidden_norm.weight"
TITLE = "EAGLE-3 draft"


def original(name: str) -> str:
    """The name in a file of what is called `name` here: `RENAMED` undone."""
    name = re.sub(r"^(decoder|reader)\.", "", name)
    return re.sub(r"^layers\.0\.", "midlayer.", name)


NAMES = Names(RENAMED, r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", original)


def read_model(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str, overrides: dict[str, Any] | None = None
) -> Eagle3Model:
    """The draft that a `config.json` and its tensors make (`Format.read`); `ValueError` if the config
    makes no sense, a tensor is missing, unexpected or of another shape, or token ids make no sense."""
    said, named = read_config(raw, overrides), NAMES.here(tensors, source)
    if MARK not in named:  # a model of its own, a draft of EAGLE-1 or 2, or heads of another method
        raise ValueError(checkpoints.not_of_form(source, TITLE, [original(MARK)], []))
    return build(settings_of(said, named), tensors, source)


def settings_of(said: dict[str, Any], named: Mapping[str, Tensor]) -> Eagle3Settings:
    """The settings that config and tensors agree on; where a config may be silent, tensors say it. `ValueError` for
    layers of Llama with a window."""
    layers = {int(found[1]) for name in named if (found := re.match(r"decoder\.layers\.(\d{1,4})\.", name))}
    size, vocab_size, num_reads = said["state_size"], said["layer"]["vocab_size"], said.get("num_reads")
    if num_reads is None:
        fc = named.get("reader.fc.weight")
        width = fc.shape[-1] if fc is not None and fc.dim() == 2 else 0
        num_named = NUM_USUAL if said["layer_ids"] is None else len(said["layer_ids"])
        num_reads = num_named if width % size or not width else width // size
    head, draft_vocab_size = named.get("lm_head.weight"), said["draft_vocab_size"]
    if draft_vocab_size is None and head is not None and head.dim() and head.shape[0] < vocab_size:
        draft_vocab_size = head.shape[0]
    count = max(len(layers), 1)  # whatever config.json says: some files have one layer and say 40
    kind = "qwen3" if "decoder.layers.0.self_attn.q_norm.weight" in named else "llama"
    layer = {"model_type": kind, **said["layer"], "num_hidden_layers": count}
    types = found if isinstance(found := layer.get("layer_types"), list) else []
    if types:
        layer["layer_types"] = types[:count]
    if kind == "llama":
        if SLIDING in types:
            raise ValueError(
                "The draft is a Llama layer with a sliding window (layer_types), which transformers' Llama does not "
                f"have, so it would see too much. {checkpoints.INSTEAD}."
            )
        layer = {name: value for name, value in layer.items() if name not in OF_QWEN3}
    settings = {
        **said,
        "layer": layer,
        "num_reads": num_reads,
        "draft_vocab_size": None if draft_vocab_size == vocab_size else draft_vocab_size,
        "norm_before_fc": said["norm_before_fc"] or "reader.input_norm.weight" in named,
        "fc_norm": said["fc_norm"] or "reader.fc_norm.0.weight" in named,
        "fc_bias": "reader.fc.bias" in named,
        "own_embeddings": said["own_embeddings"] and EMBEDDINGS in named,
        "own_head": head is not None or draft_vocab_size not in (None, vocab_size),
    }
    return Eagle3Settings(**settings if num_reads else {**settings, "reads": None, "layer_ids": None})


def build(settings: Eagle3Settings, tensors: Mapping[str, Tensor], source: str) -> Eagle3Model:
    """The draft with these settings and the tensors of a checkpoint; errors as above.

    What the settings leave out may be left over: fc beside `use_aux_hidden_state: false`, and embeddings.
    """
    used = {EMBEDDINGS: settings.own_embeddings, "reader.fc.weight": settings.num_reads > 0}
    named = {name: tensor for name, tensor in NAMES.here(tensors, source).items() if used.get(name, True)}
    token_ids = _token_ids(settings, named.pop("d2t", None), named.pop("t2d", None), source)
    depth = settings.layer["num_hidden_layers"]
    model = checkpoints.build(lambda: Eagle3Model(settings), named, depth, source, TITLE, NAMES)
    model.token_ids = token_ids
    return model


def _token_ids(settings: Eagle3Settings, offsets: Tensor | None, kept: Tensor | None, source: str) -> Tensor | None:
    """The target's ids of the draft's tokens, `[draft_vocab_size]`; `None` for all.

    Example: offsets 0, 0, 3 are the ids 0, 1, 5.

    Args:
        offsets: `d2t`, what is added to a draft's id. Some files hold the target's ids themselves.
        kept: `t2d`, `[vocab_size]`: which of the target's tokens the draft has.
    """
    vocab_size = settings.layer["vocab_size"]
    count = settings.draft_vocab_size or vocab_size
    if offsets is None:
        if count == vocab_size:
            return None
        raise ValueError(
            f"{source} has no d2t, which says what its {count} tokens are among the target's {vocab_size}. The file is "
            "incomplete: download it again."
        )
    if offsets.dtype not in (torch.int64, torch.int32) or tuple(offsets.shape) != (count,):
        raise ValueError(
            f"{source}: d2t is {list(offsets.shape)} of {str(offsets.dtype)[6:]}, and must be [{count}] whole numbers "
            "(int64), one for each of the draft's tokens. The file is damaged: download it again."
        )
    if offsets.is_meta:  # its numbers are read later
        return None
    ids = torch.arange(count) + offsets.long()
    listed = None if kept is None else kept.flatten().bool().nonzero().flatten()  # of some types torch counts none
    if listed is not None and not torch.equal(ids.sort().values, listed):
        if not torch.equal(offsets.long(), listed):
            raise ValueError(
                f"{source}: d2t and t2d name different tokens ({count} in d2t, {len(listed)} in t2d), so the draft "
                "would propose wrong ones. The file is damaged: download it again."
            )
        logger.warning(f"{source}: d2t holds the target's ids themselves where offsets are usual. It is read as that.")
        ids = listed
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != count:
        raise ValueError(
            f"{source}: d2t makes ids from {int(ids.min())} to {int(ids.max())}, {ids.unique().numel()} different ones "
            f"of {count}. They must be distinct and below vocab_size={vocab_size}: the file is damaged, download it "
            "again."
        )
    return None if count == vocab_size and torch.equal(ids, torch.arange(count)) else ids


def tensors_of(
    model: Eagle3Model, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of a draft as a checkpoint of the original dialect has them, which every engine reads.

    The arguments are those of `OwnFile.tensors`.
    """
    tensors = NAMES.in_file(state or model.state_dict(), dtype)
    if (ids := model.token_ids) is not None:
        ids = ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(model.settings.layer["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors
