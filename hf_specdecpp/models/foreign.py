"""Code of others in the passes of a target: hooks, patched forwards, replaced layers (`foreign_passes`).

Such code may depend on how many tokens a pass reads, as a hook does that changes the last row alone. So passes over
several tokens are compared with passes over fewer before a text relies on them (`caches.trial.Trial`), and what
was found is kept here for later texts.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from huggingface_hub.constants import HF_HUB_CACHE
from torch import Generator, Tensor, nn, strided
from torch.nn import functional
from torch.nn.modules import module as every_module
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from transformers.cache_utils import CacheLayerMixin, DynamicLayer
from transformers.integrations import sdpa_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import CausalLM, modules_of

OURS = __name__.partition(".")[0]
# Packages whose hooks, forwards and layers treat every token of a pass alike: what models are made of, and what
# quantises, adapts, spreads and trains them.
KNOWN = {
    OURS, "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "kernels",
    "aqlm", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "fp_quant", "gptqmodel",
    "hqq", "optimum", "quark", "spqr_quant", "torchao", "vptq",
}  # fmt: skip

# Packages besides whose functions transformers' modules import.
IMPORTED = KNOWN | sys.stdlib_module_names | {
    "causal_conv1d", "einops", "fla", "flash_attn", "flash_attn_interface", "huggingface_hub", "mamba_ssm", "natten",
    "numpy", "packaging", "safetensors", "scipy", "tqdm", "typing_extensions", "xlstm",
}  # fmt: skip
KERNELS = os.environ.get("KERNELS_CACHE") or HF_HUB_CACHE  # from which nothing but kernels of the Hub is imported


class ForeignCode:
    """A piece of code, with its name for messages, and the module that is its own; by its `key` it is known again."""

    def __init__(self, code: Any, name: str, number: int | None = None, module: nn.Module | None = None) -> None:
        self.code, self.name, self.module = code, name, module
        self.key: Any = number  # hooks have numbers, of which each is used once; addresses may be used again
        if number is None:
            try:
                self.key = ref(code)
            except TypeError:  # not known again
                self.key = object()


@dataclass
class ForeignPasses:
    """What is known of the passes of a target that run code of others.

    Attributes:
        name: of the code, for messages; where there are several pieces, of the first.
        width: so many tokens may be read at once.
        reason: why calls are plain, once that is known.
    """

    name: str
    width: int = 1
    reason: str | None = None


# How deep, in how many entries of a list and in how large a tensor it is looked for what code remembers.
DEPTH, MOST, SMALL = 4, 16, 65_536
SIMPLE = {bool, int, float, str, type(None)}
_usual: WeakSet[Any] = WeakSet()  # functions that are not foreign: each call asks of the same ones
# Of modules and the class of tensors without code of others: how many names they have, those of functions, and these.
_unchanged: dict[Any, tuple[int, list[str], list[Any]]] = {}
# What PyTorch computes passes with. Draws of random numbers are made between passes, and pinned memory holds copies.
BETWEEN_PASSES = ("rand", "multinomial", "bernoulli", "normal", "exponential", "uniform", "pin_memory")
OPERATIONS = {name for name in dir(torch._C._VariableFunctions) if name[0] != "_"}.union(torch.functional.__all__)
# Of each target: the code that was found, and what is known of the passes that run it.
_known: WeakKeyDictionary[CausalLM, tuple[list[Any], ForeignPasses]] = WeakKeyDictionary()


def foreign_passes(model: CausalLM, cache: Any = None) -> ForeignPasses | None:
    """What is known of passes that run code of others over a cache; `None` where no such code is found. Nothing is
    known yet where other code was found in the last call."""
    found = list(foreign_code(model, cache))
    if not found:
        return None
    keys = [each.key for each in found]
    known = _known.get(model)
    if known is None or known[0] != keys:
        known = _known[model] = keys, ForeignPasses(found[0].name)
    return known[1]


def remembered(model: CausalLM) -> list[Any]:
    """What the code of others remembers in the open, in a form that changes with it: numbers, texts, the lengths of
    lists and the sums of tensors, among what functions refer to and the attributes of objects."""
    found: list[Any] = []
    for each in foreign_code(model):
        _remember(each.code, found, DEPTH)
        if each.module is not None:  # which a hook may write to
            found += (value for value in vars(each.module).values() if type(value) in SIMPLE)
    return found


def _remember(value: Any, found: list[Any], depth: int) -> None:
    parts: Any = ()
    if type(value) in SIMPLE:
        found.append(value)
    elif isinstance(value, Tensor):
        is_plain = value.is_floating_point() and value.layout is strided and value.device.type != "meta"
        total = str(float(value.detach().double().sum())) if is_plain and value.numel() <= SMALL else ""
        found.append((id(value), 0 if value.is_inference() else value._version, total))
    elif isinstance(value, Generator):
        found.append(value.get_state().tolist())
    elif isinstance(value, Iterator):
        found.append((repr(value), length_hint(value, 0)))  # what `itertools.count` says, and what of a list is left
    elif isinstance(value, MethodType):
        parts = value.__self__, value.__func__
    elif isinstance(value, partial):
        parts = value.func, *value.args, *value.keywords.values()
    elif isinstance(value, FunctionType):
        parts = _referred_to(value)
    elif isinstance(value, list | tuple | set | dict | deque):
        found.append(len(value))
        parts = list(value.values() if isinstance(value, dict) else value)[-MOST:]
    elif not isinstance(value, type) and package_of(value) not in {*KNOWN, "logging"}:
        parts = getattr(value, "__dict__", {}).values()
    if depth:
        for part in parts:
            _remember(part, found, depth - 1)


def _referred_to(function: FunctionType) -> Iterator[Any]:
    """What a function may keep between its calls."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # it is still empty
            yield cell.cell_contents
    if package_of(function) not in KNOWN:
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        known = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (each for each in known if not isinstance(each, FunctionType | ModuleType))


