"""CUDA graphs of functions of tensors, captured once and replayed with one launch (`Graphs`)."""

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
MOST_GRAPHS = 256  # of one `Graphs`; before a further one all are destroyed
MOST_TRIES = 3  # failed attempts while another capture runs, before giving up
WARM_UPS = 2  # runs before a capture, in which libraries allocate workspaces and choose kernels
# Operations that wait for the device: to read a value, or the shape of a result.
WAITS = {
    "item", "_local_scalar_dense", "nonzero", "masked_select", "unique2", "_unique2", "repeat_interleave.Tensor",
    "is_nonzero", "equal", "bincount",
}  # fmt: skip


class CannotCaptureError(RuntimeError):
    """A function cannot be captured: it waits for its device, or does something else that no graph can repeat.

    Attributes:
        is_passing: whether a later call may try again, after a lack of memory or because another capture was running.
    """

    def __init__(self, reason: str, is_passing: bool = False) -> None:
        super().__init__(reason)
        self.is_passing = is_passing


def can_capture(device: torch.device) -> bool:
    return device.type == "cuda"


def is_capturing() -> bool:
    """Whether this thread or task is capturing a function, or running it to warm up for a capture."""
    return _capturing.get()


class Graphs:
    """CUDA graphs of functions, by key, each captured when the key is first run.

    A function reads and writes tensors at fixed addresses and returns nothing, because the next graph of the pool
    overwrites memory that a graph has allocated. Python numbers, shapes and branches are fixed at the capture, so the
    key must contain everything that decides them.

    The graphs have one memory pool and one stream for warm-ups and captures, and are destroyed together: they contain
    the addresses of library workspaces of their stream, which PyTorch frees with the first graph that is destroyed.

    Example: `run(("pass", 4), read, [length])` first runs `read` three times, captures and replays it, and restores
    `length`; then, and in all later calls, it replays the graph.

    Attributes:
        seconds: total time of captures, warm-ups included.
        num_bytes: device memory that the captures of the present graphs reserved.
        pool, stream: `None` if the device is not CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.seconds, self._failed = device, 0.0, 0
        self.pool: Any = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        # With their functions, which keep tensors alive that the graphs read and write.
        self._graphs: dict[Hashable, tuple[torch.cuda.CUDAGraph, Callable[[], None]]] = {}
        self.clear()

    def __len__(self) -> int:
        return len(self._graphs)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    def clear(self) -> None:
        """Wait for the device, then destroy all graphs."""
        if self.stream is not None:
            torch.cuda.synchronize(self.device)
            self.pool = torch.cuda.graph_pool_handle()  # a pool without graphs cannot be used again
        self._graphs.clear()
        self.num_bytes = 0

    def run(self, key: Hashable, function: Callable[[], None], changes: Sequence[Tensor] = ()) -> None:
        """Replay the graph of `key`, first captured from `function` if missing; `CannotCaptureError` if that fails.
        `changes`: tensors that the function reads before it changes them, restored after the runs for a capture."""
        if key not in self._graphs:
            self._add(key, function, changes)
        self._graphs[key][0].replay()

    def _add(self, key: Hashable, function: Callable[[], None], changes: Sequence[Tensor]) -> None:
        with capture_lock:
            begin, before = time.perf_counter(), self._reserved()
            if len(self._graphs) >= MOST_GRAPHS:
                self.clear()
            self._graphs[key] = self._capture(function, changes), function
            self.seconds += time.perf_counter() - begin
            self.num_bytes += max(self._reserved() - before, 0)

    def _reserved(self) -> int:
        return torch.cuda.memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _capture(self, function: Callable[[], None], changes: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
        """Check that a function never waits for the device, capture it, and restore `changes` and random generators."""
        restore = restoring(changes)
        with lasting():
            ran = torch.zeros((), dtype=torch.long, device=self.device)

        def counted() -> None:
            function()
            ran.add_(1)

        is_cuda, collects = self.device.type == "cuda", gc.isenabled()
        gc.disable()  # freeing a tensor can make a capture fail
        on_device = torch.cuda.device(self.device) if is_cuda else nullcontext()
        try:
            with on_device, torch.random.fork_rng([self.device] if is_cuda else []):
                with NoReads(self.device), NoWaits(self.device):  # a failed capture damages the allocator
                    function()
                restore()
                return self._recorded(counted, restore, ran)
        except Exception as error:  # a model's forward method may raise anything
            raise self.cannot(error) from error
        finally:
            if collects:
                gc.enable()
            restore()

    def _recorded(self, counted: Callable[[], None], restore: Callable[[], None], ran: Tensor) -> torch.cuda.CUDAGraph:
        """Capture `counted`, which runs the function and adds 1 to `ran`, and check that a replay adds 1, too."""
        token = _capturing.set(True)
        try:
            graph = captured(counted, restore, self)
            restore()
            ran.zero_()
            graph.replay()
            if int(ran) != 1:  # kernels ran on another stream than the captured one
                raise CannotCaptureError("its graph is empty")
            return graph
        except Exception:
            self.clear()  # the failed graph may have freed their workspace
            raise
        finally:
            _capturing.reset(token)

    def cannot(self, error: Exception) -> CannotCaptureError:
        """The `CannotCaptureError` to raise for an exception during a capture."""
        if isinstance(error, CannotCaptureError):
            return error
        reason = str(error).strip()
        is_passing = isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason or "ALLOC_FAILED" in reason
        if not is_passing and "captur" in reason:
            self._failed += 1
            is_passing = self._failed < MOST_TRIES
        first_line = reason.partition("\n")[0]
        return CannotCaptureError(f"{type(error).__name__}: {first_line}", is_passing)


def captured(function: Callable[[], None], restore: Callable[[], None], graphs: Graphs) -> torch.cuda.CUDAGraph:
    """Warm up a function and capture it, with stream and memory pool of `graphs`. `restore` undoes a run's changes."""
    stream: Any = graphs.stream
    before = torch.cuda.current_stream(graphs.device)
    stream.wait_stream(before)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                function()
                restore()
        before.wait_stream(stream)
        # "thread_local": other threads neither end up in the capture nor make it fail. Not on PyTorch's default stream
        # for captures, which belongs to the first device on which the process captured.
        with torch.cuda.graph(graph, pool=graphs.pool, stream=stream, capture_error_mode="thread_local"):
            function()
    finally:
        torch.cuda.set_stream(before)  # after a failed capture PyTorch stays on the capture's stream
    return graph


