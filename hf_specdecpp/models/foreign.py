"""Foreign code in a target's forward passes: hooks, patched forwards and layers of packages not in `KNOWN`.

Such code may depend on the number of tokens in a pass, for instance a hook that changes the last row only. So passes
over several tokens are first compared with passes over fewer tokens (`caches.trial.Trial`). `ForeignPasses` stores the
result for later generations."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
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
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import CausalLM, modules_of

OURS = __name__.partition(".")[0]
# Packages whose hooks, forwards and layers treat all tokens of a pass alike: libraries of models, and for their
# quantisation, adapters, distribution and training.
KNOWN = {
    OURS, "torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "kernels",
    "aqlm", "auto_round", "awq", "bitsandbytes", "compressed_tensors", "eetq", "fbgemm_gpu", "fp_quant", "gptqmodel",
    "hqq", "optimum", "quark", "spqr_quant", "torchao", "vptq",
}  # fmt: skip
# The hooks of PEFT that treat all tokens alike. Others do not: that of activated LoRA adapts the last tokens of each
# pass only, and that of ShadowPEFT replaces the cache.
PEFT_HOOKS = {"_adapter_names_pre_forward_hook", "make_inputs_require_grad"}
# Further packages whose functions transformers' modules import.
IMPORTED = KNOWN | sys.stdlib_module_names | {
    "causal_conv1d", "einops", "fla", "flash_attn", "flash_attn_interface", "huggingface_hub", "mamba_ssm", "natten",
    "numpy", "packaging", "safetensors", "scipy", "tqdm", "typing_extensions", "xlstm",
}  # fmt: skip
KERNELS = os.environ.get("KERNELS_CACHE") or HF_HUB_CACHE  # only kernels of the Hub are imported from this folder


class ForeignCode:
    """A foreign function `code` with a `name` for messages and the `module` that it belongs to, if any. `key` is equal
    for code that is found again by a later call: the unique `number` of a hook, or a weak reference."""

    def __init__(self, code: Any, name: str, number: int | None = None, module: nn.Module | None = None) -> None:
        self.code, self.name, self.module = code, name, module
        self.key: Any = number  # hooks have unique numbers; an address may be reused
        if number is None:
            try:
                self.key = ref(code)
            except TypeError:  # cannot be identified later
                self.key = object()


@dataclass
class ForeignPasses:
    """What comparisons have shown so far about a target's forward passes with foreign code. `Trial` updates it."""

    name: str  # of the code for messages; of the first piece if there are several
    width: int = 1  # maximum number of tokens in a pass, as verified so far
    reason: str | None = None  # why the target cannot be assisted; `None` as long as no check has failed


# Limits of `remembered`: depth of references, entries of a list, elements of a tensor.
DEPTH, MOST, SMALL = 4, 16, 65_536
SIMPLE = {bool, int, float, str, type(None)}
_usual: WeakSet[Any] = WeakSet()  # functions found not to be foreign, which later calls need not check again
# For Python modules and `Tensor`, if nothing foreign is in them: number of names, names of functions, and functions.
_unchanged: dict[Any, tuple[int, list[str], list[Any]]] = {}
# Beginnings of the names of PyTorch functions that run between passes: draws, and copies to pinned memory.
BETWEEN_PASSES = ("rand", "multinomial", "bernoulli", "normal", "exponential", "uniform", "pin_memory")
# The functions of `torch` that compute with tensors.
OPERATIONS = {name for name in dir(torch._C._VariableFunctions) if name[0] != "_"}.union(torch.functional.__all__)
# Methods of a model that make the arguments of its passes. The second is called after each token of plain generation,
# but here only after the prompt, so one from a package that is not in `KNOWN` rules out candidates.
PREPARING = ("prepare_inputs_for_generation", "_update_model_kwargs_for_generation")
# For each target: the keys of its foreign code, and the record of passes with this code.
_known: WeakKeyDictionary[CausalLM, tuple[list[Any], ForeignPasses]] = WeakKeyDictionary()


def foreign_passes(model: CausalLM, cache: Any = None) -> ForeignPasses | None:
    """The record of the model's passes over `cache`, if these run foreign code, else `None`. Later calls return this
    record as long as the foreign code is unchanged, and otherwise a new record with a width of 1."""
    found = list(foreign_code(model, cache))
    if not found:
        return None
    keys = [each.key for each in found]
    known = _known.get(model)
    if known is None or known[0] != keys:
        known = _known[model] = keys, ForeignPasses(found[0].name, reason=_no_candidates(model, cache))
    return known[1]


