"""Attach assistants to targets and detach them, by replacing four methods of the target's class.

Why the class: `generate()` looks up its decoding method on the type of the model. A new class for each target would
change `type(model)` during calls in other threads (their `super()` fails), trigger recompilation by torch.compile, and
have to be hidden from pickle and copy. A `generate` attribute of the instance would conflict with models that bring one
(`custom_generate`), and be bypassed by `type(model).generate(model)`.

A method is replaced on the class that defines it: on transformers' `GenerationMixin` while assistants exist, because a
call may name an assistant that is not attached yet; on a model class with its own methods while one of its models has
an assistant. For models without an assistant the replacements call the originals. A replacement keeps its original, so
running calls are unaffected by attaching and detaching."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from threading import RLock
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, finalize

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerationMode
from transformers.utils import logging

from hf_specdecpp.caches.masks import unknown_window
from hf_specdecpp.caches.states import why_no_rollback
from hf_specdecpp.generation import refusals
from hf_specdecpp.generation.entry.calls import Assistant, decoding_of
from hf_specdecpp.generation.refusals import Call, LateRefusalError, PlainCallError
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import WITHOUT_ASSISTANT, check_target


@dataclass
class Attached:
    """The assistants that are attached to one target."""

    assistants: WeakSet[nn.Module] = field(default_factory=WeakSet)
    # Drafts for calls that name no assistant. Kept alive by the target: an assistant references parts of its target,
    # never the target itself.
    default: Any = None


# Stored here, so that targets are unchanged. Calls read these without the lock; changes need it. The lock is reentrant,
# because the garbage collector may call `_restore_methods` in a thread that holds it.
_attached: WeakKeyDictionary[CausalLM, Attached] = WeakKeyDictionary()
NOTHING = Attached()  # of targets without assistants
_assistants: WeakSet[Any] = WeakSet()  # all that exist
_changed: set[type[Any]] = set()  # classes with replaced methods
_paused: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # number of active `paused` contexts by assistant
_lock = RLock()
# A target and its default assistant in this thread or task, overriding `Attached.default`.
_default_here: ContextVar[tuple[CausalLM, Any] | None] = ContextVar("default_here", default=None)

logger = logging.get_logger("hf_specdecpp")

BEAMS = (GenerationMode.BEAM_SEARCH, GenerationMode.BEAM_SAMPLE, GenerationMode.GROUP_BEAM_SEARCH)


def answer_calls(assistant: Assistant) -> None:
    """Called once for a new assistant, so that `generate(assistant_model=assistant)` can attach it when necessary."""
    with _lock:
        _assistants.add(assistant)
        finalize(assistant, _restore_methods).atexit = False
        _put_on(GenerationMixin)


def attach(assistant: nn.Module, target: CausalLM) -> None:
    """Let `generate()` of `target` use the assistant; `ValueError` if the target does not support speculation."""
    check_reading(target)
    with _lock:
        if (found := _attached.get(target)) is None:
            found = _attached[target] = Attached()
            finalize(target, _restore_methods).atexit = False
        found.assistants.add(assistant)
        _put_on(type(target))


def check_reading(target: CausalLM) -> None:
    """Raise `ValueError` if passes of `target` over several tokens are not supported, or cannot be rolled back."""
    check_target(target, recurrent=True)
    config = target.config.get_text_config(decoder=True)
    if (reason := unknown_window(target, config) or why_no_rollback(target)) is not None:
        raise ValueError(f"{type(target).__name__} {reason}. {WITHOUT_ASSISTANT}.")


def detach(assistant: nn.Module, target: CausalLM) -> None:
    """Undo `attach`. Restores the original methods if no other assistant needs their replacements."""
    with _lock:
        if is_attached(assistant, target):
            set_default(assistant, target, False)
            _attached[target].assistants.discard(assistant)
            _restore_methods()


def is_attached(assistant: Any, target: CausalLM) -> bool:
    return isinstance(assistant, nn.Module) and assistant in _attached.get(target, NOTHING).assistants


def is_default(assistant: Any, target: CausalLM) -> bool:
    """Whether `assistant` is the default of `target`, for calls that name no assistant."""
    return assistant is not None and _attached.get(target, NOTHING).default is assistant


def set_default(assistant: Any, target: CausalLM, value: bool) -> None:
    """Make an attached assistant the target's default; `value=False` undoes this, and leaves any other default."""
    with _lock:
        if (value and is_attached(assistant, target)) or is_default(assistant, target):
            _attached[target].default = assistant if value else None