class NoWaits(TorchDispatchMode):
    """A context in which operations that wait for a device of this type raise `CannotCaptureError`."""

    supports_higher_order_operators = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        names = (func._opname, f"{func._opname}.{func._overloadname}") if isinstance(func, OpOverload) else ()
        if not WAITS.isdisjoint(names) and given.get("output_size") is None:  # given, so the shape is known
            _refuse(self.device, func, (args, given))
        return func(*args, **given)


class NoReads(TorchFunctionMode):
    """`NoWaits` for `tolist` and `numpy`, which read a tensor without PyTorch's dispatcher."""

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


def restoring(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """A function that restores the contents that these tensors have now."""
    before = [each.clone() for each in tensors]

    def restore() -> None:
        for each, old in zip(tensors, before, strict=True):
            each.copy_(old)

    return restore


def write_lasting(outputs: list[Tensor], found: Sequence[Tensor]) -> None:
    """Copy the tensors `found` into `outputs`, whose addresses stay fixed for graphs. An empty list is filled first."""
    if not outputs:
        with lasting():
            outputs.extend(torch.empty_like(each, memory_format=torch.contiguous_format) for each in found)
    for own, each in zip(outputs, found, strict=True):
        own.copy_(each)


def host_zeros(tensor: Tensor) -> Tensor:
    """Zeros on the host, of the shape and dtype of `tensor`, to and from which a CUDA device copies without waiting."""
    zeros = torch.zeros_like(tensor, device="cpu")
    return zeros.pin_memory() if tensor.device.type == "cuda" else zeros


@contextmanager
def lasting() -> Iterator[None]:
    """A context for making tensors that may later be written to both in and outside of inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
