"""Bring an EAGLE-3 draft to its target (`meet`), and find out what its config leaves open by what the draft guesses.

Ids of layers count what goes into layers, or what comes out; a self-check compares this and other likely misreadings.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.drafts import checkpoints
from hf_specdecpp.drafts.checkpoints import DEFAULT_THETA
from hf_specdecpp.drafts.eagle3.checkpoint import build, tensors_of
from hf_specdecpp.drafts.eagle3.model import Eagle3Drafter, Eagle3Model, Eagle3Settings
from hf_specdecpp.models.causal_lm import CausalLM, input_device, move, trying
from hf_specdecpp.models.loading import outside, tokenizer_of
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates

logger = logging.get_logger("hf_specdecpp")

STEPS = 2  # candidates of a round that are looked at: the state that the second reads tells `norm_output`
BETTER_BY = 0.1  # of all places, so that chance does not decide
BELONGS = "It was trained for another target, or is read wrongly."
GOOD = 0.4  # of the first candidates, on plain English
TEXT = """The old lighthouse at the end of the harbour had not been used for twenty years. When the town decided to sell
it, nobody expected that a young engineer would buy it and turn it into a small museum. She repaired the stairs, painted
the walls white, and collected photographs and letters from the families of the keepers. In the first summer more than
three thousand visitors came, and most of them stayed until the sun went down over the sea. Today the museum has a cafe,
a library and a room where children can learn how the lamp worked and why ships needed it."""


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


def meet(model: Eagle3Model, target: CausalLM, name: str, dtype: torch.dtype | None = None) -> None:
    """Move a draft, which messages call `name`, to its target, in its dtype or another one, and find out which layers
    it reads; `ValueError` if the draft was made for another target."""
    config, settings = target.config.get_text_config(decoder=True), model.settings
    depth, made_for, wrong = config.num_hidden_layers, settings.layer["vocab_size"], None
    found = meanings(settings, depth) if settings.state_size == config.hidden_size else [[]]
    largest = int(model.token_ids.max()) if model.token_ids is not None else -1
    if settings.state_size != config.hidden_size:
        wrong = f"reads states of {settings.state_size} numbers, and they have {config.hidden_size}"
    elif largest >= config.vocab_size:
        wrong = f"proposes token ids up to {largest}, and there are {config.vocab_size}"
    elif max(found[0], default=0) >= depth:
        wrong = f"reads the outputs of layers {found[0]}, counted from 0, and there are {depth}"
    checkpoints.meet(model, target, name, wrong or outside(made_for, target), BELONGS, dtype)
    if made_for != config.vocab_size:
        logger.warning(
            f"{name} was made for {made_for} token ids, and the target has {config.vocab_size}. That is harmless "
            "padding if it is the same tokenizer; if almost nothing is accepted, it is not."
        )
    model.meet(target, found[0])
    if len(found) > 1:
        _settle(model, target, found)


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
    heard = Heard(target, tokenizer(TEXT, return_tensors="pt")["input_ids"])

    def rate(reads: list[int]) -> float:
        model.meet(target, reads)
        return heard.agreement(model)[0]

    model.meet(target, chosen := max(found, key=rate))
    logger.info(f"eagle_aux_hidden_state_layer_ids={ids} means the outputs of layers {chosen}: these agree best.")


class Reading(NamedTuple):
    """A way to read a checkpoint, its name in words, the overrides for `from_pretrained(..., eagle3=overrides)`, and
    how often the likeliest first and second candidate of a round is then the target's choice."""

    name: str
    overrides: dict[str, Any]
    agreement: list[float]


class Heard:
    """What a target says of a text `[1, n]`, and its states there: one pass, for all readings of a draft."""

    def __init__(self, target: CausalLM, text: Tensor) -> None:
        config, reader, everything = target.config.get_text_config(decoder=True), Reader(target), StateReader()
        everything.reads = list(range(config.num_hidden_layers))
        self.target, self.width = target, target.config.get_text_config().vocab_size
        with trying(target), TargetStates(target, everything) as caught:
            final = reader.hidden_states(text.to(input_device(target)))
            states: Any = caught.take()
            self.chosen = reader.logits(final, self.width).argmax(-1)[0]
        self.text, self.states = text.to(states.device), states.split(config.hidden_size, dim=-1)

    @torch.no_grad()
    def agreement(self, model: Eagle3Model) -> list[float]:
        """How often the likeliest first and second candidate of a draft that has met it is what the target chooses."""
        drafter, found = Eagle3Drafter(model, self.target), []
        final, *outputs = self.states
        read = [final] * model.reader.reads_final + [outputs[layer] for layer in model.reader.reads]
        for step, hidden in enumerate(unrolled(drafter, self.text, torch.cat(read, dim=-1), STEPS), 1):
            drafted = drafter.logits(hidden, self.width).argmax(-1)[0]
            found.append(float((drafted.to(self.chosen.device) == self.chosen)[step:].float().mean()))
        return found


def variants(settings: Eagle3Settings, target: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """What else a checkpoint may mean beside `settings`: names, and the overrides that read it so."""
    reads, depth = settings.reads or [], target.num_hidden_layers
    for name, by in (("layers one lower", -1), ("layers one higher", 1)):
        moved = [read + by for read in reads]
        if reads and min(moved) >= 0 and max(moved) < depth:
            yield name, {"reads": moved}
    targets_own = (getattr(target, "rope_parameters", None) or {}).get("rope_theta")  # which its trainer may have taken
    for theta in dict.fromkeys((DEFAULT_THETA, targets_own)):
        if theta not in (None, settings.layer["rope_parameters"]["rope_theta"]):
            yield f"rope_theta {theta:.0f}", {"rope_theta": float(theta)}
    if settings.own_embeddings and settings.state_size == settings.layer["hidden_size"]:
        yield "the target's embeddings", {"own_embeddings": False}  # some exporters write random ones
    for flag in ("norm_before_residual", "norm_output"):
        value = not getattr(settings, flag)
        yield f"{flag} {str(value).lower()}", {flag: value}


def changed(settings: Eagle3Settings, overrides: dict[str, Any]) -> Eagle3Settings:
    changes = dict(overrides)
    if (theta := changes.pop("rope_theta", None)) is not None:
        rope = {**settings.layer["rope_parameters"], "rope_theta": theta}
        changes["layer"] = {**settings.layer, "rope_parameters": rope}
    return replace(settings, **changes)


def compare(model: Eagle3Model, target: CausalLM, text: Tensor) -> list[Reading]:
    """The draft as it is read, then its likely misreadings, each with what it guesses right of a text `[1, n]`."""
    heard = Heard(target, text)
    found = [Reading("as read", {}, heard.agreement(model))]
    tensors = tensors_of(model)
    for name, overrides in variants(model.settings, target.config.get_text_config(decoder=True)):
        other = build(changed(model.settings, overrides), tensors, "The draft")
        move(other, model.device, model.dtype)
        other.meet(target, other.settings.reads or [])
        found.append(Reading(name, overrides, heard.agreement(other)))
    return found


def better(readings: list[Reading]) -> Reading | None:
    """The reading that guesses far better than the first one, if there is one."""
    best = max(readings, key=lambda reading: sum(reading.agreement))
    return best if sum(best.agreement) > sum(readings[0].agreement) + BETTER_BY else None
