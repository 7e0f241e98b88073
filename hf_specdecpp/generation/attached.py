"""Attach an assistant to a target and detach it: three methods of the target's class ask which assistants it has.

Why the class: `generate()` looks its decoding method up on the type of the model. The alternatives break more. A class
of its own for each target changes `type(model)` under calls that are running in other threads (`super()` in them
fails), has torch.compile compile anew, and has to be hidden from pickle and copy. A `generate` of the instance is a
further attribute, is in the way of models that bring one along (`custom_generate`), is passed by
`type(model).generate(model)`, and does not know yet how a call will decode.

So a target is not touched at all. Other models of its class go through these methods to their own; the methods keep
the originals, so calls that began before they came or went end as they would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from threading import RLock
from types import MethodType
from typing import Any, Protocol
from weakref import WeakKeyDictionary, finalize

from torch import Tensor, nn
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMode
from transformers.utils import logging

from hf_specdecpp.caches.masks import check_windows
from hf_specdecpp.caches.rollback import check_states, num_rows
from hf_specdecpp.caches.static_targets import as_growing, as_static, check_static, prepare_static
from hf_specdecpp.captured import graphs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.refusals import LateRefusalError, check_batch, check_inputs, check_mode, check_object
from hf_specdecpp.generation.several.batch import BatchDecoding
from hf_specdecpp.generation.several.ranks import RankDecoding, check_ranks, is_spread
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, input_device
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


@dataclass
class Attached:
    """The assistants of a target, each with what is called when it is deleted.

    Attributes:
        default: drafts for calls without an assistant. It is held as long as the target lives: an assistant knows parts
            of its target, never the target.
    """

    assistants: WeakKeyDictionary[nn.Module, finalize[Any, Any]] = field(default_factory=WeakKeyDictionary)
    default: Any = None


# Kept here, so that targets stay as they are. Calls read them without the lock, which whoever changes them holds; while
# it is held, the garbage collector may call `_take_off` in the same thread.
_attached: WeakKeyDictionary[CausalLM, Attached] = WeakKeyDictionary()
_paused: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many `paused` contexts an assistant is in
_lock = RLock()
# A target and the default of its calls in this thread, in the place of its own.
_default_here: ContextVar[tuple[CausalLM, Any] | None] = ContextVar("default_here", default=None)

logger = logging.get_logger("hf_specdecpp")

BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE, GenerationMode.GROUP_BEAM_SEARCH)
# Arguments of transformers' decoding method that are not for the model's forward.
MODE_KWARGS = ("synced_gpus", "tokenizer", "assistant_tokenizer")


def attach(assistant: nn.Module, target: CausalLM) -> None:
    """Make `target.generate(assistant_model=assistant)` run our decoding loop.

    Raises:
        ValueError: the target cannot be assisted.
    """
    check_reading(target)
    kind = type(target)
    with _lock:
        if (found := _attached.get(target)) is None:
            found = _attached[target] = Attached()
            finalize(target, _take_off, kind).atexit = False
        if assistant not in found.assistants:
            found.assistants[assistant] = deleted = finalize(assistant, _take_off, kind)
            deleted.atexit = False
        _put_on(kind)


def check_reading(target: CausalLM) -> None:
    """Raise `ValueError` if the target does not read several tokens at once as it reads one after the other."""
    check_target(target, recurrent=True)
    check_windows(target)
    check_states(target)


def detach(assistant: nn.Module, target: CausalLM) -> None:
    """Undo `attach`. The class has its own methods again when the last assistant of its models leaves or is deleted."""
    with _lock:
        if is_attached(assistant, target):
            set_default(assistant, target, False)
            _attached[target].assistants.pop(assistant).detach()
            _take_off(type(target))


def is_attached(assistant: Any, target: CausalLM) -> bool:
    found = _attached.get(target)
    return found is not None and isinstance(assistant, nn.Module) and assistant in found.assistants


def is_default(assistant: Any, target: CausalLM) -> bool:
    """Whether calls without an assistant run this one."""
    found = _attached.get(target)
    return found is not None and assistant is not None and found.default is assistant


def set_default(assistant: Any, target: CausalLM, value: bool) -> None:
    """Whether calls without an assistant are to run this attached one, in the place of another one; if not, any other
    stays."""
    with _lock:
        if (value and is_attached(assistant, target)) or is_default(assistant, target):
            _attached[target].default = assistant if value else None


def targets_of(assistant: nn.Module) -> list[CausalLM]:
    """All targets that an assistant is attached to."""
    with _lock:
        return [target for target, found in _attached.items() if assistant in found.assistants]


@contextmanager
def paused(assistant: nn.Module) -> Iterator[None]:
    """Within, calls that do not name this default assistant are plain ones, in all threads."""
    with _lock:
        _paused[assistant] = _paused.get(assistant, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _paused[assistant] -= 1


@contextmanager
def as_default(assistant: nn.Module, target: CausalLM) -> Iterator[None]:
    """Within, this thread's calls of `target` without an assistant run this attached one, whatever its default is."""
    token = _default_here.set((target, assistant))
    try:
        yield
    finally:
        _default_here.reset(token)


