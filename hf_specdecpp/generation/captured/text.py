"""What of one text is captured, from prompt to end (`Captured`): passes (`CapturedText`), rounds, or neither."""

from __future__ import annotations

import weakref
from threading import Lock
from typing import Any

from torch import Tensor

from hf_specdecpp.caches.text import PathRows, num_in_place, width_of
from hf_specdecpp.captured import graphs
from hf_specdecpp.captured.graphs import CannotCaptureError
from hf_specdecpp.captured.rooms import why_not_in_place, why_not_rooms
from hf_specdecpp.captured.target import CapturedTarget, captured_target
from hf_specdecpp.generation.captured.rounds import RoundsOfText, rounds_of
from hf_specdecpp.generation.prefix import Prefix, TargetText, try_pass
from hf_specdecpp.generation.text import Text
from hf_specdecpp.models.causal_lm import CausalLM, num_processes
from hf_specdecpp.models.target_states import StateReader, TargetStates
from hf_specdecpp.sampling.processors import Tokens, extend
from hf_specdecpp.trees.checks import HALF_TREE_TOLERANCE, TREE_TOLERANCE
from hf_specdecpp.trees.tree import TreePass

# Arguments of a forward that a captured pass knows.
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
_choosing = Lock()
IMAGES = "mm_encoder_outputs"  # what images and sounds were encoded to, an empty dict where there are none


class CapturedText(TargetText):
    """A text in the rooms of a captured target, in the place of `Prefix` while rounds are made. Any number of
    candidates has room, and nothing is ever pending: what a pass wrote is not held before it is kept.

    Example: `Prefix` has read a prompt of 20 tokens into a growing cache. Their rows are copied into a room of 256, the
    rounds read and write there, and `give_back` copies the rows of the whole text into the growing cache again.

    Args:
        prefix: the text so far, which the growing cache holds but for its last token.
        passes: of the target, which no other text is using.
        reader: says which of the target's states the draft reads.
    """

    is_captured = True

    def __init__(self, prefix: Prefix, passes: CapturedTarget, reader: StateReader | None) -> None:
        self.passes, self._prefix = passes, prefix
        passes.watch(reader)
        passes.begin(prefix.cache, prefix.rows, prefix.shown, prefix.position)
        self.text = passes.text

    @property
    def cache(self) -> Any:
        return self._prefix.cache

    def chain_inputs(self, input_ids: Tensor, candidates: Tokens) -> dict[str, Any]:
        tokens = input_ids[:, -1:]
        self.width = width_of(len(candidates) + 1)
        return {"tokens": extend(tokens, candidates) if len(candidates) else tokens}

    def tree_inputs(self, input_ids: Tensor, tree_pass: TreePass, families: bool = False) -> dict[str, Any]:
        if not len(tree_pass.tree):
            return self.chain_inputs(input_ids, [])
        self.width = width_of(len(tree_pass.order))
        tokens, ancestors, depths = tree_pass.upload(input_ids.device, families, self.width)
        return {"tokens": extend(input_ids[:, -1:], tokens), "tree": (ancestors, depths)}

    def forward(self, states: TargetStates, inputs: dict[str, Any], count: int) -> Any:  # noqa: ARG002
        outputs = self.passes.read(**inputs)
        outputs.logits = outputs.logits.clone()  # which the next pass would write over
        states.give(outputs.states)
        return outputs

    def settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None = None) -> None:  # noqa: ARG002
        moves = path is not None and num_in_place(path.rows[:kept]) < kept
        self.passes.keep(kept, path.on_device[:kept] if moves and path is not None else None)

    def forget(self, count: int) -> None:
        """At the end of a text: its last `count` tokens, which were read, are not part of it."""
        self.text.held -= count

    def roll_back(self) -> None:
        """Nothing of a pass is held."""

    @property
    def spent(self) -> tuple[int, float, int]:
        """Graphs of this target so far, seconds that making them took, and bytes of its rooms."""
        graphs = self.passes.graphs
        return len(graphs), graphs.seconds, self.passes.rooms.num_bytes

    def give_back(self) -> Prefix:
        """Leave the text in its growing cache, and the passes to other texts."""
        self.passes.write(self.cache)
        self.passes.busy = False
        self._prefix.text.held = self.text.held
        return self._prefix


