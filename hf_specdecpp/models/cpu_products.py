"""Faster float32 matrix products on a CPU, for the few rows that a draft step or a verification has.

PyTorch gives float32 products to MKL. For two or three rows that reads the weights two or three times, and on
processors of other makers it is slow for one. oneDNN, which comes with PyTorch and does its bfloat16 products, takes
half the time for 2 to 256 rows; and half of that again for few rows if it may keep a copy of the weights in an order of
its own (`pack`), since otherwise it spends most of its time on reordering them.

All of them round in the last digits, each in its own way: the same kind of difference as between a pass over one token
and a pass over several, which verification has anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

ROWS = 4  # that a packed copy is made for; its order is the same for all numbers but 1

# Weight -> (its version when it was packed, the copy). An entry goes when its weight does.
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()


@contextmanager
def fast_linear(*models: nn.Module) -> Iterator[None]:
    """Within it the linear layers of the models use the faster products, where that concerns them.

    Until it is left each of them has a `forward` of its own. Their weights are not touched, and layers whose forward
    somebody else has replaced stay as they are.
    """
    layers = [layer for layer in _layers(*models) if "forward" not in vars(layer)]
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer, *_packed.get(layer.weight, (None, None)))
    try:
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)  # another thread may have been here


def pack(*models: nn.Module) -> int:
    """Keep packed copies of the linear layers' float32 weights, those of a CPU.

    A copy is not used any more once its weight was changed in place, unless that went past autograd (with `.data`):
    call `unpack` after such changes.

    Returns:
        Bytes of the copies made now.
    """
    new = 0
    for layer in _layers(*models):
        weight = layer.weight
        if not weight.is_inference() and not _is_current(weight):
            copy = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
            _packed[weight] = weight._version, copy
            new += weight.nbytes
    return new


def unpack(*models: nn.Module) -> None:
    """Give the memory of `pack` back."""
    for layer in _layers(*models):
        _packed.pop(layer.weight, None)


def is_packed(model: nn.Module) -> bool:
    """Whether there are packed copies for it."""
    return any(_is_current(layer.weight) for layer in _layers(model))


def _forward(layer: nn.Linear, version: int | None, copy: Tensor | None, input: Tensor) -> Tensor:
    weight = layer.weight
    if weight.dtype != torch.float32 or input.dtype != torch.float32 or torch.is_grad_enabled() or not input.numel():
        return functional.linear(input, weight, layer.bias)
    chosen = weight if copy is None or version != weight._version else copy
    product: Tensor = torch.ops.mkldnn._linear_pointwise(input, chosen, layer.bias, "none", [], "")
    return product


def _layers(*models: nn.Module) -> Iterator[nn.Linear]:
    """Ordinary float32 linear layers on a CPU, neither quantised nor of another library."""
    if not torch.backends.mkldnn.is_available():
        return
    for model in models:
        for module in model.modules():
            if type(module) is nn.Linear and _is_ordinary(module.weight):
                yield module


def _is_ordinary(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


def _is_current(weight: Tensor) -> bool:
    version, _ = _packed.get(weight, (None, None))
    return version is not None and version == weight._version
