"""Make a DFlash draft of the tensors of a checkpoint, whose names differ by dialect, and bring it to its target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.foreign import check_depth, check_tensors, renamed
from hf_specdecpp.config.modules import as_described
from hf_specdecpp.drafts.dflash.description import read_settings, refuse_relatives
from hf_specdecpp.drafts.dflash.model import DFlashModel
from hf_specdecpp.drafts.dflash.settings import DFlashSettings
from hf_specdecpp.models.causal_lm import CausalLM, input_device, move, num_embeddings, renew_rotary
from hf_specdecpp.models.quantised import is_quantised, sizes_of
from hf_specdecpp.models.vocabulary import outside

# What stands in the file, what it is called here. Example: `encoder.output_norm_enc.weight` is `reader.norm.weight`.
RENAMED = (
    (r"^model\.", ""),
    (r"^(encoder\.)?fc\.", "reader.fc."),
    (r"^(hidden_norm|encoder\.output_norm_enc)\.", "reader.norm."),
)
# Buffers, and what speculators keeps of the target for training.
OWN = {"own_embeddings": "embed_tokens", "own_head": "lm_head"}  # of the settings; modules of the draft
IGNORED = re.compile(r"rotary_emb\.(inv_freq|original_inv_freq)$|^verifier_norm\.weight$")


def read_model(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> DFlashModel:
    """The draft that a config and its tensors make. The tensors are taken as they are, not copied.

    Args:
        source: where they are from, for messages.

    Raises:
        ValueError: they are of a relative, or a tensor is missing, unknown or of another shape.
    """
    refuse_relatives(raw, tensors)
    names = {renamed(name, RENAMED) for name in tensors}
    own: dict[str, Any] = {name: f"{part}.weight" in names for name, part in OWN.items()}
    return build(replace(read_settings(raw), **own), tensors, source)


def build(settings: DFlashSettings, tensors: Mapping[str, Tensor], source: str) -> DFlashModel:
    """The draft with these settings and the tensors of a checkpoint; errors as above."""
    named = {renamed(name, RENAMED): tensor for name, tensor in tensors.items() if not IGNORED.search(name)}
    check_depth(named, settings.layer["num_hidden_layers"], source)
    with as_described("DFlash draft"), torch.device("meta"):
        model = DFlashModel(settings)
    check_tensors(named, model.state_dict(), source, "of DFlash ")
    model.load_state_dict(named, assign=True)
    renew_rotary(model, torch.device("cpu"))
    return model.eval().requires_grad_(False)


def tensors_of(
    model: DFlashModel, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of a draft as a checkpoint of the original dialect has them.

    Args:
        state: of the model, where other processes have parts of it.
        dtype: of its weights; as they are by default.
    """
    tensors = {original(name): tensor for name, tensor in (state or model.state_dict()).items()}
    return tensors if dtype is None else {name: tensor.to(dtype) for name, tensor in tensors.items()}


def original(name: str) -> str:
    """The name in a file of what is called `name` here: `RENAMED` undone."""
    return {"reader.fc.weight": "fc.weight", "reader.norm.weight": "hidden_norm.weight"}.get(name, name)


def meet(model: DFlashModel, target: CausalLM, name: str) -> None:
    """Bring a draft to its target, in the target's dtype.

    Args:
        name: of the draft, for messages.

    Raises:
        ValueError: the draft was made for another target.
    """
    config, settings = target.config.get_text_config(decoder=True), model.settings
    depth, width = config.num_hidden_layers, model.reader.hidden_size
    known = num_embeddings(target) if model.embed_tokens is None else model.embed_tokens.num_embeddings
    theirs = target.get_input_embeddings().weight.shape[1], sizes_of(target.get_output_embeddings())[0]
    wrong = None
    if not width == theirs[0] == theirs[1] == config.hidden_size:
        wrong = (
            f"is {width} wide, and embeddings, states and LM head are {theirs[0]}, {config.hidden_size}, {theirs[1]}"
        )
    elif settings.num_target_layers not in (None, depth):
        wrong = f"was made for {settings.num_target_layers} layers, and there are {depth}"
    elif max(settings.reads) >= depth:
        wrong = f"reads layers {settings.reads}, counted from 0, and there are {depth}"
    elif (misfit := outside(settings.layer.get("vocab_size"), target)) is not None:
        wrong = misfit
    elif settings.mask_token_id >= known:
        wrong = f"has the mask token {settings.mask_token_id}, and there are {known} embeddings"
    if wrong is not None:
        raise ValueError(
            f"{name} {wrong} in {type(target).__name__}. It takes the target's own embeddings and LM head, so it works "
            "with the target that it was trained for alone: load that one, or a draft of this one."
        )
    move(model, input_device(target), target.dtype)
    _drop_shared(model, target)
    settings = model.settings
    if settings.scales_as_target:
        multiplier, cap = (getattr(config, name, None) for name in ("output_multiplier", "final_logit_softcapping"))
        model.settings = replace(settings, output_multiplier=multiplier or 1.0, logit_cap=cap)
    model.reader.meet(settings.reads, depth - 1 if settings.reads_normed else None)


def _drop_shared(model: DFlashModel, target: CausalLM) -> None:
    """Leave out what a file holds of its target, as those of `speculators` do: a copy would cost memory for nothing."""
    theirs = {"own_embeddings": target.get_input_embeddings(), "own_head": target.get_output_embeddings()}
    for name, part in OWN.items():
        own, shared = getattr(model, part), theirs[name]
        if own is None or is_quantised(shared) or own.weight.shape != shared.weight.shape:
            continue
        if torch.equal(own.weight, shared.weight.to(own.weight)):
            setattr(model, part, None)
            dropped: dict[str, Any] = {name: False}
            model.settings = replace(model.settings, **dropped)