def default_of(target: CausalLM) -> Any:
    """What drafts for this thread's calls without an assistant; `None` if nothing does."""
    here, found = _default_here.get(), _attached.get(target)
    if here is not None and here[0] is target:
        return here[1]
    default = None if found is None else found.default
    return None if default is None or _paused.get(default) else default


# The methods of a class ----------------------------------------------------------------------------------------------


class Method:
    """A method of a class in the place of its own, which models without an assistant go on to.

    Args:
        kind: the class.
        name: of the method.
        ours: is called with a model that has assistants, the class's own method of that model, and the arguments.
    """

    def __init__(self, kind: type[CausalLM], name: str, ours: Callable[..., Any]) -> None:
        self.kind, self.name, self.ours, self.is_own = kind, name, ours, name in vars(kind)
        self.original = getattr(kind, name)
        # transformers reads its arguments' names; what another `Method` knows is not this one's.
        update_wrapper(self, self.original, updated=())

    def __get__(self, target: CausalLM | None, kind: Any = None) -> Any:
        return self if target is None else MethodType(self, target)

    def __call__(self, target: CausalLM, *args: Any, **kwargs: Any) -> Any:
        found = _attached.get(target)
        # Of several, as where a class and a subclass of it have assistants, the first that is met decides.
        first = next((each for each in type(target).__mro__ if isinstance(vars(each).get(self.name), Method)), None)
        if found is None or not found.assistants or first is not self.kind:
            return self.original(target, *args, **kwargs)
        return self.ours(target, partial(self.original, target), *args, **kwargs)


def _put_on(kind: type[CausalLM]) -> None:
    """Give a class our methods."""
    for name, ours in METHODS.items():
        if not isinstance(vars(kind).get(name), Method):
            setattr(kind, name, Method(kind, name, ours))


def _take_off(kind: type[CausalLM]) -> None:
    """Give a class, and those that it is made of, their own methods back where no model has an assistant any more."""
    with _lock:
        used = [type(target) for target, found in _attached.items() if list(found.assistants)]
        for each in kind.__mro__:
            if any(issubclass(one, each) for one in used):
                return
            for name in METHODS:
                method = vars(each).get(name)
                if isinstance(method, Method) and method.is_own:
                    setattr(each, name, method.original)
                elif isinstance(method, Method):
                    delattr(each, name)