def _no_candidates(model: CausalLM, cache: Any) -> str | None:
    """Why foreign code rules out all candidates, for the record of `foreign_passes`; `None` if `Trial` decides."""
    name = PREPARING[1]
    if is_foreign(_method(model, name)):
        return f"{type(model).__name__} runs another {name}, which changes the arguments of its passes after each token"
    if cache is not None and any(map(is_foreign, _methods_of(cache, "crop"))):
        return f"{type(cache).__name__} has a crop of its own, which may not take back exactly the rejected candidates"
    return None


def remembered(model: CausalLM) -> list[Any]:
    """The visible state of a model's foreign code, which `Trial` compares before and after passes: numbers, strings,
    lengths of lists and sums of tensors, in attributes of objects and in variables that functions refer to."""
    found: list[Any] = []
    for each in foreign_code(model):
        _remember(each.code, found, DEPTH)
        if each.module is not None:  # which a hook may write to
            found += (value for value in vars(each.module).values() if type(value) in SIMPLE)
    return found


def _remember(value: Any, found: list[Any], depth: int) -> None:
    """For `remembered`: append the visible state of `value`, and of objects up to `depth` references on, to `found`."""
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
        found.append((repr(value), length_hint(value, 0)))  # the value of `itertools.count`, or what remains of a list
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
    """Objects in which a function may keep state between its calls."""
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # an empty cell
            yield cell.cell_contents
    if package_of(function) not in KNOWN:
        yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        known = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from (each for each in known if not isinstance(each, FunctionType | ModuleType))


def package_of(code: Any) -> str:
    """Name of the top-level package that defines a function, a method, a class, or the class of another object. Of
    functions `__module__` is not used, because `functools.wraps` copies it."""
    while isinstance(code, MethodType | partial):
        code = code.__func__ if isinstance(code, MethodType) else code.func
    if isinstance(code, FunctionType):
        if code.__code__.co_filename.startswith(KERNELS):
            return "kernels"
        home = code.__globals__.get("__name__", "")
    else:
        home = (code if isinstance(code, type | BuiltinFunctionType) else type(code)).__module__
    return str(home).partition(".")[0]


def names_in(code: CodeType) -> Iterator[str]:
    """Names of the global variables and attributes that a function's code uses, including its nested functions."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from names_in(each)


def is_foreign(code: Any, home: str | None = None) -> bool:
    """Whether `code`, or a function that it wraps, comes from a package that is neither in `KNOWN` nor named `home`."""
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


def _is_foreign_hook(hook: Any) -> bool:
    if package_of(hook) != "peft":
        return is_foreign(hook)
    return getattr(hook.func if isinstance(hook, partial) else hook, "__name__", None) not in PEFT_HOOKS


def foreign_code(model: CausalLM, cache: Any = None) -> Iterator[ForeignCode]:
    """All foreign code that a model's passes over `cache` run, including methods of the cache."""
    together = {**every_module._global_forward_pre_hooks, **every_module._global_forward_hooks}
    for number, hook in together.items():
        if _is_foreign_hook(hook):
            yield ForeignCode(hook, f"a hook of all modules, {_name(hook)}", number)
    kinds = set()
    for module in modules_of(model):
        own, kind = vars(module), type(module).__name__
        kinds.add(type(module))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number, hook in hooks.items():
                if _is_foreign_hook(hook):
                    yield ForeignCode(hook, f"a hook of {kind}, {_name(hook)}", number, module)
        if "forward" in own and is_foreign(own["forward"]):
            yield ForeignCode(own["forward"], f"another forward of {kind}, {_name(own['forward'])}", None, module)
        if "_hf_hook" in own:  # a hook of accelerate, whose class may be foreign
            for hook in getattr(own["_hf_hook"], "hooks", [own["_hf_hook"]]):
                if is_foreign(hook):
                    yield ForeignCode(hook, f"a hook of {kind}, {type(hook).__name__}")
    for kind_of in kinds:
        for method in ("forward", "__call__"):
            code = getattr(kind_of, method)
            if code not in _usual and is_foreign(code) and is_foreign(code, _own_package_of(kind_of, model)):
                yield ForeignCode(code, f"a forward of {kind_of.__name__}, {_name(code)}")
    for method in PREPARING if hasattr(model, PREPARING[0]) else ():  # other modules, such as drafts, have none
        home = _own_package_of(type(model), model) if method == PREPARING[0] else None
        if is_foreign(code := _method(model, method), home):
            yield ForeignCode(code, f"another {method}, {_name(code)}")
    yield from _replaced_functions(kinds)
    config = model.config.get_text_config(decoder=True)
    attention, experts = str(config._attn_implementation), str(getattr(config, "_experts_implementation", None))
    registered = {
        "attention": (ALL_ATTENTION_FUNCTIONS, attention),
        "an attention mask": (ALL_MASK_ATTENTION_FUNCTIONS, attention),
        "experts": (ALL_EXPERTS_FUNCTIONS, experts),
    }
    for what, (functions, name) in registered.items():
        code = functions.get(name)
        if code is not None and "/" not in name and is_foreign(code):  # with "/" a kernel of the Hub
            yield ForeignCode(code, f"{what}, {_name(code)}")
    for mode in active_modes():
        if is_foreign(mode):
            yield ForeignCode(mode, f"in a mode of PyTorch, {_name(mode)}")
    if cache is not None:
        for code in (*_methods_of(cache, "update"), *_methods_of(cache, "crop")):
            if code not in _usual and is_foreign(code):
                yield ForeignCode(code, f"a cache, {_name(code)}")