def targets_of(assistant: nn.Module) -> list[CausalLM]:
    with _lock:
        return [target for target, found in _attached.items() if assistant in found.assistants]


def assistants_of(target: CausalLM) -> list[Any]:
    with _lock:
        return list(_attached.get(target, NOTHING).assistants)


@contextmanager
def paused(assistant: nn.Module) -> Iterator[None]:
    """A context in which calls of all threads use this assistant only if they name it, not as the default."""
    with _lock:
        _paused[assistant] = _paused.get(assistant, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _paused[assistant] -= 1


@contextmanager
def as_default(assistant: nn.Module | None, target: CausalLM) -> Iterator[None]:
    """A context in which an attached `assistant`, or none, is the default of `target` in this thread or async task."""
    token = _default_here.set((target, assistant))
    try:
        yield
    finally:
        _default_here.reset(token)


def default_of(target: CausalLM) -> Any:
    """The assistant for calls of `target` in this thread or task that name none; `None` without a default."""
    here, default = _default_here.get(), _attached.get(target, NOTHING).default
    if here is not None and here[0] is target:
        return here[1]
    return None if default is None or _paused.get(default) else default


# The methods of a class ----------------------------------------------------------------------------------------------


class Method:
    """Replaces a method of a class: `ours` is called with the model, the model's original method, and the arguments."""

    def __init__(self, kind: type[Any], name: str, ours: Callable[..., Any]) -> None:
        self.kind, self.name, self.ours, self.original = kind, name, ours, vars(kind)[name]
        # Transformers reads the argument names. `updated=()`: attributes of another `Method` are not copied.
        update_wrapper(self, self.original, updated=())

    def __get__(self, target: CausalLM | None, kind: Any = None) -> Any:
        return self if target is None else MethodType(self, target)

    def __call__(self, target: CausalLM, *args: Any, **kwargs: Any) -> Any:
        # If both a class and its subclass have replacements, only that of the subclass takes effect.
        first = next((each for each in type(target).__mro__ if isinstance(vars(each).get(self.name), Method)), None)
        if first is not self.kind:
            return self.original(target, *args, **kwargs)
        return self.ours(target, partial(self.original, target), *args, **kwargs)


def _put_on(kind: type[Any]) -> None:
    for name, ours in METHODS.items():
        owner = next(each for each in kind.__mro__ if name in vars(each))
        if not isinstance(vars(owner)[name], Method):
            setattr(owner, name, Method(owner, name, ours))
            _changed.add(owner)


def _restore_methods() -> None:
    """Restore the original methods of all classes whose replacements no assistant needs any more."""
    with _lock:
        used: list[type[Any]] = [type(target) for target, found in _attached.items() if list(found.assistants)]
        if list(_assistants):
            used.append(GenerationMixin)
        for kind in [each for each in _changed if not any(issubclass(one, each) for one in used)]:
            _changed.discard(kind)
            for name in METHODS:
                if isinstance(method := vars(kind).get(name), Method):
                    setattr(kind, name, method.original)


def _is_assistant(named: Any) -> bool:
    return isinstance(named, nn.Module) and named in _assistants


def _extract_generation_mode_kwargs(
    target: CausalLM, original: Any, custom_generate: Any, kwargs: Any, synced_gpus: Any, assistant_model: Any,
    *rest: Any,
) -> Any:  # fmt: skip
    if _is_assistant(assistant_model):
        with torch.inference_mode(False):  # later calls also use a draft that is made here
            assistant_model.answer(target)
    return original(custom_generate, kwargs, synced_gpus, assistant_model, *rest)


def _validate_generation_mode(
    target: CausalLM, original: Any, mode: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]
) -> None:
    assistant: Any = mode_kwargs.get("assistant_model")
    if assistants_of(target):
        refusals.check_object(assistant)
    if _is_assistant(assistant):
        _check(target, mode, config, mode_kwargs)
        # The output equals that of the plain call, so transformers checks a plain call. For assisted calls it would
        # compare padded vocabulary sizes (tokenizers were compared at attach), and refuse batches and models with
        # recurrent states.
        mode_kwargs = {name: value for name, value in mode_kwargs.items() if name != "assistant_model"}
        mode = GenerationMode.SAMPLE if config.do_sample else GenerationMode.GREEDY_SEARCH
    elif mode in BEAMS and (default := default_of(target)) is not None:
        beams = f"num_beams={config.num_beams}, and it proposes one continuation of one sequence."
        _leave_out(default, target, beams, mode_kwargs.get("streamer"))
    original(mode, config, mode_kwargs)


