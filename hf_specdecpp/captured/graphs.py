"""Functions of tensors that a device runs as one launch each: CUDA graphs, captured once and replayed (`Graphs`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)
MOST_GRAPHS = 96  # of one object; the first of more goes
WARM_UPS = 2  # runs before a capture: libraries allocate their workspaces in the first, kernels are chosen by then


class Graph(Protocol):
    def replay(self) -> None:
        """Run all that was captured again, on what its tensors hold now."""


class CannotCaptureError(RuntimeError):
    """A function waits for its device, or does something else that no graph can repeat."""


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def is_capturing() -> bool:
    """Whether what runs is being captured, or warmed up for that; from then on only its graph runs."""
    return _capturing.get()


class Graphs:
    """Graphs of functions, each captured when it is first run, in one pool of memory.

    A function reads and writes tensors that stay where they are, and returns nothing: memory that a graph allocates is
    written over by the next graph of the pool. Numbers, shapes and branches of Python stay as they were at the capture,
    so all that decides them is part of the key.

    Example: `graphs.run(("pass", 4), read, [length])` runs `read` three times, then a graph of `read`; `length` is as
    if only the graph had run. From then on only the graph runs.

    Args:
        beside: others of the same device, whose pool these share: no two graphs of both run at once.

    Attributes:
        seconds, num_bytes: that captures have taken, and memory of the device.
    """

    def __init__(self, device: torch.device, beside: Graphs | None = None) -> None:
        self.device, self.seconds, self.num_bytes = device, 0.0, 0
        self._pool: Any = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle() if beside is None else beside._pool
        # With their functions, which keep the tensors alive that the graphs read and write.
        self._graphs: dict[Hashable, tuple[Graph, Callable[[], None]]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def run(self, key: Hashable, function: Callable[[], None], changes: Sequence[Tensor] = ()) -> None:
        """Run a function, by its graph if there is one for `key`. It may read and then change the tensors `changes`,
        which are as before where there is a `CannotCaptureError`."""
        if key not in self._graphs:
            begin, before = time.perf_counter(), self._reserved()
            if len(self._graphs) >= MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
            self._graphs[key] = self._capture(function, changes), function
            self.seconds += time.perf_counter() - begin
            self.num_bytes += max(self._reserved() - before, 0)
        self._graphs[key][0].replay()

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _capture(self, function: Callable[[], None], changes: Sequence[Tensor]) -> Graph:
        before = [each.clone() for each in changes]

        def restore() -> None:
            for each, old in zip(changes, before, strict=True):
                each.copy_(old)

        collects, token = gc.isenabled(), _capturing.set(True)
        gc.disable()  # a tensor that is freed during a capture may end it
        # Kernels for another device than the current one would run, and the graph would be empty.
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        try:
            with on_device, torch.random.fork_rng([self.device] if self._pool is not None else []):
                return captured(function, restore, self._pool)
        except Exception as error:  # a foreign forward may do anything
            reason = str(error).strip().splitlines() or [""]
            raise CannotCaptureError(f"{type(error).__name__}: {reason[0]}") from error
        finally:
            _capturing.reset(token)
            if collects:
                gc.enable()
            restore()


@cache
def _side_stream(_device: int) -> Any:
    """The current device's: with each further stream libraries allocate a workspace, and keep it."""
    return torch.cuda.Stream()


def captured(function: Callable[[], None], restore: Callable[[], None], pool: Any) -> Graph:
    """A CUDA graph of a function, which has run some times; `restore` takes back what a run has changed."""
    stream = _side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            function()
            restore()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # Of this thread only: what another thread does meanwhile is not captured and does not end the capture.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        function()
    return graph


def write_lasting(outputs: list[Tensor], found: Sequence[Tensor]) -> None:
    """Write what a function has found to `outputs`, where later runs write it too; an empty list is filled first."""
    if not outputs:
        with lasting():
            outputs.extend(torch.empty_like(each, memory_format=torch.contiguous_format) for each in found)
    for own, each in zip(outputs, found, strict=True):
        own.copy_(each)


@contextmanager
def lasting() -> Iterator[None]:
    """Tensors that are made within can be written to in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
