"""Pretended accelerators, for machines without one: `cuda:0` and `cuda:1`, or `mps:0`, compute on the CPU, and count.

Tensors say that they lie there and refuse to mix with others, as real ones do. What an accelerator is slow at is
counted: kernel launches, uploads from the host, reads by the host (each waits for all that is queued), and
synchronisations. Time, memory, streams and other rounding are not pretended. Apple's device (`"mps"`) has no float64,
no operations beyond those that torch lists for it (`apple_operations.py`), and no CUDA beside it.

    with pretend_devices() as counts:
        model = on_device(model, "cuda:0")
        model.generate(on_device(ids, "cuda:0"), assistant_model=assistant)
        counts["read"]"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
import torch.mps
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdecpp.sampling.randomness import widest
from support.devices.apple_operations import is_missing

Placed = TypeVar("Placed", bound=Tensor | nn.Module)
CPU = torch.device("cpu")
NARROW = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)
DTYPES = {"cuda": (torch.float64, *NARROW), "mps": (*NARROW, torch.int16, torch.int8, torch.uint8)}
counts: Counter[str] = Counter()  # launch, upload, read, sync
# Tensors of indices may lie on the host, from where they are uploaded.
INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_", "aten::_unsafe_index"}
SHAPED_BY_NUMBERS = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::equal",
                     "aten::repeat_interleave"}  # fmt: skip


class DeviceTensor(Tensor):
    """A tensor of the host that says that it lies on a device.

    `host`: the numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor, device: torch.device) -> "DeviceTensor":
        if host.dtype not in DTYPES[device.type]:
            raise TypeError(f"{host.dtype} does not exist on {device}.")
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype,
            device=device,
        )  # fmt: skip
        made.host = host
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(func, args, kwargs or {})

    # What Python asks of a tensor beside the dispatcher. Reads by the host first.

    def _read(self) -> Tensor:
        counts["read"] += 1
        return self.host

    def item(self) -> Any:
        return self._read().item()

    def tolist(self) -> Any:
        return self._read().tolist()

    def cpu(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return self._read()

    def __bool__(self) -> bool:
        return bool(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __index__(self) -> int:
        return int(self._read())

    def __contains__(self, value: Any) -> bool:
        return bool((self == value).any())

    def numpy(self, *_args: Any, **_kwargs: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")

    __array__ = numpy

    def __repr__(self, **_kwargs: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host!r}, {self.device})"

    # What torch does without the dispatcher, or only after asking for a real device.

    def __iter__(self) -> Any:
        return iter(self.unbind(0))

    def __invert__(self) -> Any:
        return self.bitwise_not()

    def contiguous(self, *_args: Any, **_kwargs: Any) -> Any:
        if self.host.is_contiguous():
            return self
        counts["launch"] += 1
        return DeviceTensor(self.host.contiguous(), self.device)

    def new_tensor(  # type: ignore[override]
        self, data: Any, dtype: Any = None, device: Any = None, **_kwargs: Any
    ) -> Any:
        return torch.tensor(data, dtype=dtype or self.dtype, device=device or self.device)

    def copy_(self, source: Any, *_args: Any, **_kwargs: Any) -> Any:  # type: ignore[override]
        return _copy(self, source)

    def __getitem__(self, index: Any) -> Any:
        return DeviceTensor(self.host[_index(index)], self.device)

    def __setitem__(self, index: Any, value: Any) -> None:
        counts["launch"] += 1
        if isinstance(value, Tensor) and value.dim():
            _check_devices("__setitem__", [self, value])
        self.host[_index(index)] = host_of(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return memo.setdefault(id(self), DeviceTensor(self.host.clone(), self.device))


class _Dispatch(TorchDispatchMode):
    """Operations that make a tensor on a device out of none."""

    __module__ = DeviceContext.__module__  # no code of a user's

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled within; asking for that at each operation takes long."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_device(_wanted(args, kwargs)) or _placed(args, kwargs):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """`torch.tensor` and `copy_` into a tensor of the host do not pass through the dispatcher."""

    __module__ = DeviceContext.__module__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and _kind == "mps" and _placed(args, kwargs):
            # Which kernels it is made of, torch decides by the device.
            _check_devices("sdpa", [each for each in tensors_of(args, kwargs) if each.dim()])
            return DeviceTensor(func(*_on_host(args), **_on_host(kwargs)), _placed(args, kwargs)[0].device)
        if func not in (torch.tensor, torch.as_tensor):
            return func(*args, **kwargs)
        device = torch.device(kwargs.get("device", torch.get_default_device()) or "cpu")
        if not _is_device(device):
            return func(*args, **kwargs)
        data = args[0] if args else kwargs["data"]
        if isinstance(data, Tensor):
            return data.to(device, kwargs.get("dtype") or data.dtype)
        counts["upload"] += 1
        return DeviceTensor(torch.tensor(data, dtype=kwargs.get("dtype")), device)


_kind = "cuda"  # of the devices that are pretended


@contextmanager
def pretend_devices(kind: str = "cuda") -> Iterator[Counter[str]]:
    """Within it the devices of a kind exist, `"cuda"` or `"mps"`; yields what is counted."""
    torch._C._ensureCUDADeviceGuardSet()

    def synchronize(*_args: Any, **_kwargs: Any) -> None:
        counts["sync"] += 1

    def no_cuda(*_args: Any, **_kwargs: Any) -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    replaced: dict[str, Callable[..., Any]] = {
        f"torch.{kind}.get_rng_state": lambda *_: torch.get_rng_state(),
        f"torch.{kind}.set_rng_state": lambda state, *_: torch.set_rng_state(state),
        f"torch.{kind}.synchronize": synchronize,
        "torch.accelerator.synchronize": synchronize,
        # `module.to` else keeps its Parameter objects, which cannot become tensors of another class.
        "torch.__future__.get_swap_module_params_on_conversion": lambda: True,
        "hf_specdecpp.cuda_graphs.graphs.can_capture": lambda _device: False,  # what is launched is counted
        "torch.cuda._lazy_init": no_cuda,
    }
    if kind == "cuda":
        replaced |= {
            "torch.cuda._lazy_init": lambda: None,
            "torch.cuda.get_device_name": lambda *_: "a pretend device",
            "torch.cuda.current_device": lambda: 0,
        }
    else:
        replaced |= {
            "torch.accelerator.is_available": lambda *_: True,
            "torch.accelerator.current_accelerator": lambda *_: torch.device(kind),
            f"torch.backends.{kind}.is_available": lambda *_: True,
            "torch.Event": lambda **_: SimpleNamespace(record=synchronize, synchronize=synchronize, query=lambda: True),
        }
    counts.clear()
    widest.cache_clear()
    with pytest.MonkeyPatch.context() as patch, _Dispatch(), _Functions():
        for name, function in replaced.items():
            patch.setattr(name, function)
        patch.setattr(f"{__name__}._kind", kind)
        yield counts
    widest.cache_clear()


def on_device(what: Placed, device: str | None = None) -> Placed:
    """A tensor, or in place all of a module's: what they share they share there, too. By default on the first one."""
    place = torch.device(device or f"{_kind}:0")
    if isinstance(what, Tensor):
        return DeviceTensor(what.detach(), place)  # type: ignore[return-value]
    moved: dict[int, nn.Parameter] = {}
    for module in what.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in moved:
                moved[id(parameter)] = nn.Parameter(DeviceTensor(parameter.detach(), place), requires_grad=False)
            module._parameters[name] = None if parameter is None else moved[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else DeviceTensor(buffer, place)
    return what


def spread(model: Any, places: dict[str, str]) -> Any:
    """A model with its parts on several devices, as `device_map` leaves it; it is called from `cuda:0`.

    `places`: device of each part, by name. What has no name there has no tensors."""
    for name, device in places.items():
        part = on_device(model.get_submodule(name), device)
        add_hook_to_module(part, AlignDevicesHook(execution_device=torch.device(device)))
    add_hook_to_module(model, AlignDevicesHook(execution_device=torch.device("cuda:0"), io_same_device=True))
    model.hf_device_map = places
    return model


@cache
def _named(func: Any) -> tuple[str, bool]:
    """An operation's name, and whether it only makes a view."""
    aliases = [returned.alias_info for returned in func._schema.returns if returned.alias_info is not None]
    return func._schema.name, not all(each.is_write for each in aliases)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation of which a tensor is on a device, or shall be."""
    name, is_view = _named(func)
    if name == "aten::copy_":
        return _copy(*args, **kwargs)
    if name in ("aten::to", "aten::_to_copy"):
        return _moved(func, args, kwargs)
    if name == "aten::_local_scalar_dense":
        counts["read"] += 1
        return func(host_of(args[0]))
    tensors = tensors_of(args, kwargs)
    placed = [each for each in tensors if isinstance(each, DeviceTensor)]
    if _kind == "mps" and is_missing(func):
        raise NotImplementedError(f"The operator '{name}' is not currently implemented for the MPS device.")
    if name not in INDEXED:
        _check_devices(name, [each for each in tensors if each.dim()])
    counts["read"] += name in SHAPED_BY_NUMBERS
    wanted = _wanted(args, kwargs)  # also of `zeros_like`
    device = torch.device(wanted) if wanted else placed[0].device
    out = func(*_on_host(args), **_on_host(kwargs))
    counts["launch"] += not is_view
    by_host = {id(each.host): each for each in placed}  # what an operation in place returns
    return _map(lambda each: by_host[id(each)] if id(each) in by_host else _wrap(each, device), out)


def _moved(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    source, others = args[0], [each for each in args[1:] if isinstance(each, Tensor)]
    wanted = others[0].device if others else _wanted(args, kwargs) or source.device
    out = func(*_on_host(args), **_on_host(kwargs))
    if not _is_device(wanted):
        counts["read"] += isinstance(source, DeviceTensor)
        _check_conversion(source, out)
        return out
    if isinstance(source, DeviceTensor) and out is source.host and source.device == torch.device(wanted):
        return source
    counts["launch" if isinstance(source, DeviceTensor) else "upload"] += 1
    return DeviceTensor(out, torch.device(wanted))


# Called with a device and what its current stream has to do, where the host does not wait for that.
later: Callable[[torch.device, Callable[[], Any]], Any] = lambda _device, work: work()  # noqa: E731 - reassigned by tests


def _copy(into: Tensor, source: Any, non_blocking: bool = False) -> Tensor:
    kind = {(True, True): "launch", (True, False): "upload", (False, True): "read"}
    counts[kind[isinstance(into, DeviceTensor), isinstance(source, DeviceTensor)]] += 1
    if non_blocking and isinstance(source, DeviceTensor) and not isinstance(into, DeviceTensor):
        now = source.host.clone()
        later(source.device, lambda: into.copy_(now))
    else:
        _check_conversion(source, into)
        host_of(into).copy_(host_of(source))
    return into


def _check_conversion(source: Tensor, into: Tensor) -> None:
    """Numbers of a device that the host reads are converted before they are copied."""
    if isinstance(source, DeviceTensor) and into.dtype not in DTYPES[source.device.type]:
        raise TypeError(f"{into.dtype} does not exist on {source.device}, which converts what the host reads.")


def _check_devices(name: str, tensors: list[Tensor]) -> None:
    devices = {each.device for each in tensors}
    if len(devices) > 1:
        found = " and ".join(sorted(map(str, devices)))
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {found} ({name}).")


def tensors_of(*trees: Any) -> list[Tensor]:
    """Of an operation's arguments. This and `_map` run before and after each one: torch's own for trees are slow."""
    found = []
    for each in trees:
        if isinstance(each, Tensor):
            found.append(each)
        elif isinstance(each, (tuple, list)):
            found += tensors_of(*each)
        elif isinstance(each, dict):
            found += tensors_of(*each.values())
    return found


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, (tuple, list)):
        return type(tree)([_map(function, each) for each in tree])
    return function(tree)


def _placed(*trees: Any) -> list[DeviceTensor]:
    return [each for each in tensors_of(*trees) if isinstance(each, DeviceTensor)]


def _wanted(args: Any, kwargs: dict[str, Any]) -> Any:
    """The device that an operation is asked for."""
    return kwargs.get("device") or next((each for each in args if isinstance(each, torch.device)), None)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device).type == _kind


def host_of(each: Any) -> Any:
    if isinstance(each, DeviceTensor):
        return each.host
    return CPU if isinstance(each, torch.device) else each


def _on_host(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {
            name: CPU if name == "device" and value is not None else _on_host(value) for name, value in tree.items()
        }
    return _map(host_of, tree)


def _wrap(each: Any, device: torch.device) -> Any:
    if not isinstance(each, Tensor) or isinstance(each, DeviceTensor) or not _is_device(device):
        return each
    return DeviceTensor(each, device)


def _index(index: Any) -> Any:
    """An index of Python's: a mask makes the shape depend on numbers; lists and indices of the host are uploaded."""
    if isinstance(index, DeviceTensor):
        counts["read"] += index.dtype == torch.bool
        return index.host
    if isinstance(index, Tensor):
        counts["upload"] += 1
        return index
    if isinstance(index, list):
        counts["upload"] += 1
    return tuple(map(_index, index)) if isinstance(index, tuple) else index