def _sample(
    target: CausalLM, original: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
    generation_config: GenerationConfig, **kwargs: Any,
) -> Any:  # fmt: skip
    """Decode a call that names no assistant: with the target's default if it supports the call, else plainly."""
    given = input_ids, logits_processor, stopping_criteria, generation_config
    default = default_of(target)
    # As the draft of another model the target must return its confidence in each token, so it runs plainly.
    if default is None or generation_config.is_assistant:
        return original(*given, **kwargs)
    try:
        _check(target, GenerationMode.ASSISTED_GENERATION, generation_config, kwargs)
        decode = decoding_of(Call.of(target, *given[1:], **kwargs), default, input_ids)
    except ValueError as refusal:
        _leave_out(default, target, str(refusal), kwargs.get("streamer"))
    else:
        try:
            return decode()
        except LateRefusalError as refusal:
            _leave_out(default, target, str(refusal), kwargs.get("streamer"))
    return original(*given, **kwargs)


def _assisted_decoding(
    target: CausalLM, original: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any,
    generation_config: GenerationConfig, inputs_tensor: Tensor | None = None, assistant_model: Any = None,
    **kwargs: Any,
) -> Any:  # fmt: skip
    """Decode a call that names an assistant of this package, or one that uses transformers' own speculation."""
    given = input_ids, logits_processor, stopping_criteria, generation_config
    if not _is_assistant(assistant_model):
        default = None if assistant_model is not None or generation_config.is_assistant else default_of(target)
        if default is not None:
            reason, is_model_s = refusals.own_speculation(generation_config, target)
            _leave_out(default, target, reason, kwargs.get("streamer"), says=is_model_s)
        return original(*given, inputs_tensor=inputs_tensor, assistant_model=assistant_model, **kwargs)
    try:
        decode = decoding_of(Call.of(target, *given[1:], **kwargs), assistant_model, input_ids)
    except PlainCallError as refusal:
        _leave_out(assistant_model, target, str(refusal), kwargs.get("streamer"))
        others = {name: value for name, value in kwargs.items() if name not in refusals.MODE_KWARGS}
        with as_default(None, target):
            return type(target)._sample(target, *given, **others)
    return decode()


REPLACING = (_extract_generation_mode_kwargs, _validate_generation_mode, _sample, _assisted_decoding)
METHODS: dict[str, Callable[..., Any]] = {each.__name__: each for each in REPLACING}


def _check(target: CausalLM, mode: Any, config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise `ValueError` if the target or the mode of generation does not support speculation."""
    check_reading(target)
    refusals.check_mode(mode, config, mode_kwargs)


def _leave_out(assistant: Assistant, target: CausalLM, reason: str, streamer: Any, says: bool = True) -> None:
    """Record that a call falls back to plain `generate()`: `refusal` in its statistics and, if `says`, one warning."""
    assistant.calls.record_call(SpeculationStats(refusal=reason), streamer)
    if says:
        what = f"This generate() of {type(target).__name__} is a plain one, without its assistant"
        logger.warning_once(f"{what}, which cannot help here: {reason}")
