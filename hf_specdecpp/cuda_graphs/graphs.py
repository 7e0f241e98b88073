"""Functions of tensors that a device runs as one launch each: CUDA graphs, captured once and replayed (`Graphs`)."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)
capture_lock = RLock()  # PyTorch allows one capture at a time in a process
MOST_GRAPHS = 96  # of one object; before another one all of the family go
MOST_TRIES = 3  # of captures that failed beside other captures
WARM_UPS = 2  # runs before a capture: libraries allocate their workspaces in the first, kernels are chosen by then
# Operations that read the device, or whose results have shapes that are read from it.
WAITS = {
    "item", "_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "repeat_interleave.Tensor",
    "is_nonzero", "equal", "bincount",
}  # fmt: skip


class CannotCaptureError(RuntimeError):
    """A function waits for its device, or does something else that no graph can repeat.

    Attributes:
        is_passing: whether that may be over with the next text: memory ended, or another capture was under way.
    """

    def __init__(self, reason: str, is_passing: bool = False) -> None:
        super().__init__(reason)
        self.is_passing = is_passing


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def is_capturing() -> bool:
    """Whether what runs is being captured, or warmed up for that; from then on only its graph runs."""
    return _capturing.get()


class Family:
    """What graphs have in common that live and die together: a pool of memory, and the stream of their warm-ups and
    captures. Libraries keep a workspace for each stream, which is baked into graphs, and which PyTorch frees with the
    first graph of the stream that goes: so all of them go, or none.

    Attributes:
        pool, stream: `None` where the device is not CUDA.
        members: the graphs of each `Graphs`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool: Any = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.members: list[dict[Hashable, Any]] = []
        self.clear()

    def clear(self) -> None:
        """Destroy all graphs, once none of them is running."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
            self.pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again
        for graphs in self.members:
            graphs.clear()


class Graphs:
    """Graphs of functions, each captured when it is first run, in one pool of memory.

    A function reads and writes tensors that stay where they are, and returns nothing: memory that a graph allocates is
    written over by the next graph of the pool. Numbers, shapes and branches of Python stay as they were at the capture,
    so all that decides them is part of the key.

    Example: `run(("pass", 4), read, [length])` runs `read` four times, then a graph of `read`; `length` is as
    if only the graph had run. From then on only the graph runs.

    Args:
        beside: others of the same device, whose family these belong to: no two graphs of both run at once.

    Attributes:
        seconds, num_bytes: that captures have taken, and memory of the device.
        why_not: why a function that `falls_back` was not captured; from then on no other is captured.
    """

    def __init__(self, device: torch.device, beside: Graphs | None = None) -> None:
        self.device, self.seconds, self.num_bytes = device, 0.0, 0
        self.why_not: str | None = None
        self._is_passing, self._failed = False, 0
        self.family: Family = Family(device) if beside is None else beside.family
        # With their functions, which keep the tensors alive that the graphs read and write.
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Callable[[], None]]] = {}
        self.family.members.append(self._graphs)

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def begin_text(self) -> None:
        """Try again, in another text, what could not be captured for a while."""
        if self._is_passing:
            self.why_not, self._is_passing = None, False

    def run(
        self, key: Hashable, function: Callable[[], None], changes: Sequence[Tensor] = (), falls_back: bool = False
    ) -> None:
        """Run a function, by its graph if there is one for `key`. It may read and then change the tensors `changes`,
        which are as before where there is a `CannotCaptureError`. `falls_back`: then it runs as it is instead."""
        if key not in self._graphs:
            if self.why_not is not None:
                return function()
            try:
                self._add(key, function, changes)
            except CannotCaptureError as error:
                if not falls_back:
                    raise
                self.why_not, self._is_passing = str(error), error.is_passing
                return function()
        return self._graphs[key][0].replay()

    def _add(self, key: Hashable, function: Callable[[], None], changes: Sequence[Tensor]) -> None:
        with capture_lock:
            begin, before = time.perf_counter(), self._reserved()
            if len(self._graphs) >= MOST_GRAPHS:
                self.family.clear()
            self._graphs[key] = self._capture(function, changes), function
            self.seconds += time.perf_counter() - begin
            self.num_bytes += max(self._reserved() - before, 0)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _capture(self, function: Callable[[], None], changes: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        before = [each.clone() for each in changes]
        with lasting():
            ran = torch.zeros((), dtype=torch.long, device=self.device)

        def restore() -> None:
            for each, old in zip(changes, before, strict=True):
                each.copy_(old)

        def counted() -> None:
            function()
            ran.add_(1)

        is_cuda, collects = self.device.type == "cuda", gc.isenabled()
        gc.disable()  # a tensor that is freed during a capture may end it
        on_device = torch.cuda.device(self.device) if is_cuda else nullcontext()
        try:
            with on_device, torch.random.fork_rng([self.device] if is_cuda else []):
                with NoReads(self.device), NoWaits(self.device):  # a capture that fails damages PyTorch's allocator
                    function()
                restore()
                return self._recorded(counted, restore, ran)
        except Exception as error:  # a foreign forward may do anything
            raise self.cannot(error) from error
        finally:
            if collects:
                gc.enable()
            restore()

    def _recorded(self, counted: Callable[[], None], restore: Callable[[], None], ran: Tensor) -> torch.cuda.CUDAGraph:
        """A graph of `counted`, of which one replay adds one to `ran`."""
        token = _capturing.set(True)
        try:
            graph = captured(counted, restore, self.family)
            restore()
            ran.zero_()
            graph.replay()
            if int(ran) != 1:  # kernels on another stream than the captured one have run, and are in no graph
                raise CannotCaptureError("its graph is empty")
            return graph
        except Exception:
            self.family.clear()  # whose workspace may have gone with what was captured
            raise
        finally:
            _capturing.reset(token)

    def cannot(self, error: Exception) -> CannotCaptureError:
        """What to say of a capture that failed, and whether it may be tried again."""
        if isinstance(error, CannotCaptureError):
            return error
        lines = str(error).strip().splitlines() or [""]
        is_passing = is_out_of_memory(error)
        if not is_passing and "captur" in str(error):
            self._failed += 1
            is_passing = self._failed < MOST_TRIES
        return CannotCaptureError(f"{type(error).__name__}: {lines[0]}", is_passing)


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device had no more memory, whichever library says so."""
    return isinstance(error, torch.OutOfMemoryError) or any(
        each in str(error) for each in ("out of memory", "ALLOC_FAILED")
    )


