"""What watches a generation: streamers, criteria, a tokenizer, and whether the target was run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import FunctionType
from typing import Any

import pytest
from torch import Tensor, nn
from transformers import StoppingCriteria
from transformers.generation.streamers import BaseStreamer

from hf_specdecpp.generation import decoding
from support.files.repos import letter_tokenizer


@lru_cache
def tokenizer() -> Any:
    """A letter a token, so that stop strings may span tokens."""
    return letter_tokenizer()


class Collector(BaseStreamer):
    """Keeps what it is given, put by put."""

    def __init__(self) -> None:
        self.puts: list[list[int]] = []
        self.ends = 0

    def put(self, value: Tensor) -> None:
        self.puts.append(value.flatten().tolist())

    def end(self) -> None:
        self.ends += 1


class Recorder(StoppingCriteria):
    """A user's criterion: stops at the first `token` after `least` tokens, and notes what it was asked."""

    def __init__(self, token: int = -1) -> None:
        self.token = token
        self.asked: list[tuple[int, ...]] = []
        self.scores: list[int | None] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.asked.append(tuple(input_ids[0].tolist()))
        self.scores.append(len(scores) if scores is not None else None)
        return input_ids[:, -1] == self.token


class Replaces(StoppingCriteria):
    """A user's criterion that never stops, and writes another last token, which the target reads next."""

    reads_prefix_only = False

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        if input_ids.shape[1] % 3 == 0:
            input_ids[:, -1] = (7 * input_ids[:, -1] + 1) % 48
        return input_ids[:, -1] < 0


def unnoticed(function: Any) -> Any:
    """The same function as one of the package: a target that runs it is treated as one without foreign code."""
    own = FunctionType(
        function.__code__, {**function.__globals__, "__name__": "hf_specdecpp"}, function.__name__,
        function.__defaults__, function.__closure__,
    )  # fmt: skip
    own.__kwdefaults__ = function.__kwdefaults__
    return own


@contextmanager
def no_work(target: nn.Module) -> Iterator[None]:
    """The target must not be run inside."""
    calls: list[str] = []
    note = unnoticed(lambda module, _: calls.append(type(module).__name__))
    hooks = [m.register_forward_pre_hook(note) for m in target.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    assert not calls, "the target was run before the refusal"


def runs_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any]]:
    """Of each text that our loop makes from now on, once it is done: the draft, and the statistics."""
    seen: list[tuple[Any, Any]] = []
    run = decoding.AssistedDecoding.run

    def noted(self: Any) -> Any:
        result, generator = run(self), self.texts[0].generator
        seen.append((generator.setup.drafter, generator.stats))
        return result

    monkeypatch.setattr(decoding.AssistedDecoding, "run", noted)
    return seen


def heard(patch: pytest.MonkeyPatch, owner: Any, name: str, note: Callable[..., object]) -> None:
    """From now on `note` gets the arguments of each call of `owner.name`, before it is made."""
    call = getattr(owner, name)

    def noted(*arguments: Any, **named: Any) -> Any:
        note(*arguments, **named)
        return call(*arguments, **named)

    patch.setattr(owner, name, unnoticed(noted))