def _methods_of(cache: Any, name: str) -> list[Any]:
    """The method `name` of a cache, then those of the classes of its layers."""
    layers = {type(each) for each in cache.layers} | {cache.layer_class_to_replicate or DynamicLayer}
    own = vars(cache).get(name, getattr(type(cache), name))
    return [own, *(getattr(each, name) for each in layers if issubclass(each, CacheLayerMixin))]


def _replaced_functions(kinds: set[type[Any]]) -> Iterator[ForeignCode]:
    """Foreign functions that replace those of PyTorch or of transformers' files, which define the classes `kinds`."""
    modules = {kind.__module__ for kind in kinds if package_of(kind) == "transformers"}
    homes: list[Any] = [torch, Tensor, functional, sdpa_attention, *map(sys.modules.__getitem__, sorted(modules))]
    for home in homes:
        own: Any = vars(home)
        count, names, functions = _unchanged.get(home, (0, [], []))
        if count == len(own) and list(map(own.get, names)) == functions:
            continue
        known = {name: code for name, code in list(own.items()) if callable(code) and not isinstance(code, ModuleType)}
        if home is torch:
            known = {name: code for name, code in known.items() if name in OPERATIONS}
        others = [
            ForeignCode(code, f"another {name} of {home.__name__}, {_name(code)}")
            for name, code in known.items()
            if not (isinstance(code, BuiltinFunctionType | type) or name.startswith(BETWEEN_PASSES))
            and package_of(code) not in IMPORTED
        ]
        yield from others
        if not others:
            _unchanged[home] = len(own), list(known), list(known.values())


def active_modes() -> list[Any]:
    """The `TorchFunctionMode`s and `TorchDispatchMode`s active in this thread, except that of a default device."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    return [mode for mode in modes if type(mode).__module__ != DeviceContext.__module__]


def _method(model: CausalLM, name: str) -> Any:
    """The method `name` of a model, not bound: `getattr(model, name)` would be another object each time."""
    return vars(model).get(name) or getattr(type(model), name)


def _own_package_of(kind: type[Any], model: CausalLM) -> str | None:
    """The package of the model's class, if it alone defines the forward of the module class `kind`, else `None`.

    Example: the code of a model is in the Hub's package "transformers_modules". For its class of layers that extends
    `torch.nn.Module` the result is "transformers_modules", for a class that extends `LlamaAttention` `None`."""
    own = type(model).__module__.partition(".")[0]
    defining = [each for each in kind.__mro__ if "forward" in vars(each) and each is not nn.Module]
    return own if {each.__module__.partition(".")[0] for each in defining} == {own} else None


def _name(code: Any) -> str:
    """The name of `code` and of its Python module, for messages: "steer (mine.hooks)"."""
    while isinstance(code, partial):
        code = code.func
    name, home = getattr(code, "__name__", type(code).__name__), getattr(code, "__module__", None)
    return f"{name} ({home})"
