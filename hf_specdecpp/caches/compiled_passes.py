"""A target's passes in a static cache, compiled, each width for itself (`CompiledPasses`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from transformers import CompileConfig

from hf_specdecpp.models.causal_lm import CausalLM

Pass = Callable[..., Any]
Passes = dict[tuple[int, bool], Pass]  # by the number of tokens, and whether states are returned

PLAIN = {bool, int, float, str, type(None)}  # compared by what they are

_numbers = count()
# How a target's passes were compiled, what it was like then, and what they were compiled to.
_known: WeakKeyDictionary[CausalLM, tuple[CompileConfig, list[Any], Passes]] = WeakKeyDictionary()


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

    torch.compile would look through all of the target before each pass, to see whether it is still the same; with many
    small layers that takes half as long as the pass. So it is looked at once a text, and compiled anew if it was
    changed: another module, hook, setting or dtype.

    Args:
        config: how; `None` as transformers would.
    """

    def __init__(self, target: CausalLM, config: CompileConfig | None) -> None:
        target.get_compiled_call(config)  # as plain `generate()` does: its layers then keep their own products
        self._target = ref(target)
        self._config: CompileConfig = target._last_compile_config
        self._passes: Passes = {}

    @property
    def how(self) -> dict[str, str]:
        """What they are compiled with."""
        return {name: str(value) for name, value in self._config.to_dict().items()}

    def look(self) -> None:
        """See whether the target is as it was, once the prompt has been read: by then transformers has installed what
        records states."""
        target: Any = self._target()
        known, identity = _known.get(target), _identity(target)
        if known is None or known[:2] != (self._config, identity):
            known = _known[target] = self._config, identity, {}
        self._passes = known[2]

    def __call__(self, **inputs: Any) -> Any:
        kind = inputs["input_ids"].shape[1], bool(inputs.get("output_hidden_states"))
        if kind not in self._passes:
            self._passes[kind] = _compiled(self._config)
        return self._passes[kind](self._target(), inputs)


def _compiled(config: CompileConfig) -> Pass:
    settings = config.to_dict()
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):  # older versions of torch make all checks
        options = settings.pop("options")
        if (mode := settings.pop("mode")) is not None and config.backend == "inductor":
            options = {**torch._inductor.list_mode_options(mode, config.dynamic), **(options or {})}
        settings["options"] = {**(options or {}), "guard_filter_fn": _of_inputs}
    compiled: Pass = torch.compile(own_copy(forward), **settings)
    return compiled


def _of_inputs(checks: Sequence[Any]) -> list[bool]:
    """Which checks torch.compile makes before each pass: all but those of the target and of Python's modules (`G[`)."""
    return [not any(part in check.name for part in ("target", "G[")) for check in checks]


def _identity(target: CausalLM) -> list[Any]:
    """What decides which operations a pass consists of: modules with their attributes and hooks, shapes and types of
    parameters, and the config."""
    modules = [(id(module), _value(vars(module))) for module in target.modules()]
    tensors = [(each.shape, each.dtype, each.device) for each in (*target.parameters(), *target.buffers())]
    return [modules, tensors, _value(vars(target.config.get_text_config(decoder=True)))]


def _value(attribute: Any) -> Any:
    """It, or which object it is; of dictionaries what is in them, but for modules and tensors, which are looked at."""
    if isinstance(attribute, dict):
        # Most are plain values, and there are thousands of them, before every text.
        return {
            name: each if type(each) in PLAIN else _value(each)
            for name, each in attribute.items()
            if not isinstance(each, torch.Tensor | nn.Module)
        }
    if isinstance(attribute, list | tuple | set):
        return [_value(each) for each in attribute]
    return attribute if type(attribute) in PLAIN else id(attribute)
