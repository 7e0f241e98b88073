"""Bring an EAGLE-3 draft to its target (`meet`), and find out which layers it reads where its config leaves that open:
ids of layers count what goes into layers, or what comes out, and the right ones make the draft guess better."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers.utils import logging

from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.drafts.acceptance import agreement, texts_for
from hf_specdecpp.drafts.eagle3.model import Eagle3Drafter, Eagle3Model, Eagle3Settings
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.loading import outside, tokenizer_of

logger = logging.get_logger("hf_specdecpp")

BELONGS = "It was trained for another target, or is read wrongly."


def usual_reads(depth: int) -> list[int]:
    """The layers whose outputs are read where a checkpoint names none, of so many: a low, a middle and a high one.

    Example: of 32 layers 1, 15 and 28, which are the ids 2, 16 and 29 of what goes into a layer.
    """
    return [layer - 1 for layer in (2, depth // 2, depth - 3)]


def readings(ids: Sequence[int] | None, depth: int) -> list[list[int]]:
    """The layers whose outputs the ids of a checkpoint may mean, the likelier meaning first; `ValueError` if the target
    has no such layers.

    One convention counts what goes into a layer (EAGLE, vLLM, speculators): id j is the output of layer j - 1. The
    other counts outputs (SpecForge, NVIDIA): id j is the output of layer j. The usual list tells which it is; of others
    the file does not say, but one that begins with 1 is rather of the second.

    Example: with a depth of 32 `[1, 15, 28]` means `[1, 15, 28]`, `[2, 16, 29]` means `[1, 15, 28]`, and `[2, 18, 30]`
    means `[1, 17, 29]` or `[2, 18, 30]`.
    """
    if ids is None:
        if depth < 4:
            raise ValueError(
                f"The checkpoint names no layers, and a target of {depth} layers is too small for the usual ones. Say "
                "which, counted from 0: eagle3={'reads': [...]}."
            )
        return [usual_reads(depth)]
    after, before = list(ids), [each - 1 for each in ids]
    likelier_first = [after, before] if ids[0] == 1 else [before, after]
    found = [reading for reading in likelier_first if min(reading) >= 0 and max(reading) < depth]
    if not found:
        raise ValueError(
            f"The draft reads layers {list(ids)} of its target, and this one has {depth}. It was trained for another "
            "target."
        )
    usual = usual_reads(depth)
    return [usual] if usual in found else found


def meanings(settings: Eagle3Settings, depth: int) -> list[list[int]]:
    """The layers whose outputs a draft may read of a target of so many, the likelier ones first; errors as above."""
    if settings.reads is not None:
        return [settings.reads]
    return readings(settings.layer_ids, depth) if settings.num_reads else [[]]


def misfit(model: Eagle3Model, target: CausalLM) -> str | None:
    """What about a draft does not fit a target (`Format.misfit`); `ValueError` if the target lacks layers that a
    checkpoint names."""
    config, settings = target.config.get_text_config(decoder=True), model.settings
    depth, largest = config.num_hidden_layers, int(model.token_ids.max()) if model.token_ids is not None else -1
    if settings.state_size != config.hidden_size:
        return f"reads states of {settings.state_size} numbers, and they have {config.hidden_size}"
    if largest >= config.vocab_size:
        return f"proposes token ids up to {largest}, and there are {config.vocab_size}"
    if max(found := meanings(settings, depth)[0], default=0) >= depth:
        return f"reads the outputs of layers {found}, counted from 0, and there are {depth}"
    return outside(settings.layer["vocab_size"], target)


def meet(model: Eagle3Model, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> None:
    """Move a draft, which messages call `name`, to its target, in its dtype or another one, and find out which layers
    it reads; `ValueError` if the draft was made for another target."""
    checkpoints.meet(model, target, name, misfit(model, target), BELONGS, dtype)
    config, made_for = target.config.get_text_config(decoder=True), model.settings.layer["vocab_size"]
    if made_for != config.vocab_size:
        logger.warning(
            f"{name} was made for {made_for} token ids, and the target has {config.vocab_size}. That is harmless "
            "padding if it is the same tokenizer; if almost nothing is accepted, it is not."
        )
    found = meanings(model.settings, config.num_hidden_layers)
    model.meet(target, found[0])
    if len(found) > 1:
        _settle(model, target, found)


def _settle(model: Eagle3Model, target: CausalLM, found: list[list[int]]) -> None:
    """Read the layers with which the draft guesses best, where its config may mean several."""
    ids = model.settings.layer_ids
    texts = texts_for(target, tokenizer_of(target.config.name_or_path))
    if not texts:
        logger.warning(
            f"eagle_aux_hidden_state_layer_ids={ids} may mean the outputs of layers {' or '.join(map(str, found))}; "
            f"the former are read. If little is accepted, say otherwise: eagle3={{'reads': {found[1]}}}."
        )
        return

    def rate(reads: list[int]) -> list[float]:
        model.meet(target, reads)
        return agreement(Eagle3Drafter(model, target), target, texts)

    model.meet(target, chosen := max(found, key=rate))
    logger.info(f"eagle_aux_hidden_state_layer_ids={ids} means the outputs of layers {chosen}: these agree best.")
