"""Make an EAGLE-3 draft of the tensors of a checkpoint (`read_model`), whose names differ by dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.drafts.checkpoints import Names, relative_among
from hf_specdecpp.drafts.eagle3.config import NUM_USUAL, RELATIVES, TRAIN, Eagle3Settings, of_type, read_config
from hf_specdecpp.drafts.eagle3.model import Eagle3Model

logger = logging.get_logger("hf_specdecpp")

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
EMBEDDINGS = "decoder.embed_tokens.weight"
TITLE = "EAGLE-3 draft"


def original(name: str) -> str:
    """The name in a file of what is called `name` here: `RENAMED` undone."""
    name = re.sub(r"^(decoder|reader)\.", "", name)
    return re.sub(r"^layers\.0\.", "midlayer.", name)


NAMES = Names(RENAMED, r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$", original)


def read_model(
    raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str, overrides: dict[str, Any] | None = None
) -> Eagle3Model:
    """The draft that a `config.json` and its tensors make (`Format.read`); `ValueError` if the config is of a relative
    or makes no sense, a tensor is missing, unknown or of another shape, or token ids make no sense."""
    said = read_config(raw, overrides)
    named = NAMES.here(tensors, source)
    _refuse_relatives(named, 2 * said["layer"]["hidden_size"], source)
    return build(settings_of(said, named), tensors, source)


def settings_of(said: dict[str, Any], named: Mapping[str, Tensor]) -> Eagle3Settings:
    """The settings that config and tensors agree on; where a config may be silent, tensors say it."""
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
    layer = {**of_type(said["layer"], kind), "num_hidden_layers": count}
    if types := layer.get("layer_types"):
        layer["layer_types"] = types[:count]
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


def _refuse_relatives(named: Mapping[str, Any], wide: int, source: str) -> None:
    """Raise `ValueError` for other drafts, by their tensors; the attention of an EAGLE-3 layer is `wide`."""
    q = named.get("decoder.layers.0.self_attn.q_proj.weight")
    is_one = "decoder.layers.0.hidden_norm.weight" in named or (q is not None and list(q.shape)[1:] == [wide])
    found = relative_among(RELATIVES, named)
    if found is None and not is_one:
        found = "a model of its own, which assist(model, ...) takes if it is a causal LM with the target's tokens"
        if "reader.fc.weight" in named:
            found = "a draft of EAGLE-1 or 2"
    if found is not None:
        raise ValueError(f"{source} is of {found}; it is no EAGLE-3 draft that hf_specdecpp can load. {TRAIN}.")


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