class Captured:
    """The captured part of one text.

    Args:
        side: the target's side of it, an `OneTarget`.

    Attributes:
        rounds: where a round is two launches.
        drafts: whether anything can still be drafted.
    """

    def __init__(self, side: Any) -> None:
        # Which owns this: in a circle caches would be free for the next text only when garbage is collected.
        self.side: Any = weakref.proxy(side)
        self.drafts = True
        self.rounds: RoundsOfText | None = None

    def begin(self, input_ids: Tensor) -> None:
        """After the prompt: go on with captured passes, where they can be had."""
        if self.side.generator.setup.speculation.graphs == "off" or self.side.prefix.is_captured:
            return
        self.side.stats.uncaptured = self._enter(input_ids)
        self.rounds = rounds_of(self.side)

    def _enter(self, input_ids: Tensor) -> str | None:
        """Let the text go on in rooms, or say why it cannot.

        A target's first pass is compared with one of its own: what its forward does beside attention, positions and
        masks is not known.
        """
        side, setup = self.side, self.side.generator.setup
        if (reason := _why_not(side)) is not None:
            return reason
        passes = captured_target(side.model, setup.speculation.compile)
        if passes.why_not is not None:
            return passes.why_not
        with _choosing:
            if passes.busy:
                return "another text is using the captured passes of this target"
            passes.busy = True
        try:
            text = CapturedText(side.prefix, passes, setup.drafter.reads)
            if not passes.checked:
                passes.why_not = _difference(side.model, side.prefix, text, input_ids)
                passes.checked = passes.why_not is None
        except CannotCaptureError as error:
            passes.why_not = f"its pass cannot be captured ({error})"
        except BaseException:
            passes.busy = False
            raise
        if passes.why_not is not None:
            passes.busy = False
            return passes.why_not
        side.compare_passes()  # with the target's usual ones, which the verdict compares with
        side.prefix = text
        return None

    def make_round(self, text: Text) -> bool:
        """Make a round that is captured whole; `False` where rounds are made step by step."""
        if self.rounds is None:
            return False
        try:
            self.rounds.round(text)
        except CannotCaptureError as error:
            made, self.rounds = self.rounds.made, None
            self.side.stats.uncaptured = f"a round cannot be captured ({error})"
            # What a draft would have to read of the target is gone after a round.
            self.drafts = not made
            if self.drafts:
                self.side.generator.begin_again()
            return False
        return True

    def end(self) -> Prefix:
        """The text in the cache that `generate()` returns."""
        side, text, stats = self.side, self.side.prefix, self.side.stats
        if text.is_captured:
            stats.graphs, stats.graph_seconds, stats.graph_bytes = text.spent
            stats.uncaptured = stats.uncaptured or text.passes.why_not
            if self.rounds is not None:
                stats.graphs += len(self.rounds.graphs)
                stats.graph_seconds += self.rounds.graphs.seconds
                self.rounds = None  # which refers to this text
            side.prefix = text = text.give_back()
        return text


def _difference(target: CausalLM, prefix: Prefix, text: CapturedText, input_ids: Tensor) -> str | None:
    """What is wrong with a captured pass, beside one of the target's own over the same token."""

    def own(inputs: dict[str, Any], _count: int) -> Any:
        return target(**inputs, return_dict=True)

    expected = try_pass(prefix, own, input_ids, False, 0)[-1].double()
    found = text.passes.read(**text.chain_inputs(input_ids, [])).logits[0, -1].double()
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    tolerance = TREE_TOLERANCE.get(target.dtype, HALF_TREE_TOLERANCE)
    if error <= tolerance:
        return None
    return f"a captured pass is off by {error:.2g} of the spread of its logits (rounding explains {tolerance:g})"


def _why_not(side: Any) -> str | None:
    """What is known of a target or a call, before anything is tried, that rules out captured passes."""
    target, prefix, config = side.model, side.prefix, side.config
    if side.generator.setup.drafter.shares_cache:
        return "the draft reads the target's own cache"
    if not graphs.can_capture(side.device):
        return f"there are no CUDA graphs on {side.device.type}"
    devices = {each.device for each in target.parameters()}
    if len(devices) > 1 or num_processes(target) > 1 or hasattr(target, "hf_device_map"):
        return "the target is spread over several devices or offloaded"
    if getattr(target, "is_quantized", False):
        return "the target is quantised"
    if (reason := why_not_in_place(target) or why_not_rooms(prefix.cache)) is not None:
        return reason
    if config.output_hidden_states or config.output_attentions:
        return "the states or attentions of all layers are asked for"
    given = {name for name, value in prefix.model_kwargs.items() if value is not None and value is not prefix.cache}
    if prefix.model_kwargs.get(IMAGES) == {}:
        given.remove(IMAGES)
    if others := given - KNOWN:
        return f"its forward is given {', '.join(sorted(others))}"
    if not prefix.makes_usual_inputs:
        return "it prepares its inputs in a way of its own"
    return None