def package_of(code: Any) -> str:
    """The package that a function, method, class or the class of an object is written in. Names do not tell:
    `functools.wraps` copies them."""
    while isinstance(code, MethodType | partial):
        code = code.__func__ if isinstance(code, MethodType) else code.func
    if isinstance(code, FunctionType):
        if code.__code__.co_filename.startswith(KERNELS):
            return "kernels"
        home = code.__globals__.get("__name__", "")
    else:
        home = (code if isinstance(code, type | BuiltinFunctionType) else type(code)).__module__
    return str(home).partition(".")[0]


def is_foreign(code: Any, home: str | None = None) -> bool:
    """Whether a function, or what it is wrapped around, comes from a package that is not known, nor from `home`."""
    left = [code]
    for each in left:
        own = getattr(each, "__dict__", {})
        left += [own[name] for name in ("__wrapped__", "_torchdynamo_orig_callable") if name in own]
        if isinstance(each, partial | MethodType):
            left.append(each.func if isinstance(each, partial) else each.__func__)
            continue
        if package_of(each) not in KNOWN and package_of(each) != home:
            return True
    if isinstance(code, FunctionType) and home is None:
        _usual.add(code)
    return False


def foreign_code(model: CausalLM, cache: Any = None) -> Iterator[ForeignCode]:
    """The code of others that passes of a model run over a cache."""
    together = {**every_module._global_forward_pre_hooks, **every_module._global_forward_hooks}
    for number, hook in together.items():
        if is_foreign(hook):
            yield ForeignCode(hook, f"a hook of all modules, {_name(hook)}", number)
    kinds = set()
    for module in modules_of(model):
        own, kind = vars(module), type(module).__name__
        kinds.add(type(module))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in hooks.items() if hooks else ():
                if is_foreign(hook):
                    yield ForeignCode(hook, f"a hook of {kind}, {_name(hook)}", number, module)
        if "forward" in own and is_foreign(own["forward"]):
            yield ForeignCode(own["forward"], f"another forward of {kind}, {_name(own['forward'])}", None, module)
        if "_hf_hook" in own:  # accelerate's, of a class that may be anybody's
            for hook in getattr(own["_hf_hook"], "hooks", [own["_hf_hook"]]):
                if is_foreign(hook):
                    yield ForeignCode(hook, f"a hook of {kind}, {type(hook).__name__}")
    for kind_of in kinds:
        for method in ("forward", "__call__"):
            code = getattr(kind_of, method)
            if code not in _usual and is_foreign(code) and is_foreign(code, _ownpackage_of(kind_of, method, model)):
                yield ForeignCode(code, f"a forward of {kind_of.__name__}, {_name(code)}")
    yield from _replaced_functions(kinds)
    implementation = str(model.config.get_text_config(decoder=True)._attn_implementation)
    attention = ALL_ATTENTION_FUNCTIONS.get(implementation)
    if attention is not None and "/" not in implementation and is_foreign(attention):  # else a kernel of the Hub
        yield ForeignCode(attention, f"attention, {_name(attention)}")
    for mode in active_modes():
        if is_foreign(mode):
            yield ForeignCode(mode, f"in a mode of PyTorch, {_name(mode)}")
    if cache is not None:
        layers = {type(each) for each in cache.layers} | {cache.layer_class_to_replicate or DynamicLayer}
        updates = [each.update for each in layers if issubclass(each, CacheLayerMixin)]
        for code in (vars(cache).get("update", type(cache).update), *updates):
            if code not in _usual and is_foreign(code):
                yield ForeignCode(code, f"a cache, {_name(code)}")


def _replaced_functions(kinds: set[type[Any]]) -> Iterator[ForeignCode]:
    """Functions of others in PyTorch and in the modules of transformers, which call them by their names."""
    modules = {kind.__module__ for kind in kinds if package_of(kind) == "transformers"}
    homes: list[Any] = [torch, Tensor, functional, sdpa_attention, *map(sys.modules.__getitem__, sorted(modules))]
    for home in homes:
        held: Any = vars(home)
        count, names, functions = _unchanged.get(home, (0, [], []))
        if count == len(held) and list(map(held.get, names)) == functions:
            continue
        known = {name: code for name, code in list(held.items()) if callable(code) and not isinstance(code, ModuleType)}
        if home is torch:
            known = {name: code for name, code in known.items() if name in OPERATIONS}
        inner = {name: code for name, code in known.items() if not isinstance(code, BuiltinFunctionType | type)}
        others = [name for name, code in inner.items() if package_of(code) not in IMPORTED]
        if others := [name for name in others if not name.startswith(BETWEEN_PASSES)]:
            yield from (ForeignCode(known[n], f"another {n} of {home.__name__}, {_name(known[n])}") for n in others)
        else:
            _unchanged[home] = len(held), list(known), list(known.values())


def active_modes() -> list[Any]:
    """The modes that PyTorch's functions and operations go through in this thread, but for that of a default device."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [mode for mode in modes if type(mode).__module__ != DeviceContext.__module__]


def _ownpackage_of(kind: type[Any], method: str, model: CausalLM) -> str | None:
    """The package whose code is a model's own where a class of it has the method: that of the model's class."""
    owner = next(each for each in kind.__mro__ if method in vars(each))
    own = type(model).__module__.partition(".")[0]
    return own if owner.__module__.partition(".")[0] == own else None


def _name(code: Any) -> str:
    """Such as "steer (mine.hooks)"."""
    while isinstance(code, partial):
        code = code.func
    name, home = getattr(code, "__name__", type(code).__name__), getattr(code, "__module__", None)
    return f"{name} ({home})"
