"""DFlash: a draft that proposes a block of candidates with one pass, and reads the target's states; how the tensors of
checkpoints, whose names differ by dialect, are read, and a draft brought to its target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.assistant import SpecDecPPConfig
from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.drafts.checkpoints import Names, own_reader, target_of
from hf_specdecpp.drafts.dflash.config import DFlashSettings, looks_like_one, read_settings
from hf_specdecpp.drafts.dflash.model import DFlashDraft, DFlashModel
from hf_specdecpp.drafts.kind import Config, Format, Kind, Loading, OwnFile, Parts, Trainable, pinned
from hf_specdecpp.models.causal_lm import CausalLM, num_embeddings
from hf_specdecpp.models.loading import outside
from hf_specdecpp.models.quantised import is_quantised, sizes_of

TITLE = "DFlash draft"
ORIGINAL = {"reader.fc.weight": "fc.weight", "reader.norm.weight": "hidden_norm.weight"}
# What stands in the file, what it is called here. Example: `encoder.output_norm_enc.weight` is `reader.norm.weight`.
RENAMED = (
    (r"^model\.", ""),
    (r"^(encoder\.)?fc\.", "reader.fc."),
    (r"^(hidden_norm|encoder\.output_norm_enc)\.", "reader.norm."),
)
# Ignored are buffers, and what speculators keeps of the target for training.
NAMES = Names(
    RENAMED,
    r"rotary_emb\.(inv_freq|original_inv_freq)$|^verifier_norm\.weight$",
    lambda name: ORIGINAL.get(name, name),
)
OWN = {"own_embeddings": "embed_tokens", "own_head": "lm_head"}  # of the settings; modules of the draft
BELONGS = (
    "It takes the target's own embeddings and LM head, so it works with the target that it was trained for alone: load "
    "that one, or a draft of this one."
)


def read_model(raw: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str) -> DFlashModel:
    """The draft of a `config.json` and tensors (`Format.read`); `ValueError` for relatives, or misfit tensors."""
    named = NAMES.here(tensors, source)
    own: dict[str, Any] = {name: f"{part}.weight" in named for name, part in OWN.items()}
    return build(replace(read_settings(raw), **own), tensors, source)


def build(settings: DFlashSettings, tensors: Mapping[str, Tensor], source: str) -> DFlashModel:
    """The draft with these settings and the tensors of a checkpoint; errors as above."""
    named, depth = NAMES.here(tensors, source), settings.layer["num_hidden_layers"]
    return checkpoints.build(lambda: DFlashModel(settings), named, depth, source, TITLE, NAMES)


def tensors_of(
    model: DFlashModel, state: Mapping[str, Tensor] | None = None, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """The tensors of a draft as a checkpoint of the original dialect has them (`OwnFile.tensors`)."""
    return NAMES.in_file(state or model.state_dict(), dtype)


def misfit(model: DFlashModel, target: CausalLM) -> str | None:
    """What about a draft does not fit a target (`Format.misfit`)."""
    config, settings = target.config.get_text_config(decoder=True), model.settings
    depth, width = config.num_hidden_layers, model.reader.hidden_size
    known = num_embeddings(target) if model.embed_tokens is None else model.embed_tokens.num_embeddings
    theirs = target.get_input_embeddings().weight.shape[1], sizes_of(target.get_output_embeddings())[0]
    if not width == theirs[0] == theirs[1] == config.hidden_size:
        return f"is {width} wide, and embeddings, states and LM head are {theirs[0]}, {config.hidden_size}, {theirs[1]}"
    if settings.num_target_layers not in (None, depth):
        return f"was made for {settings.num_target_layers} layers, and there are {depth}"
    if max(settings.reads) >= depth:
        return f"reads layers {settings.reads}, counted from 0, and there are {depth}"
    if settings.mask_token_id >= known:
        return f"has the mask token {settings.mask_token_id}, and there are {known} embeddings"
    return outside(settings.layer.get("vocab_size"), target)


def meet(model: DFlashModel, target: CausalLM, name: str) -> None:
    """Bring a draft, `name` in messages, to its target, in its dtype; `ValueError` if it was made for another."""
    checkpoints.meet(model, target, name, misfit(model, target), BELONGS)
    config = target.config.get_text_config(decoder=True)
    # Left out is what a file holds of its target, as those of `speculators` do: a copy would cost memory for nothing.
    shared = {"own_embeddings": target.get_input_embeddings(), "own_head": target.get_output_embeddings()}
    for own_name, part in OWN.items():
        own, of_target = getattr(model, part), shared[own_name]
        if own is None or is_quantised(of_target) or own.weight.shape != of_target.weight.shape:
            continue
        if torch.equal(own.weight, of_target.weight.to(own.weight)):
            setattr(model, part, None)
            dropped: dict[str, Any] = {own_name: False}
            model.settings = replace(model.settings, **dropped)
    settings = model.settings
    if settings.scales_as_target:
        multiplier, cap = (getattr(config, name, None) for name in ("output_multiplier", "final_logit_softcapping"))
        model.settings = replace(settings, output_multiplier=multiplier or 1.0, logit_cap=cap)
    model.reader.meet(settings.reads, config.num_hidden_layers - 1 if settings.reads_normed else None)


def fields(raw: Config) -> dict[str, Any]:
    """What a config says of an assistant, of which transformers compares the size."""
    return {"target_id": target_of(raw), "vocab_size": read_settings(raw).layer.get("vocab_size")}


def words(config: SpecDecPPConfig, target: str = "the target") -> str:
    return f"DFlash blocks, which read states of {target}" if config.draft_id is None else f"DFlash {pinned(config)}"


def draft_of(config: SpecDecPPConfig, parts: Parts, how: Loading) -> DFlashDraft:
    meet(parts.module, how.target, words(config))
    return DFlashDraft(parts.module, how.target)


# A block draft; `config.draft_id` names the repository that others trained it in.
DFLASH = Kind(
    name="dflash",
    rests_on="target",
    draft=draft_of,
    describe=words,
    own=OwnFile("dflash.safetensors", "dflash", own_reader(DFlashSettings, build, TITLE), tensors_of),
    format=Format(  # the original dialect, that of transformers, and that of speculators
        read_model,
        looks_like_one,
        misfit=misfit,
        belongs=BELONGS,
        fields=fields,
        module=DFlashModel,
        served_by="vLLM and SGLang serve it from its own repository, with the method dflash",
    ),
    unserved="This assistant drafts with DFlash blocks that were trained here: their first row proposes, too, no "
    "row sees a later one, and engines have not been tried with such blocks, so nothing is exported. They serve "
    "EAGLE-3 drafts: specdecpp train --draft eagle3.",
    trainable=Trainable(
        own_layers=True,
        cannot={
            "late verdicts": "judges the state at a candidate, which a block does not read",
            "draft vocabulary": "a block has the target's own LM head, so it proposes all tokens",
            "be trained": "blocks are not trained here any more, as a trained one was slower than a single layer. Name "
            "the repository of a published DFlash draft, or train draft='conditioned' or draft='eagle3'",
        },
    ),
)
