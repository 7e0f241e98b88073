"""Counts the reads that would wait for a device, on CPU tensors: numbers that go from a tensor to the host."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hf_specdecpp.generation import text as verification
from hf_specdecpp.sampling import verification as at_once

# What `int()`, `float()`, `bool()` and `item()` come to; and operations whose result's shape depends on numbers.
READING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::unique_dim"}


class Reads(TorchDispatchMode):
    """Counts within a `with` block.

    `count`: of reads so far."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._schema.name in READING
        return func(*args, **(kwargs or {}))


@contextmanager
def reads() -> Iterator[Reads]:
    """Counts what the block reads, `tolist`, `numpy` and `cpu` included, which do not go through the dispatcher."""
    counter = Reads()

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            counter.count += 1
            return method(tensor, *args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch, counter:
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
        yield counter


def pretend_that_reads_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds decide as they do on a device."""
    for module in (verification, at_once):
        monkeypatch.setattr(module, "waits_for_reads", lambda device: True)
