"""A description of all that a model's pass depends on (`identity`), which tells whether its graphs are still valid."""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Number
from types import CellType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig

from hf_specdecpp.models.foreign import KNOWN, OURS, names_in, package_of

PLAIN = {bool, int, str, bytes, range, type(None), torch.dtype, torch.device, torch.Size}  # compared by value
NOTE = "_previous_max_cache_length"  # an attribute that `generate()` sets, and no pass depends on
BUILTIN = {dict, list, tuple, set, frozenset}
EMPTY = {dict, OrderedDict, list, set}
# Types of objects that refer to few others and have no fields: methods, and the variables of closures.
HOLDING = MethodType | staticmethod | classmethod | property | slice | CellType
HOOKS = {"_forward_hooks", "_forward_pre_hooks"}
# Standard modules whose objects are described by their attributes. Others are too connected: a logger has all loggers.
HOLDERS = {"argparse", "collections", "functools", "types"}
MOST = 100_000  # objects, and items of one object, that are described


def identity(*parts: object, by_value: bool = False) -> list[Hashable]:
    """A description of all that the operations of a model's pass, or of another object's call, depend on: attributes
    of all objects that it refers to, hooks, configs, addresses and shapes of tensors, closures and global variables of
    functions, settings of PyTorch. If two descriptions are equal, a graph captured at one is valid at the other.

    Args:
        by_value: describe tensors by their contents instead of their addresses, to compare different objects."""
    walk = ObjectWalk(by_value)
    walk.go((torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks, *parts))
    return [*_kernels(), *walk.found]


def _kernels() -> Iterator[Hashable]:
    """Settings of PyTorch that computations depend on, except that for cuDNN's attention (`without_cudnn`)."""
    backends: Any = torch.backends
    cuda, cudnn = backends.cuda, backends.cudnn
    yield from (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), cudnn.enabled)
    yield from (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled())
    yield from (backends.fp32_precision, cuda.matmul.fp32_precision, cudnn.conv.fp32_precision)
    yield from (cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_bf16_reduced_precision_reduction)
    yield cuda.matmul.allow_fp16_accumulation


def tensors_of(*parts: object) -> list[Tensor]:
    """All tensors that models or other objects refer to, directly or through other objects."""
    walk = ObjectWalk()
    walk.go(parts)
    return walk.tensors


class SameObject:
    """A reference to an object. Two are equal if they refer to one object. It is weak if the object's type allows;
    objects of other types, such as a memory format, are small and stay alive."""

    def __init__(self, each: Any) -> None:
        self.ref = ref(each) if type(each).__weakrefoffset__ else each

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObject) and self.ref is other.ref

    def __hash__(self) -> int:
        return id(self.ref)


