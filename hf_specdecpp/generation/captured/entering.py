"""Which parts make the rounds of a call: whole rounds that are captured, captured passes, or neither (`on_graphs`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from threading import Lock

import torch

from hf_specdecpp.caches.text import width_of
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget, captured_target
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError
from hf_specdecpp.cuda_graphs.room_cache import why_not_in_place, why_not_rooms
from hf_specdecpp.generation.captured.graph_drafts import graph_drafts, shapes_of, why_not_whole
from hf_specdecpp.generation.captured.graph_target import (
    PassGraphs,
    RoundGraphs,
    are_captured_whole_alone,
    note,
    warn,
    with_captured_passes,
)
from hf_specdecpp.generation.prefix import has_usual_inputs
from hf_specdecpp.generation.target import Drafts, GraphsFailedError, RoundTarget, TargetSide
from hf_specdecpp.generation.text import Text
from hf_specdecpp.models.causal_lm import cache_among, devices_of, num_processes
from hf_specdecpp.models.foreign import active_modes

# Arguments of a forward that a captured pass knows.
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
# Prepare their inputs by themselves to change rotary frequencies, which `why_not_in_place` asks about.
SWITCHES_ROPE = {"phi3", "phimoe"}
_choosing = Lock()
BETWEEN = "captured, with logits processors between the graphs"
IMAGES = "mm_encoder_outputs"  # what images and sounds were encoded to, an empty dict where there are none


def on_graphs(texts: Sequence[Text], drafts: Drafts, usual: TargetSide) -> tuple[Drafts, RoundTarget]:
    """What makes the rounds of texts whose prompts were read: whole rounds or passes that are captured, where they can
    be had, or what is given; `stats` say which, and why."""
    if not texts or texts[0].generator.setup.speculation.graphs == "off":
        return drafts, usual
    not_whole = why_not_whole(texts)
    reason, passes = not_whole, None
    if not not_whole or not are_captured_whole_alone(texts):
        reason, passes = _enter(texts, usual)
    if passes is None:
        warn(usual, str(reason))
        note(texts, reason, "step by step")
        return drafts, usual
    if not_whole:
        note(texts, None, f"step by step: {not_whole}")
        return with_captured_passes(texts, passes, usual)
    try:
        own = graph_drafts(texts, passes)
        note(texts, None, "captured" if own.process is None else BETWEEN)
        return own, RoundGraphs(own, texts, passes, drafts, usual)
    except torch.OutOfMemoryError as error:
        failure = GraphsFailedError.of(error)
    return PassGraphs(texts, passes, drafts, usual).instead(failure, texts)


def _enter(texts: Sequence[Text], usual: TargetSide) -> tuple[str | None, CapturedTarget | None]:
    """Let texts go on in captured passes, or say why they cannot."""
    if (reason := _why_not(usual)) is not None:
        return reason, None
    passes = captured_target(usual.model, usual.generator.setup.speculation.compile)
    with _choosing:
        if passes.busy:
            return "another text is using the captured passes of this target", None
        passes.busy = True
    passes.graphs.begin_text()
    before = passes.graphs.why_not
    try:
        reason = passes.why_not or (f"its pass cannot be captured ({before})" if before else _try(passes, usual, texts))
    except BaseException:
        passes.busy = False
        raise
    passes.busy = reason is None
    return reason, None if reason else passes


def _try(passes: CapturedTarget, usual: TargetSide, texts: Sequence[Text]) -> str | None:
    """Go on with these passes, or say why that cannot be, and whether it never can."""
    try:
        usual.enter(passes)
        passes.why_not = reason = passes.compare(
            [text.ids for text in texts], _widths(texts), partial(usual.own_logits, texts)
        )
    except CannotCaptureError as error:
        reason = f"its pass cannot be captured ({error})"
        passes.why_not = None if error.is_passing else reason
    except torch.OutOfMemoryError as error:
        passes.close()
        reason = str(GraphsFailedError.of(error))
    except Exception as error:  # noqa: BLE001 - a forward may do anything with masks and caches of ours
        reason = f"its pass cannot be captured ({type(error).__name__}: {error})"
        passes.why_not = None if graphs.is_out_of_memory(error) else reason
    return reason


def _widths(texts: Sequence[Text]) -> set[int]:
    """Of all passes that rounds of these texts may have."""
    setup, found = texts[0].generator.setup, {1}
    if not are_captured_whole_alone(texts):
        found |= {1 << power for power in range(width_of(setup.most_tokens + 1).bit_length())}
    if why_not_whole(texts) is None:
        shapes = shapes_of(setup.speculation, texts[0].generator.round_steps, len(texts))
        found |= {shape.nodes + 1 for shape in shapes}
    return found


def _why_not(side: TargetSide) -> str | None:
    """What is known of a target or a call, before anything is tried, that rules out captured passes."""
    target, config, model_kwargs = side.model, side.config, side.forward_arguments
    if not graphs.can_capture(side.device):
        return f"there are no CUDA graphs on {side.device.type}"
    if len(devices_of(target)) > 1 or num_processes(target) > 1 or hasattr(target, "hf_device_map"):
        return "the target is spread over several devices or offloaded"
    if getattr(target, "is_quantized", False):
        return "the target is quantised"
    if torch.is_autocast_enabled(side.device.type):  # whose copies of weights last as long as its context
        return "autocast is on"
    if (reason := why_not_in_place(target) or why_not_rooms(cache := cache_among(model_kwargs))) is not None:
        return reason
    if side.foreign is not None:
        return f"the target runs {side.foreign.name}, which a graph would not call"
    if modes := active_modes():
        return f"the call is made in a mode of PyTorch, {type(modes[0]).__name__}, which a graph would not call"
    if config.output_hidden_states or config.output_attentions:
        return "the states or attentions of all layers are asked for"
    given = {name for name, value in model_kwargs.items() if value is not None and value is not cache}
    if model_kwargs.get(IMAGES) == {}:
        given.remove(IMAGES)
    if others := given - KNOWN:
        return f"its forward is given {', '.join(sorted(others))}"
    if not has_usual_inputs(target) and target.config.model_type not in SWITCHES_ROPE:
        return "it prepares its inputs in a way of its own"
    return None
