"""Faster float32 matrix products on a CPU, for the few rows that a draft step or a verification has.

PyTorch gives float32 products to MKL. For two or three rows that reads the weights two or three times, and on
processors of other makers it is slow for one. oneDNN, which comes with PyTorch and does its bfloat16 products, takes
half the time for 2 to 256 rows; and half of that again for few rows if it may keep a copy of the weights in an order of
its own (`pack`), since otherwise it spends most of its time on reordering them.

All of them round in the last digits, each in its own way: the same kind of difference as between a pass over one token
and a pass over several, which verification has anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from hf_specdecpp.typing import CausalLM

ROWS = 4  # that a packed copy is made for; its order is the same for all numbers but 1

# Weight -> (its version when it was packed, the copy). An entry goes when its weight does.
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()


def fast_linear(model: CausalLM) -> AbstractContextManager[Any]:
    """Within it the forward of `model` uses the faster products, where that concerns it; elsewhere it does nothing."""
    return _OneDNN() if _concerns(model) else nullcontext()


def pack(*models: nn.Module) -> int:
    """Keep packed copies of the linear layers' float32 weights, those of a CPU.

    A weight that is changed in place later loses its copy (but for changes that go past autograd, with `.data`: call
    `unpack` after such).

    Returns:
        Bytes of the copies made now.
    """
    new = 0
    for weight in _weights(*models):
        if weight not in _packed:
            with torch.no_grad():
                copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            _packed[weight] = weight._version, copy
            new += weight.nbytes
    return new


def unpack(*models: nn.Module) -> None:
    """Give the memory of `pack` back."""
    for weight in _weights(*models):
        _packed.pop(weight, None)


def is_packed(model: nn.Module) -> bool:
    """Whether there are packed copies for it."""
    return any(weight in _packed for weight in _weights(model))


class _OneDNN(TorchFunctionMode):
    """Replaces `torch.nn.functional.linear` in this thread; modules and weights are not touched."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is functional.linear:
            return _linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not _is_ordinary(weight) or input.dtype != weight.dtype or torch.is_grad_enabled() or not input.numel():
        return functional.linear(input, weight, bias)
    version, copy = _packed.get(weight, (None, None))
    if copy is not None and version != weight._version:
        del _packed[weight]
        copy = None
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, weight if copy is None else copy, bias, "none", [], "")
    return product


def _weights(*models: nn.Module) -> Iterator[Tensor]:
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.Linear) and _is_ordinary(module.weight) and not module.weight.is_inference():
                yield module.weight


def _concerns(model: CausalLM) -> bool:
    return model.device.type == "cpu" and model.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def _is_ordinary(weight: Any) -> bool:
    """Neither quantised nor of another library."""
    return type(weight) in (Tensor, nn.Parameter) and weight.dtype == torch.float32 and weight.device.type == "cpu"
