"""Bring an EAGLE-3 draft to its target (`meet`): does it fit, and which layers does it read?"""

from __future__ import annotations

import torch
from transformers.utils import logging

from hf_specdecpp.drafts.eagle3.layer_ids import meanings
from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.drafts.eagle3.self_check import TEXT, choose
from hf_specdecpp.models.causal_lm import CausalLM, input_device, move
from hf_specdecpp.models.vocabulary import outside, tokenizer_of

logger = logging.get_logger("hf_specdecpp")


def meet(model: Eagle3Model, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> None:
    """Move a draft to where its target is, and find out which layers it reads.

    Args:
        name: of the draft, for messages.
        dtype: by default the target's.

    Raises:
        ValueError: the draft was made for another target.
    """
    _check_fits(model, target, name)
    move(model, input_device(target), dtype or target.dtype)
    depth = target.config.get_text_config(decoder=True).num_hidden_layers
    found = meanings(model.settings, depth)
    if max(found[0], default=0) >= depth:
        raise ValueError(
            f"{name} reads the outputs of layers {found[0]}, counted from 0, and {type(target).__name__} has "
            f"{depth} layers. It was trained for another target, or read wrongly."
        )
    model.meet(target, found[0])
    if len(found) > 1:
        _settle(model, target, found)


def _check_fits(model: Eagle3Model, target: CausalLM, name: str) -> None:
    """Raise `ValueError` unless a draft was made for a target of these sizes."""
    config = target.config.get_text_config(decoder=True)
    settings = model.settings
    if settings.state_size != config.hidden_size:
        raise ValueError(
            f"{name} reads states of {settings.state_size} numbers, and those of {type(target).__name__} have "
            f"{config.hidden_size}. It was trained for another target."
        )
    largest = int(model.token_ids.max()) if model.token_ids is not None else -1
    if largest >= config.vocab_size:
        raise ValueError(
            f"{name} proposes token ids up to {largest}, and {type(target).__name__} has {config.vocab_size}. It was "
            "trained for a target with another tokenizer."
        )
    if (wrong := outside(settings.layer["vocab_size"], target)) is not None:
        raise ValueError(f"{name} {wrong} in {type(target).__name__}. It was trained for another target.")
    if settings.layer["vocab_size"] != config.vocab_size:
        logger.warning(
            f"{name} was made for {settings.layer['vocab_size']} token ids, and the target has {config.vocab_size}. "
            "That is harmless padding if it is the same tokenizer; if almost nothing is accepted, it is not."
        )


def _settle(model: Eagle3Model, target: CausalLM, found: list[list[int]]) -> None:
    """Read the layers with which the draft guesses best, where its config may mean several."""
    ids = model.settings.layer_ids
    tokenizer = tokenizer_of(target.config.name_or_path)
    if tokenizer is None:
        logger.warning(
            f"eagle_aux_hidden_state_layer_ids={ids} may mean the outputs of layers {' or '.join(map(str, found))}; "
            f"the former are read. If little is accepted, say otherwise: eagle3={{'reads': {found[1]}}}."
        )
        return
    text = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    chosen = choose(model, target, found, text)
    model.meet(target, chosen)
    logger.info(f"eagle_aux_hidden_state_layer_ids={ids} means the outputs of layers {chosen}: these agree best.")