def _validate_generation_mode(
    target: CausalLM, original: Any, mode: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    assistant: Any = mode_kwargs.get("assistant_model")
    check_object(assistant)
    if is_attached(assistant, target):
        _check(target, mode, config, mode_kwargs)
        # Its text is that of the plain call, and so is the rest of what is checked. Of assisted ones transformers
        # compares padded vocabulary sizes (tokenizers were compared when attaching), and refuses several sequences and
        # all models of classes that keep a recurrent state.
        mode_kwargs = {name: value for name, value in mode_kwargs.items() if name != "assistant_model"}
        mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
    elif mode in BEAMS and (default := default_of(target)) is not None:
        beams = f"num_beams={config.num_beams}, and it proposes one continuation of one sequence."
        _leave_out(default, target, beams)
    original(mode, config, mode_kwargs)


def _sample(
    target: CausalLM,
    original: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> Any:
    given = input_ids, logits_processor, stopping_criteria, generation_config
    default = default_of(target)
    # As another model's draft it has to say how sure it is of each token.
    if default is None or generation_config.is_assistant:
        return original(*given, **kwargs)
    try:
        _check(target, GenerationMode.ASSISTED_GENERATION, generation_config, kwargs)
        decode = decoding_of(target, default, *given, **kwargs)
    except ValueError as refusal:
        _leave_out(default, target, str(refusal))
    else:
        try:
            return decode(input_ids)
        except LateRefusalError as refusal:
            _leave_out(default, target, str(refusal))
    return original(*given, **kwargs)


def _assisted_decoding(
    target: CausalLM,
    original: Any,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    inputs_tensor: Tensor | None = None,
    assistant_model: Any = None,
    **kwargs: Any,
) -> Any:
    given = input_ids, logits_processor, stopping_criteria, generation_config
    if not is_attached(assistant_model, target):
        return original(*given, inputs_tensor=inputs_tensor, assistant_model=assistant_model, **kwargs)
    # Again, since another thread may have attached the assistant since the call began.
    _check(target, GenerationMode.ASSISTED_GENERATION, generation_config, kwargs)
    return decoding_of(target, assistant_model, *given, **kwargs)(input_ids)


METHODS: dict[str, Callable[..., Any]] = {
    "_validate_generation_mode": _validate_generation_mode,
    "_sample": _sample,
    "_assisted_decoding": _assisted_decoding,
}


def _check(target: CausalLM, mode: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if such a call of the target cannot be assisted."""
    check_reading(target)
    check_mode(mode, config, mode_kwargs)


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
    unused = _unused_layers(cache := cache_among(model_kwargs))
    check_static(target, input_ids, model_kwargs, config)
    if is_spread(target):
        check_ranks(target, assistant.speculation, Processing(logits_processor), count)
    if count > 1:
        has_trees = assistant.speculation.tree is not None
        check_batch(target, model_kwargs, config, logits_processor, stopping_criteria, streamer, has_trees)
        run = _batch_decoding(target, assistant, logits_processor, stopping_criteria, config, model_kwargs, count)
        return partial(_run, run, cache, unused)
    known_as = as_static(config, model_kwargs)
    generator = assistant.start_generation(target, known_as, logits_processor, model_kwargs.get("attention_mask"))
    most_in_tree = assistant.speculation.most_tokens if assistant.speculation.tree is not None else 0
    prepare_static(model_kwargs, config, most_in_tree)
    if is_spread(target):
        kind = RankDecoding
    else:
        generator.begin_text(input_ids.shape[1])
    decoding = kind(target, generator, stopping_criteria, config, streamer, model_kwargs)
    return partial(_run, decoding.run, cache, unused)


def _unused_layers(cache: Cache) -> list[Any] | None:
    """Copies of the layers of a cache that nothing has been read into."""
    is_used = num_rows(cache) or any(isinstance(each, CacheLayerMixin) and each.is_initialized for each in cache.layers)
    return None if is_used else copy.deepcopy(cache.layers)


def _run(decode: Callable[[Tensor], Any], cache: Cache, unused: list[Any] | None, input_ids: Tensor) -> Any:
    """Generate; an empty cache is given back as it was, for whoever generates without an assistant then."""
    try:
        return decode(input_ids)
    except LateRefusalError:
        if unused is not None:
            cache.layers = unused
        raise


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


def _leave_out(default: Assistant, target: CausalLM, reason: str) -> None:
    """Say that a call is plain though its target has a default assistant: to its user once, and in its statistics."""
    default.stats = SpeculationStats(refusal=reason)
    logger.warning_once(
        f"This generate() of {type(target).__name__} is a plain one, without its default assistant, which cannot help "
        f"here: {reason}"
    )
