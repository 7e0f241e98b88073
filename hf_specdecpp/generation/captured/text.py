"""What of one text is captured, from prompt to end (`Captured`): passes (`CapturedText`), rounds, or neither."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.caches.text import PathRows, num_in_place, width_of
from hf_specdecpp.captured import graphs
from hf_specdecpp.captured.graphs import CannotCaptureError
from hf_specdecpp.captured.rooms import why_not_in_place, why_not_rooms
from hf_specdecpp.captured.target import CapturedTarget, captured_target
from hf_specdecpp.generation.captured.whole import WholeRounds, shapes_of, whole_rounds, why_not_whole
from hf_specdecpp.generation.prefix import Prefix, TargetText, has_usual_inputs
from hf_specdecpp.generation.text import Text
from hf_specdecpp.models.causal_lm import devices_of, num_processes
from hf_specdecpp.models.foreign import active_modes
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.sampling.processors import Tokens, extend
from hf_specdecpp.trees.attention import HALF_TREE_TOLERANCE, TREE_TOLERANCE
from hf_specdecpp.trees.tree import TreePass

# Arguments of a forward that a captured pass knows.
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
# Prepare their inputs by themselves to change rotary frequencies, which `why_not_in_place` asks about.
SWITCHES_ROPE = {"phi3", "phimoe"}
_choosing = Lock()
logger: Any = logging.get_logger("hf_specdecpp")
BETWEEN = "captured, with logits processors between the graphs"
MEMORY = "memory ended"
IMAGES = "mm_encoder_outputs"  # what images and sounds were encoded to, an empty dict where there are none


class CapturedText(TargetText):
    """A text in the rooms of a captured target, in the place of `Prefix` while rounds are made. Any number of
    candidates has room, and nothing is ever pending: what a pass wrote is not held before it is kept.

    Example: `Prefix` has read a prompt of 20 tokens into a growing cache. Their rows are copied into a room of 256, the
    rounds read and write there, and `give_back` copies the rows of the whole text into the growing cache again.
    """

    is_captured = True

    def __init__(self, prefix: Prefix, passes: CapturedTarget, reader: StateReader | None) -> None:
        self.passes, self._prefix = passes, prefix
        passes.watch(reader)
        shown = None if prefix.shown is None else prefix.shown[None]
        passes.begin(prefix.cache, prefix.rows, shown, prefix.position)
        self.text = passes.text

    @property
    def cache(self) -> Any:
        return self._prefix.cache

    def chain_inputs(self, input_ids: Tensor, candidates: Tokens) -> dict[str, Any]:
        tokens = input_ids[:, -1:]
        self.width = width_of(len(candidates) + 1)
        return {"tokens": extend(tokens, candidates) if len(candidates) else tokens}

    def tree_inputs(self, input_ids: Tensor, tree_pass: TreePass) -> dict[str, Any]:
        if not len(tree_pass.tree):
            return self.chain_inputs(input_ids, [])
        self.width = width_of(len(tree_pass.order))
        tokens, ancestors, depths = tree_pass.upload(input_ids.device, self.width)
        return {"tokens": extend(input_ids[:, -1:], tokens), "tree": (ancestors, depths)}

    def forward(self, states: TargetStates, inputs: dict[str, Any]) -> Any:
        outputs = self.passes.read(**inputs)
        outputs.logits = outputs.logits.clone()  # which the next pass would write over
        states.give(outputs.states)
        return outputs

    def settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None = None) -> None:  # noqa: ARG002
        moves = path is not None and num_in_place(path.rows[:kept]) < kept
        self.passes.keep(kept, path.on_device[:kept] if moves and path is not None else None)

    def roll_back(self) -> None:
        """Nothing of a pass is held."""

    def give_back(self) -> Prefix:
        self.passes.write(self.cache)
        self._prefix.grow(self.text.held - self._prefix.text.held)
        return self._prefix


class Captured:
    """What of a call is captured: passes of the target, and perhaps whole rounds, which are two launches.

    The `texts` are those that have not ended with the prompt, as they lie in the rooms; the `passes` are busy with
    them.
    """

    def __init__(self, side: Any, texts: Sequence[Text]) -> None:
        # Which owns this: in a circle caches would be free for the next text only when garbage is collected.
        self.side: Any = weakref.proxy(side)
        self.texts, self.generator = list(texts), texts[0].generator
        # Of several texts passes are captured in whole rounds alone, and where a draft reads the cache.
        self._rounds_alone = len(texts) > 1 or self.generator.setup.drafter.shares_cache
        self.passes: CapturedTarget | None = None
        self.rounds: WholeRounds | None = None

    def begin(self, texts: Sequence[Text]) -> None:
        """After the prompt: go on with captured passes, where they can be had."""
        self.texts = list(texts)
        if self.generator.setup.speculation.graphs == "off" or self.passes is not None:
            return
        not_whole = why_not_whole(self.texts)
        reason = not_whole if self._rounds_alone and not_whole else self._enter()
        if reason is not None:
            self._say(reason)
        made = "step by step" if reason else f"step by step: {not_whole}"
        if self.passes is not None and not_whole is None:
            try:
                self.rounds = whole_rounds(self.texts, self.passes)
                made = "captured" if self.rounds.process is None else BETWEEN
            except torch.OutOfMemoryError as error:
                reason = memory_ended(error)
        if reason is not None and self.passes is not None:
            self.run_out(reason, texts)
        else:
            self._note(reason, made)

    def _say(self, reason: str) -> None:
        """Once, where a user may expect graphs."""
        if graphs.can_capture(self.side.device):
            logger.warning_once(
                f"Passes of {type(self.side.model).__name__} are not captured as CUDA graphs ({reason}), so they run "
                "one kernel after another: the same texts, more slowly."
            )

    def _enter(self) -> str | None:
        """Let the texts go on in rooms, or say why they cannot."""
        side, setup = self.side, self.generator.setup
        if (reason := _why_not(side)) is not None:
            return reason
        passes = captured_target(side.model, setup.speculation.compile)
        with _choosing:
            if passes.busy:
                return "another text is using the captured passes of this target"
            passes.busy = True
        try:
            passes.graphs.begin_text()
            before = passes.graphs.why_not
            reason = passes.why_not or (f"its pass cannot be captured ({before})" if before else self._try(passes))
            self.passes = None if reason else passes
            return reason
        finally:
            passes.busy = self.passes is not None

    def _try(self, passes: CapturedTarget) -> str | None:
        """Go on with these passes, or say why that cannot be, and whether it never can."""
        try:
            passes.why_not = reason = self.side.enter(passes)
        except CannotCaptureError as error:
            reason = f"its pass cannot be captured ({error})"
            passes.why_not = None if error.is_passing else reason
        except torch.OutOfMemoryError as error:
            passes.close()
            reason = memory_ended(error)
        except Exception as error:  # noqa: BLE001 - a forward may do anything with masks and caches of ours
            reason = f"its pass cannot be captured ({type(error).__name__}: {error})"
            passes.why_not = None if graphs.is_out_of_memory(error) else reason
        return reason

    def compare(self, passes: CapturedTarget, own: Callable[[Tensor], Tensor], room: int | None = None) -> str | None:
        """What is wrong with captured passes of a width that rounds may have, beside a pass of the target's own over
        the same tokens: what its forward does beside attention, positions and masks is not known, and with some widths
        it may do something else.

        Args:
            own: makes a pass over the last token of each text and further tokens, `[texts, n]`, and forgets it; its
                logits `[texts, n, vocab]`.
            room: for so many further tokens; `None`: any number.
        """
        several = len(self.texts) > 1
        widths = [width for width in self._widths() if (several, width) not in passes.checked]
        if not widths:
            return None
        left = [passes.longest - max(text.length for text in self.texts), *([] if room is None else [room])]
        most = int(max(min(widths[-1] - 1, *left), 0)) + 1
        tokens = torch.cat([_some_tokens(text.ids, widths[-1]) for text in self.texts])
        expected, cache = own(tokens[:, :most]), passes.text.with_room(passes.text.held + widths[-1])
        for width in widths:
            if width == 1 and not several:
                found = passes.read(tokens[:, :1]).logits
            else:
                places = torch.arange(width, device=tokens.device)
                found = passes.forward(cache, tokens[:, :width], places <= places[:, None], places)[0]
            if (reason := differs(found[:, :most], expected[:, :width], self.side.model.dtype)) is not None:
                return f"a captured pass over {width} tokens is {reason}"
            if width <= most:
                passes.checked.add((several, width))
        return None

    def _widths(self) -> list[int]:
        """Of all passes that rounds of these texts may have, ascending."""
        setup, found = self.generator.setup, {1}
        if not self._rounds_alone:
            found |= {1 << power for power in range(width_of(setup.most_tokens + 1).bit_length())}
        if why_not_whole(self.texts) is None:
            shapes = shapes_of(setup.speculation, self.generator.round_steps, len(self.texts))
            found |= {shape.nodes + 1 for shape in shapes}
        return sorted(found)

    def make_round(self, texts: Sequence[Text]) -> bool:
        """Make a round that is captured whole; `False` where rounds are made step by step."""
        if self.rounds is None:
            return False
        try:
            self.rounds.round(texts, self.side)
            return True
        except CannotCaptureError as error:  # of the first
            reason = f"a round cannot be captured ({error})"
            if self.rounds.rounds.is_drafting and not error.is_passing:
                self.generator.setup.drafter.give_up(str(error))
            else:
                self._say(reason)
        except torch.OutOfMemoryError as error:
            reason = memory_ended(error)
        if reason.startswith(MEMORY):  # outside of the handler, which keeps what was made last
            self.run_out(reason, texts)
            return False
        self._note(reason, f"step by step: {reason}")
        self.rounds = None
        for text in self.texts:
            text.generator.begin_again()
        if self._rounds_alone:
            self.side.leave_rooms(texts)
        return False

    def run_out(self, reason: str, texts: Sequence[Text]) -> None:
        """Memory has ended: free all that is captured, and let these texts go on without."""
        self._say(reason)
        self._note(reason, f"step by step: {reason}")
        if self.rounds is not None:  # the draft has read what the rounds emitted in rooms alone
            for text in texts:
                text.generator.stop()
        self.rounds, passes = None, self.passes
        if passes is not None:
            passes.close()
            self.side.leave_rooms(texts)
            del passes.text

    def _note(self, reason: str | None, made: str) -> None:
        """Why passes are not captured, and how rounds are made."""
        for text in self.texts:
            text.stats.uncaptured, text.stats.decided["rounds"] = reason, made

    def leave(self) -> None:
        """Leave the passes to other texts."""
        if self.passes is not None:
            self.passes.busy, self.passes = False, None

    def end(self) -> None:
        """Count what was captured. The texts in the rooms go on elsewhere."""
        passes, rounds, stats = self.passes, self.rounds, self.texts[0].stats
        if passes is None:
            return
        made = [passes.graphs, *([] if rounds is None else [rounds.rounds.graphs])]
        stats.graphs, stats.graph_seconds = sum(map(len, made)), sum(each.seconds for each in made)
        places: list[Any] = [*made, passes.rooms, *([] if rounds is None else [rounds.rounds.draft.rooms])]
        stats.graph_bytes = sum(each.num_bytes for each in places)
        named = zip(("its pass", "a round"), made, strict=False)
        later = [f"{what} cannot be captured ({each.why_not})" for what, each in named if each.why_not]
        stats.uncaptured = stats.uncaptured or next(iter(later), None)
        self.rounds = None  # which refers to the texts
        self.leave()


def memory_ended(error: torch.OutOfMemoryError) -> str:
    """The reason why something is not captured."""
    return f"{MEMORY} ({str(error).partition('. ')[0]})"


def _some_tokens(ids: Tensor, count: int) -> Tensor:
    """The last token of a text `[1, length]` and others after it, `[1, count]`: of those before the last, few, since
    further back there may be an image."""
    latest = ids[:, -4:].flip(1)
    return latest.repeat(1, -(-count // latest.shape[1]))[:, :count]


def differs(found: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """What is wrong with the logits `[..., vocab]` of a captured pass, beside those of the target's own.

    In half precision half of the tokens have to be off: at single tokens a router may choose other experts."""
    expected = expected.double()
    errors = (found.double() - expected).norm(dim=-1) / (expected - expected.mean(-1, keepdim=True)).norm(dim=-1)
    exact = TREE_TOLERANCE.get(dtype)
    error, tolerance = float(errors.median() if exact is None else errors.max()), exact or HALF_TREE_TOLERANCE
    if error <= tolerance:
        return None
    return f"off by {error:.2g} of the spread of its logits (rounding explains {tolerance:g})"


def _why_not(side: Any) -> str | None:
    """What is known of a target or a call, before anything is tried, that rules out captured passes."""
    target, config = side.model, side.config
    if not graphs.can_capture(side.device):
        return f"there are no CUDA graphs on {side.device.type}"
    if len(devices_of(target)) > 1 or num_processes(target) > 1 or hasattr(target, "hf_device_map"):
        return "the target is spread over several devices or offloaded"
    if getattr(target, "is_quantized", False):
        return "the target is quantised"
    if torch.is_autocast_enabled(side.device.type):  # whose copies of weights last as long as its context
        return "autocast is on"
    if (reason := why_not_in_place(target) or why_not_rooms(side.growing)) is not None:
        return reason
    if side.foreign is not None:
        return f"the target runs {side.foreign.name}, which a graph would not call"
    if modes := active_modes():
        return f"the call is made in a mode of PyTorch, {type(modes[0]).__name__}, which a graph would not call"
    if config.output_hidden_states or config.output_attentions:
        return "the states or attentions of all layers are asked for"
    model_kwargs = side.forward_arguments
    given = {name for name, value in model_kwargs.items() if value is not None and value is not side.growing}
    if model_kwargs.get(IMAGES) == {}:
        given.remove(IMAGES)
    if others := given - KNOWN:
        return f"its forward is given {', '.join(sorted(others))}"
    if not has_usual_inputs(target) and target.config.model_type not in SWITCHES_ROPE:
        return "it prepares its inputs in a way of its own"
    return None