def captured(function: Callable[[], None], restore: Callable[[], None], family: Family) -> torch.cuda.CUDAGraph:
    """A CUDA graph of a function, which has run some times; `restore` takes back what a run has changed."""
    stream: Any = family.stream
    before = torch.cuda.current_stream(family.device)
    stream.wait_stream(before)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
                restore()
        before.wait_stream(stream)
        # Of this thread only: what another thread does meanwhile is not captured and does not end the capture. Not on
        # PyTorch's own stream for captures, which is of the device on which the process captured first.
        with torch.cuda.graph(graph, pool=family.pool, stream=stream, capture_error_mode="thread_local"):
            function()
    finally:
        torch.cuda.set_stream(before)  # where a capture fails, PyTorch stays on its stream
    return graph


class NoWaits(TorchDispatchMode):
    """Refuses operations that wait for a device of this type: `CannotCaptureError`."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        names = (func._opname, f"{func._opname}.{func._overloadname}") if isinstance(func, OpOverload) else ()
        if not WAITS.isdisjoint(names) and given.get("output_size") is None:  # with which the shape is known
            _refuse(self.device, func, (args, given))
        return func(*args, **given)


class NoReads(TorchFunctionMode):
    """The same for what reads a tensor past the dispatcher."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func in (Tensor.tolist, Tensor.numpy):
            _refuse(self.device, func.__name__, args)
        return func(*args, **(kwargs or {}))


def _refuse(device: torch.device, func: Any, arguments: Any) -> None:
    if any(isinstance(each, Tensor) and each.device.type == device.type for each in tree_leaves(arguments)):
        raise CannotCaptureError(f"{func} waits for the device")


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
