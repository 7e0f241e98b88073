"""The text of a target whose passes are captured, between its prompt and its end (`CapturedText`)."""

from __future__ import annotations

from threading import Lock
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from hf_specdecpp.caches.paths import PathRows, num_in_place
from hf_specdecpp.caches.static import width_of
from hf_specdecpp.captured import graphs
from hf_specdecpp.captured.graphs import CannotCaptureError
from hf_specdecpp.captured.rooms import why_not_in_place, why_not_rooms
from hf_specdecpp.captured.target import CapturedTarget, captured_target
from hf_specdecpp.generation.prefix import Prefix, try_pass
from hf_specdecpp.models.causal_lm import CausalLM, input_device, num_processes
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.sampling.processors import Tokens, extend
from hf_specdecpp.trees.checks import HALF_TREE_TOLERANCE, TREE_TOLERANCE
from hf_specdecpp.trees.tree_pass import TreePass

# Arguments of a forward that a captured pass knows.
KNOWN = {"attention_mask", "position_ids", "use_cache", "logits_to_keep", "output_hidden_states", "return_dict"}
_choosing = Lock()
IMAGES = "mm_encoder_outputs"  # what images and sounds were encoded to, an empty dict where there are none


class CapturedText:
    """A text in the rooms of a captured target, in the place of `Prefix` while rounds are made.

    Example: `Prefix` has read a prompt of 20 tokens into a growing cache. Their rows are copied into a room of 256, the
    rounds read and write there, and `give_back` copies the rows of the whole text into the growing cache again.

    Args:
        prefix: the text so far, which the growing cache holds but for its last token.
        passes: of the target, which no other text is using.
        reader: says which of the target's states the draft reads.
    """

    pending, mark, static = 0, None, None

    def __init__(self, prefix: Prefix, passes: CapturedTarget, reader: StateReader | None) -> None:
        self.passes, self.width = passes, 0
        self._prefix = prefix
        passes.watch(reader)
        passes.begin(prefix.cache, prefix.rows, prefix.shown, prefix.position)

    @property
    def cache(self) -> Any:
        return self._prefix.cache

    def most_candidates(self, input_ids: Tensor) -> int | None:  # noqa: ARG002 - as in `Prefix`
        """Any number: rooms grow."""
        return None

    def is_at_change(self, input_ids: Tensor) -> bool:  # noqa: ARG002 - as in `Prefix`
        return False

    def chain_inputs(self, input_ids: Tensor, candidates: Tokens) -> dict[str, Any]:
        """Arguments of `forward` for the last token of `input_ids` `[1, length]` and the candidates after it."""
        tokens = input_ids[:, -1:]
        self.width = width_of(len(candidates) + 1)
        return {"tokens": extend(tokens, candidates) if len(candidates) else tokens}

    def tree_inputs(self, input_ids: Tensor, tree_pass: TreePass, families: bool = False) -> dict[str, Any]:
        """The same for a tree, as in `Prefix`."""
        if not len(tree_pass.tree):
            return self.chain_inputs(input_ids, [])
        self.width = width_of(len(tree_pass.order))
        tokens, ancestors, depths = tree_pass.upload(input_ids.device, families, self.width)
        return {"tokens": extend(input_ids[:, -1:], tokens), "tree": (ancestors, depths)}

    def forward(self, **inputs: Any) -> Any:
        """A pass (`CapturedTarget.read`), with logits that later passes leave alone."""
        outputs = self.passes.read(inputs["tokens"], inputs.get("tree"))
        outputs.logits = outputs.logits.clone()
        return outputs

    def settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None = None) -> None:  # noqa: ARG002
        """Keep what was emitted of a pass, as in `Prefix`."""
        moves = path is not None and num_in_place(path.rows[:kept]) < kept
        self.passes.keep(kept, path.on_device[:kept] if moves and path is not None else None)

    def forget(self, count: int) -> None:
        """At the end of a text: its last `count` tokens, which were read, are not part of it."""
        self.passes.held -= count

    def read_pending(self, input_ids: Tensor) -> None:
        """Nothing is ever pending."""

    def roll_back(self) -> None:
        """What a pass wrote is not held before it is kept, so there is nothing to take back."""

    @property
    def spent(self) -> tuple[int, float, int]:
        """Graphs of this target so far, seconds that making them took, and bytes of its rooms."""
        graphs = self.passes.graphs
        return len(graphs), graphs.seconds, self.passes.num_bytes

    def give_back(self) -> Prefix:
        """Leave the text in its growing cache, and the passes to other texts."""
        self.passes.write(self.cache)
        self.passes.busy = False
        self._prefix.num_settled = self.passes.held
        return self._prefix


def captured_text(
    target: CausalLM,
    prefix: Prefix,
    reader: StateReader | None,
    config: GenerationConfig,
    input_ids: Tensor,
    fuse: bool,
) -> CapturedText | str:
    """The text after its prompt, to be continued with captured passes, or why it cannot be.

    A target's first pass is compared with one of its own: what its forward does beside attention, positions and masks
    is not known.
    """
    if (reason := _why_not(target, prefix, config)) is not None:
        return reason
    passes = captured_target(target, fuse)
    if passes.why_not is not None:
        return passes.why_not
    with _choosing:
        if passes.busy:
            return "another text is using the captured passes of this target"
        passes.busy = True
    try:
        text = CapturedText(prefix, passes, reader)
        if not passes.checked:
            passes.why_not = _difference(target, prefix, text, input_ids)
            passes.checked = passes.why_not is None
    except CannotCaptureError as error:
        passes.why_not = f"its pass cannot be captured ({error})"
    except BaseException:
        passes.busy = False
        raise
    if passes.why_not is not None:
        passes.busy = False
        return passes.why_not
    return text


def _difference(target: CausalLM, prefix: Prefix, text: CapturedText, input_ids: Tensor) -> str | None:
    """What is wrong with a captured pass, beside one of the target's own over the same token."""

    def own(inputs: dict[str, Any], _count: int) -> Any:
        return target(**inputs, return_dict=True)

    expected = try_pass(prefix, own, input_ids, False, 0)[-1].double()
    found = text.forward(**text.chain_inputs(input_ids, [])).logits[0, -1].double()
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    tolerance = TREE_TOLERANCE.get(target.dtype, HALF_TREE_TOLERANCE)
    if error <= tolerance:
        return None
    return f"a captured pass is off by {error:.2g} of the spread of its logits (rounding explains {tolerance:g})"


def _why_not(target: CausalLM, prefix: Prefix, config: GenerationConfig) -> str | None:
    """What is known of a target or a call, before anything is tried, that rules out captured passes."""
    device, devices = input_device(target), {each.device for each in target.parameters()}
    if not graphs.can_capture(device):
        return f"there are no CUDA graphs on {device.type}"
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