class ObjectWalk:
    """A walk through objects and all that they refer to. Each object is described once, and later named by a number.
    Functions and classes of installed packages are compared by identity; those of users and of transformers' models,
    which users patch, are also described.

    Attributes:
        found: the description; keeps no part of a model alive.
        tensors: the tensors that were found.
    """

    def __init__(self, by_value: bool = False) -> None:
        self.by_value = by_value
        self.found: list[Hashable] = []
        self.tensors: list[Tensor] = []
        self._numbers: dict[int, int] = {}  # by `id`, which is unique as long as `_objects` contains the objects
        self._objects: list[Any] = []
        self._slots: dict[type, list[str]] = {}

    def go(self, parts: tuple[object, ...]) -> None:
        self._note("parts", parts)
        for place, each in enumerate(self._objects):  # the list grows meanwhile
            if place < MOST:
                self._describe(each)

    def _note(self, name: Hashable, each: Any) -> None:
        """Add the value `each` of a field `name`: itself, or the number of an object that is described later."""
        kind: Any = type(each)
        if name in HOOKS and each:  # without ours, which exist while another sequence is read
            each = {key: hook for key, hook in list(each.items()) if package_of(hook) != OURS}
        if (kind in EMPTY and not each) or kind is GenerationConfig or name == NOTE:  # most are empty
            return
        if kind in PLAIN:
            self.found += name, kind, each
        elif kind in (float, complex):
            self.found += name, repr(each)  # 2.0 is not 2, and NaN is NaN
        elif kind not in EMPTY and isinstance(each, Tensor):
            self._tensor(name, each)
        elif kind is not FunctionType or package_of(each) != OURS:
            number = self._numbers.setdefault(id(each), len(self._objects))
            if number == len(self._objects):
                self._objects.append(each)
            self.found += name, number

    def _all(self, items: Iterable[tuple[Hashable, Any]]) -> None:
        for name, each in list(items)[:MOST]:  # which another thread may change meanwhile
            self._note(name, each)

    def _tensor(self, name: Hashable, each: Tensor) -> None:
        self.tensors.append(each)
        self.found += name, each.shape, each.dtype
        if self.by_value:
            self.found.append(each.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        elif each.layout is torch.strided:  # PyTorch cannot move a tensor of tensors that has weak references
            self.found += each.data_ptr() or hasattr(each, "__tensor_flatten__") or SameObject(each), each.stride()
        else:
            self.found.append(SameObject(each))
        # Users' attributes and the parts of tensor subclasses, without the marks of torch.compile.
        if own := {name: value for name, value in self._fields(each).items() if name[:7] != "_dynamo"}:
            self._all(own.items())

    def _describe(self, each: Any) -> None:
        """Add what an object refers to, which depends on its type, to the description."""
        if isinstance(each, FunctionType):
            self._function(each)
        elif isinstance(each, HOLDING):
            self._all(enumerate(gc.get_referents(each)))
        elif isinstance(each, type):
            self._class(each)
        else:
            self._object(each, type(each))

    def _object(self, each: Any, kind: type) -> None:
        has_content = self._content(each)
        if kind in BUILTIN:
            return
        self._note("class", kind)
        is_connected = package_of(kind) in sys.stdlib_module_names - HOLDERS or isinstance(each, ModuleType)
        fields = {} if is_connected else self._fields(each)
        self._all(fields.items())
        if not (fields or has_content or package_of(kind) == OURS):
            self.found.append(SameObject(each))  # its content is unknown

    def _content(self, each: Any) -> bool:
        """Describe the content of a container, number or string. False if the object is none of these."""
        if isinstance(each, dict | Mapping):
            names, values = list(each), list(each.values())
            self.found.append(len(names))
            if not PLAIN.issuperset(map(type, names)):
                self._all(enumerate(names))
                names = list(range(len(names)))
            self._all(zip(names, values, strict=False))  # another thread may have changed it
        elif isinstance(each, np.ndarray | np.generic):
            self.found += each.dtype, each.shape, each.tobytes()
        elif isinstance(each, Number):
            self.found.append(float(each).hex() if isinstance(each, float) else each)
        elif isinstance(each, str | bytes):
            self.found.append(each)
        elif isinstance(each, list | tuple | Sequence | Set):
            self.found.append(len(each))
            self._all(enumerate(each))
        else:
            return False
        return True

    def _fields(self, each: Any) -> dict[str, Any]:
        kind = type(each)
        if kind not in self._slots:
            names = (item for base in kind.__mro__ for item in vars(base).items())
            self._slots[kind] = [name for name, value in names if isinstance(value, MemberDescriptorType)]
        own: dict[str, Any] = getattr(each, "__dict__", {})
        return own if not self._slots[kind] else {name: getattr(each, name, None) for name in self._slots[kind]} | own

    def _class(self, each: type) -> None:
        self.found.append(SameObject(each))
        for kind in each.__mro__:
            if _is_open(kind.__module__):
                self._all((name, value) for name, value in vars(kind).items() if name[:2] != "__" or name == "__call__")
        if issubclass(each, nn.Module):
            self._note("forward", each.forward)

    def _function(self, each: FunctionType) -> None:
        self.found.append(each.__code__)
        self._all((("defaults", each.__defaults__), ("named", each.__kwdefaults__), ("of it", vars(each))))
        self._note("closure", each.__closure__)
        known, is_users = each.__globals__, _is_users(_home(each))
        for name in names_in(each.__code__):
            value = known.get(name, known)
            if isinstance(value, FunctionType | type) and not _is_open(_home(value)):
                self.found += name, SameObject(value)
            elif type(value) in (FunctionType, float, *PLAIN) or is_users and value is not known:
                self._note(name, value)
            if is_users and isinstance(value, ModuleType) and _is_users(value.__name__):
                known = vars(value) | known  # variables of this module may be read as attributes


def _home(code: Any) -> str:
    """The name of the Python module that defines a function or a class."""
    return str(code.__globals__.get("__name__", "") if isinstance(code, FunctionType) else code.__module__)


def _is_open(module: str) -> bool:
    return module.startswith("transformers.models.") or _is_users(module)


def _is_users(module: str) -> bool:
    """Whether a Python module is the user's own: not of an installed package or the standard library."""
    package = module.partition(".")[0]
    if package in KNOWN or package in sys.stdlib_module_names:
        return False
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" not in file and "dist-packages" not in file
