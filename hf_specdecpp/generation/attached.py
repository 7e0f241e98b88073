"""Attach an assistant to a target and detach it: a class swap that keeps the class's name.

transformers looks its decoding method up on the class of the model, so the target's class is replaced by a subclass of
it. Nothing else of the target is touched, and only calls with an attached assistant take another path.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.utils import logging

from hf_specdecpp.caches.rollback import check_states
from hf_specdecpp.caches.static_targets import as_growing, as_static, prepare_static
from hf_specdecpp.captured import graphs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.refusals import LateRefusalError, check_batch, check_inputs, check_mode, check_object
from hf_specdecpp.generation.several.batch import BatchDecoding
from hf_specdecpp.generation.several.ranks import RankDecoding, check_ranks, is_spread
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.cpu_products import FasterProducts
from hf_specdecpp.sampling.processors import Processing, for_row


class Assistant(Protocol):
    """What this door asks of an assistant, which is a module (`SpecDecPPAssistant`)."""

    speculation: SpeculationConfig
    stats: SpeculationStats

    def start_generation(
        self,
        target: CausalLM,
        config: GenerationConfig,
        logits_processor: Any,
        attention_mask: Tensor | None,
        rows: int = 1,
        products: FasterProducts | None = None,
    ) -> SpecDecPPCandidateGenerator:
        """Begin one `generate()` call of `target`, or one of the `rows` of a batch."""


# Which assistants are attached to which target. Kept here, so that a target's attributes stay as they are.
_attached: WeakKeyDictionary[CausalLM, WeakSet[nn.Module]] = WeakKeyDictionary()

logger = logging.get_logger("hf_specdecpp")

BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE, GenerationMode.GROUP_BEAM_SEARCH)
# Arguments of transformers' decoding method that are not for the model's forward.
MODE_KWARGS = ("synced_gpus", "tokenizer", "assistant_tokenizer")


def attach(assistant: nn.Module, target: CausalLM) -> None:
    """Make `target.generate(assistant_model=assistant)` run our decoding loop.

    Raises:
        ValueError: the target cannot be assisted.
    """
    check_target(target, recurrent=True)
    check_states(target)
    if not isinstance(target, AttachedMixin):
        original = type(target)
        names: dict[str, Any] = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            # Read by assisted generation only. Some classes say that they keep a recurrent state though this model of
            # theirs, as `check_target` found, has none.
            "_is_stateful": False,
        }
        target.__class__ = type(original.__name__, (AttachedMixin, original), names)
    assistants = _attached.setdefault(target, WeakSet())
    if assistant not in assistants:
        assistants.add(assistant)
        finalize(assistant, _restore_class, ref(target)).atexit = False


def detach(assistant: nn.Module, target: CausalLM) -> None:
    """Undo `attach`. The target's class is restored when its last assistant leaves."""
    assistants = _attached.get(target)
    if assistants is None or assistant not in assistants:
        return
    assistants.discard(assistant)
    set_default(assistant, target, False)
    _restore_class(ref(target))


def _restore_class(target_ref: ref[CausalLM]) -> None:
    """Give a target its own class back once no assistant is attached to it any more, detached or deleted."""
    target = target_ref()
    if target is not None and target in _attached and not list(_attached[target]):
        del _attached[target]
        target.__class__ = original_class(target)


def is_attached(assistant: Any, target: CausalLM) -> bool:
    return assistant in _attached.get(target, ())


def is_default(assistant: Any, target: CausalLM) -> bool:
    """Whether calls without an assistant run this one."""
    return isinstance(target, AttachedMixin) and target.default_assistant is assistant


def set_default(assistant: Any, target: CausalLM, value: bool) -> None:
    """Whether calls without an assistant are to run this attached one, in the place of another one; if not, any other
    stays."""
    if value or is_default(assistant, target):
        type(target).default_assistant = assistant if value else None


def targets_of(assistant: nn.Module) -> list[CausalLM]:
    """All targets that an assistant is attached to."""
    return [target for target, assistants in _attached.items() if assistant in assistants]


def original_class(target: CausalLM) -> type[CausalLM]:
    """The class that the target had before anything was attached."""
    return type(target).__mro__[2] if isinstance(target, AttachedMixin) else type(target)


