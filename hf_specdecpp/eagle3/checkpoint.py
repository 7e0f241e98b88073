"""Make an EAGLE-3 draft of the tensors of a checkpoint (`read_model`), whose names differ by dialect."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.eagle3.description import TRAIN, Description
from hf_specdecpp.eagle3.model import Eagle3Model
from hf_specdecpp.eagle3.settings import Eagle3Settings

logger = logging.get_logger("hf_specdecpp")

# Names that mean the same, in order: what stands in the file, what it is called here.
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
IGNORED = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")


def read_model(description: Description, tensors: Mapping[str, Tensor], source: str) -> Eagle3Model:
    """The draft that a config and its tensors make.

    Args:
        tensors: as they are in the file.
        source: where they are from, for messages.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape, or token ids make no sense.
    """
    named = _named(tensors)
    _refuse_relatives(named, source)
    return build(settings_of(description, named), tensors, source)


def _named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {renamed(name): tensor for name, tensor in tensors.items() if not IGNORED.search(name)}


def renamed(name: str) -> str:
    """The name here of a tensor of a checkpoint.

    Example: `midlayer.self_attn.q_proj.weight` is `decoder.layers.0.self_attn.q_proj.weight`.
    """
    for pattern, here in RENAMED:
        name = re.sub(pattern, here, name)
    return name


def settings_of(description: Description, named: Mapping[str, Tensor]) -> Eagle3Settings:
    """The settings that config and tensors agree on; where a config may be silent, tensors say it."""
    layers = {int(found[1]) for name in named if (found := re.match(r"decoder\.layers\.(\d+)\.", name))}
    fc, size = named.get("reader.fc.weight"), description.state_size
    num_reads = fc.shape[1] // size if fc is not None and description.reads_states else 0
    draft_vocab_size = description.draft_vocab_size
    if (head := named.get("lm_head.weight")) is not None and draft_vocab_size is None:
        draft_vocab_size = head.shape[0] if head.shape[0] < description.layer["vocab_size"] else None
    flags = {
        **description.flags,
        "norm_before_fc": description.flags["norm_before_fc"] or "reader.input_norm.weight" in named,
        "fc_norm": description.flags["fc_norm"] or "reader.fc_norm.0.weight" in named,
        "fc_bias": description.flags["fc_bias"] or "reader.fc.bias" in named,
    }
    return Eagle3Settings(
        layer={**description.layer, "num_hidden_layers": max(len(layers), 1)},
        state_size=size,
        reads=description.reads,
        layer_ids=description.ids,
        num_reads=num_reads,
        draft_vocab_size=None if draft_vocab_size == description.layer["vocab_size"] else draft_vocab_size,
        own_embeddings="decoder.embed_tokens.weight" in named,
        own_head=head is not None,
        **flags,
    )


def build(settings: Eagle3Settings, tensors: Mapping[str, Tensor], source: str) -> Eagle3Model:
    """The draft with these settings and the tensors of a checkpoint; errors as above."""
    named = _named(tensors)
    token_ids = _token_ids(settings, named.pop("d2t", None), named.pop("t2d", None), source)
    with torch.device("meta"):
        model = Eagle3Model(settings)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for what, names in (("lacks", set(expected) - set(named)), ("has unknown", set(named) - set(expected))):
        if names:
            raise ValueError(
                f"{source} {what} {', '.join(sorted(names)[:9])}. Its tensors are those of a variant that config.json "
                "does not describe, or that hf_specdecpp does not know."
            )
    for name, shape in expected.items():
        if tuple(named[name].shape) != shape:
            raise ValueError(
                f"{source}: {name} has shape {list(named[name].shape)}, and config.json makes it {list(shape)}. The "
                "two do not belong together: download the repository again."
            )
    model.load_state_dict(named, assign=True)
    rotary = model.decoder.rotary_emb
    model.decoder.rotary_emb = type(rotary)(config=model.config)  # its buffers are in no file
    model.token_ids = token_ids
    return model.eval().requires_grad_(False)


def _token_ids(settings: Eagle3Settings, offsets: Tensor | None, kept: Tensor | None, source: str) -> Tensor | None:
    """The target's ids of the draft's tokens, `[draft_vocab_size]`; `None` for all.

    Example: offsets 0, 0, 3 are the ids 0, 1, 5.

    Args:
        offsets: `d2t`, what is added to a draft's id. Some files hold the target's ids themselves.
        kept: `t2d`, `[vocab_size]`: which of the target's tokens the draft has.
    """
    count, vocab_size = settings.draft_vocab_size, settings.layer["vocab_size"]
    if count is None:
        return None
    if offsets is None:
        raise ValueError(
            f"{source} has no d2t, which says what its {count} tokens are among the target's {vocab_size}. The file is "
            "incomplete: download it again."
        )
    if offsets.dtype not in (torch.int64, torch.int32) or tuple(offsets.shape) != (count,):
        raise ValueError(
            f"{source}: d2t is {list(offsets.shape)} of {str(offsets.dtype)[6:]}, and must be [{count}] whole numbers."
        )
    ids = torch.arange(count) + offsets.long()
    listed = None if kept is None else kept.flatten().nonzero().flatten()
    if listed is not None and not torch.equal(ids, listed):
        if not torch.equal(offsets.long(), listed):
            raise ValueError(
                f"{source}: d2t and t2d name different tokens ({len(listed)} in t2d, {count} in d2t). The file is "
                "damaged."
            )
        logger.warning(f"{source}: d2t holds the target's ids themselves where offsets are usual. It is read as that.")
        ids = listed
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size or ids.unique().numel() != count:
        raise ValueError(
            f"{source}: d2t makes ids from {int(ids.min())} to {int(ids.max())}, {ids.unique().numel()} different ones "
            f"of {count}. They must be distinct and below vocab_size={vocab_size}: the file is damaged."
        )
    return ids


def _refuse_relatives(named: Mapping[str, Any], source: str) -> None:
    """Raise `ValueError` for other drafts, by their tensors."""
    names = " ".join(named)
    found = None
    if "kv_a_proj" in names or "kv_b_proj" in names:
        found = "an EAGLE-3 draft with an MLA layer (DeepSeek's attention)"
    elif ".experts." in names or "mlp.gate.weight" in names:
        found = "an EAGLE-3 draft with a mixture of experts"
    elif "mask_hidden" in named:
        found = "P-EAGLE"
    elif "reader.fc.weight" in named and "decoder.layers.0.hidden_norm.weight" not in named:
        found = "a draft of EAGLE-1 or 2"
    elif any(re.match(r"(medusa_head|heads|blocks|lm_heads|\d+)\.\d+\.", name) for name in named):
        found = "Medusa heads"
    elif "decoder.layers.0.hidden_norm.weight" not in named:
        found = "a model of its own, which from_draft(...) takes if it is a causal LM with the target's tokens"
    if found is not None:
        raise ValueError(f"{source} is of {found}; it is no EAGLE-3 draft that hf_specdecpp can load. {TRAIN}.")


def tensors_of(model: Eagle3Model) -> dict[str, Tensor]:
    """The tensors of a draft as a checkpoint of the original dialect has them, which every engine reads."""
    tensors = {_original(name): tensor for name, tensor in model.state_dict().items()}
    if (ids := model.token_ids) is not None:
        ids = ids.cpu()
        tensors["d2t"] = ids - torch.arange(len(ids))
        tensors["t2d"] = torch.zeros(model.settings.layer["vocab_size"], dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


def _original(name: str) -> str:
    """The name that `renamed` undoes."""
    name = re.sub(r"^(decoder|reader)\.", "", name)
    return re.sub(r"^layers\.0\.", "midlayer.", name)
