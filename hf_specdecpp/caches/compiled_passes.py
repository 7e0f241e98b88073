"""A target's passes in a static cache, compiled, each width for itself (`CompiledPasses`)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from transformers import CompileConfig

from hf_specdecpp.models.causal_lm import CausalLM

Pass = Callable[..., Any]

_numbers = count()
# By the number of tokens, and whether states are returned: what a target's passes were compiled to, and how.
_known: WeakKeyDictionary[CausalLM, tuple[CompileConfig, dict[tuple[int, bool], Pass]]] = WeakKeyDictionary()


def own_copy(function: Any) -> Any:
    """A copy of a function for torch.compile, with a name of its own.

    torch.compile counts by its code how often a function was compiled, and gives up after eight times; and it compiles
    by its name for tensors of any size once it has met a second one.
    """
    code = function.__code__.replace(co_name=f"{function.__name__}_{next(_numbers)}")
    return FunctionType(code, function.__globals__)


def forward(target: CausalLM, inputs: dict[str, Any]) -> Any:
    return target(**inputs)


class CompiledPasses:
    """The forward of a target whose passes are compiled, each number of tokens for itself, and kept with the target.

    A pass over one token is that of plain `generate()` unless a draft reads states that it returns.

    Args:
        config: how; `None` as transformers would.
    """

    def __init__(self, target: CausalLM, config: CompileConfig | None) -> None:
        self._plain: Pass = target.get_compiled_call(config)
        self._target = ref(target)
        self._config: CompileConfig = target._last_compile_config
        if target not in _known or _known[target][0] != self._config:
            _known[target] = self._config, {}
        self._passes = _known[target][1]

    def __call__(self, **inputs: Any) -> Any:
        width, returns_states = inputs["input_ids"].shape[1], bool(inputs.get("output_hidden_states"))
        if width == 1 and not returns_states:
            return self._plain(**inputs)
        kind = width, returns_states
        if kind not in self._passes:
            self._passes[kind] = torch.compile(own_copy(forward), **self._config.to_dict())
        return self._passes[kind](self._target(), inputs)
