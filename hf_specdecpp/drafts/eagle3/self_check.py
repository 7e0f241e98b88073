"""Does an EAGLE-3 draft guess what its target says? For its config as read, and for likely misreadings of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.config.foreign import DEFAULT_THETA
from hf_specdecpp.drafting.unrolling import unrolled
from hf_specdecpp.drafts.eagle3.checkpoint import build, tensors_of
from hf_specdecpp.drafts.eagle3.drafter import Eagle3Drafter
from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.drafts.eagle3.settings import Eagle3Settings
from hf_specdecpp.models.causal_lm import CausalLM, input_device, move, trying
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import StateReader, TargetStates

STEPS = 2  # candidates of a round that are looked at: the state that the second reads tells `norm_output`
BETTER_BY = 0.1  # of all places, so that chance does not decide
GOOD = 0.4  # of the first candidates, on plain English
TEXT = """The old lighthouse at the end of the harbour had not been used for twenty years. When the town decided to sell
it, nobody expected that a young engineer would buy it and turn it into a small museum. She repaired the stairs, painted
the walls white, and collected photographs and letters from the families of the keepers. In the first summer more than
three thousand visitors came, and most of them stayed until the sun went down over the sea. Today the museum has a cafe,
a library and a room where children can learn how the lamp worked and why ships needed it."""


@dataclass(frozen=True)
class Reading:
    """A way to read a checkpoint.

    Attributes:
        name: in words.
        overrides: what makes `from_pretrained(..., eagle3=overrides)` read it in this way.
        agreement: how often the likeliest first and second candidate of a round is the target's choice.
    """

    name: str
    overrides: dict[str, Any]
    agreement: list[float]


class Heard:
    """What a target says of a text, and its states there: one pass, for all readings of a draft.

    Args:
        text: `[1, n]` token ids.
    """

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
    """What else a checkpoint may mean: names, and the overrides that read it so.

    Args:
        settings: as read, with `reads`.
        target: its text config.
    """
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
    """The settings with these overrides."""
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


def choose(model: Eagle3Model, target: CausalLM, candidates: list[list[int]], text: Tensor) -> list[int]:
    """Of several lists of layers that a checkpoint may mean, that with which it guesses best."""
    heard, rated = Heard(target, text), []
    for reads in candidates:
        model.meet(target, reads)
        rated.append(heard.agreement(model)[0])
    return candidates[rated.index(max(rated))]