class AttachedMixin:
    """Overrides of an attached target. Calls without an attached assistant go to the original methods.

    Attributes:
        default_assistant: drafts for calls without an assistant. It belongs to the class, which is the target's own, so
            that neither the target's attributes nor its copies have it, and that it lives as long as the target.
    """

    default_assistant: ClassVar[Any] = None

    def _validate_generation_mode(
        self: CausalLM, mode: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]
    ) -> None:
        original: Any = super()
        assistant: Any = mode_kwargs.get("assistant_model")
        check_object(assistant)
        if is_attached(assistant, self):
            check_target(self, recurrent=True)
            check_states(self)
            check_mode(mode, config, mode_kwargs)
            # transformers' own check compares padded vocabulary sizes; tokenizers were compared when attaching.
            mode_kwargs = {name: value for name, value in mode_kwargs.items() if name != "assistant_model"}
            # Nor are several sequences a matter for it.
            config = copy.copy(config)
            config.num_return_sequences = 1
        elif self.default_assistant is not None and mode in BEAMS:
            _leave_out(self, f"num_beams={config.num_beams}, and it proposes one continuation of one sequence.")
        original._validate_generation_mode(mode, config, mode_kwargs)

    def _sample(
        self: CausalLM,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **kwargs: Any,
    ) -> Any:
        original: Any = super()
        given = input_ids, logits_processor, stopping_criteria, generation_config
        # As another model's draft it has to say how sure it is of each token.
        if self.default_assistant is None or generation_config.is_assistant:
            return original._sample(*given, **kwargs)
        try:
            check_target(self, recurrent=True)
            check_states(self)
            check_mode(GenerationMode.ASSISTED_GENERATION, generation_config, kwargs)
            decode = decoding_of(self, self.default_assistant, *given, **kwargs)
        except ValueError as refusal:
            _leave_out(self, str(refusal))
        else:
            try:
                return decode(input_ids)
            except LateRefusalError as refusal:
                _leave_out(self, str(refusal))
        return original._sample(*given, **kwargs)

    # `inputs_tensor` is named because transformers reads from the signature whether to pass it.
    def _assisted_decoding(
        self: CausalLM,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        inputs_tensor: Tensor | None = None,
        assistant_model: Any = None,
        **kwargs: Any,
    ) -> Any:
        original: Any = super()
        given = input_ids, logits_processor, stopping_criteria, generation_config
        if not is_attached(assistant_model, self):
            kwargs |= {"inputs_tensor": inputs_tensor, "assistant_model": assistant_model}
            return original._assisted_decoding(*given, **kwargs)
        return decoding_of(self, assistant_model, *given, **kwargs)(input_ids)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle of an attached target is an ordinary, unattached model. Made by `object.__new__`, since
        # pickle takes its usual constructor for the very class of the object only.
        reduced: Any = super().__reduce_ex__(protocol)
        _, _, *state = reduced
        return (object.__new__, (original_class(self),), *state)


def decoding_of(
    target: CausalLM,
    assistant: Assistant,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    config: GenerationConfig,
    streamer: Any = None,
    kind: type[AssistedDecoding] = AssistedDecoding,
    **kwargs: Any,
) -> Callable[[Tensor], Any]:
    """What runs a `generate()` call with an assistant: a function of `input_ids`. All but its run is done here.

    Args:
        kind: of decoding, for one sequence in one process.

    Raises:
        ValueError: the call cannot be assisted. Nothing has been read then, and nothing drawn.
    """
    model_kwargs = {name: value for name, value in kwargs.items() if name not in MODE_KWARGS}
    check_inputs(input_ids, model_kwargs)
    count = input_ids.shape[0]
    if count == 1 and assistant.speculation.graphs == "auto" and graphs.can_capture(input_device(target)):
        config, model_kwargs = as_growing(target, config, model_kwargs)
    most_in_tree = assistant.speculation.most_tokens if assistant.speculation.tree is not None else 0
    prepare_static(target, input_ids, model_kwargs, config, most_in_tree)
    if is_spread(target):
        check_ranks(target, assistant.speculation, Processing(logits_processor), count)
    if count > 1:
        has_trees = assistant.speculation.tree is not None
        check_batch(target, model_kwargs, config, logits_processor, stopping_criteria, streamer, has_trees)
        return _batch_decoding(target, assistant, logits_processor, stopping_criteria, config, model_kwargs, count)
    known_as = as_static(config, model_kwargs)
    generator = assistant.start_generation(target, known_as, logits_processor, model_kwargs.get("attention_mask"))
    kind = RankDecoding if is_spread(target) else kind
    return kind(target, generator, stopping_criteria, config, streamer, model_kwargs).run


def _batch_decoding(
    target: CausalLM, assistant: Assistant, logits_processor: Any, stopping_criteria: Any, config: GenerationConfig,
    model_kwargs: dict[str, Any], count: int,
) -> Callable[[Tensor], Any]:  # fmt: skip
    """The same for a batch of `count` sequences."""
    mask = model_kwargs.get("attention_mask")
    generators: list[SpecDecPPCandidateGenerator] = []
    for row, own in enumerate([None] * count if mask is None else mask.split(1)):
        processors = for_row(logits_processor, row, count)
        products = generators[0].products if generators else None
        generators.append(assistant.start_generation(target, config, processors, own, count, products))
    decoding = BatchDecoding(target, generators, stopping_criteria, config, model_kwargs)

    def run(input_ids: Tensor) -> Any:
        try:
            return decoding.run(input_ids)
        finally:
            assistant.stats = SpeculationStats.of_batch([each.stats for each in generators])
            if assistant.speculation.graphs == "auto":
                assistant.stats.uncaptured = "passes over several sequences are not captured"

    return run


def _leave_out(target: CausalLM, reason: str) -> None:
    """Say that a call is plain though its target has a default assistant: to its user once, and in its statistics."""
    target.default_assistant.stats = SpeculationStats(refusal=reason)
    logger.warning_once(
        f"This generate() of {type(target).__name__} is a plain one, without its default assistant, which cannot help "
        f"here: {reason}"
    )
