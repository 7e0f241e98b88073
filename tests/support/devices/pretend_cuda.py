"""What of CUDA's streams and graphs can go wrong, pretended beside `pretend_devices`: which stream of which device
something is launched on, that a capture records its own stream alone, that a failed one leaves the thread on it, and
that a graph which is destroyed takes the workspace of its stream along. Contexts of captures are PyTorch's own."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from hf_specdecpp.cuda_graphs import captured_target as target
from support.devices import pretend_devices
from support.devices.pretend_graph import PretendGraph

FREE = 1 << 34  # bytes


class Stream:
    """One of a device. `workspace`: what libraries keep for it; `work`: what the host has not waited for."""

    def __init__(self, device: Any = None) -> None:
        self.device = torch.device("cuda", cuda.device if device is None else torch.device(device).index or 0)
        self.workspace, self.work = object(), list[Callable[[], Any]]()

    def wait_stream(self, _other: Any) -> None: ...

    def synchronize(self) -> None:
        while self.work:
            self.work.pop(0)()


class Cuda(threading.local):
    """A thread's current device, and the current stream of each."""

    device = 0

    def __init__(self, defaults: list[Stream]) -> None:  # once a thread
        self.streams = list(defaults)

    def number(self, device: Any) -> int:
        if device is None or isinstance(device, int):
            return self.device if device is None else device
        index = torch.device(device).index
        return self.device if index is None else index


cuda = Cuda([])
under_way: list["CUDAGraph"] = []  # captures, of which PyTorch allows one


class CUDAGraph:
    """Records what is launched on the stream of its capture."""

    counts: Counter[str] = Counter()
    stream: Stream | None = None

    def capture_begin(self, pool: Any = None, **_: Any) -> None:
        if under_way:
            raise RuntimeError("another capture is under way")
        under_way.append(self)
        self.pool, self.stream, self.is_invalid = pool, cuda.streams[cuda.device], False
        self.workspace = self.stream.workspace
        stream = self.stream  # a graph goes as soon as nobody has it: it is in no circle
        self.recorded = PretendGraph(self.counts, lambda device: cuda.streams[device.index or 0] is stream)
        self.recorded.__enter__()

    def capture_end(self) -> None:
        under_way.remove(self)
        self.recorded.__exit__(None, None, None)
        if self.is_invalid:
            self.stream = None
            raise RuntimeError("operation failed due to a previous error during capture")
        self.counts["captured"] += 1

    def replay(self) -> None:
        if self.stream is None or self.stream.workspace is not self.workspace:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self.recorded.replay()

    def __del__(self) -> None:
        if self.stream is not None:
            self.stream.workspace = object()


def refuse() -> None:
    """What a library does that a capture does not allow."""
    for each in under_way:
        each.is_invalid = True
    if under_way:
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


class Device:
    """The context of a current device."""

    def __init__(self, device: Any) -> None:
        self.device = cuda.number(device)

    def __enter__(self) -> None:
        self.device, cuda.device = cuda.device, self.device

    __exit__ = lambda self, *_: self.__enter__()  # noqa: E731 - short enough


def set_stream(stream: Stream) -> None:
    cuda.device = stream.device.index
    cuda.streams[cuda.device] = stream


def synchronize(*_: Any) -> None:
    for each in cuda.streams:
        each.synchronize()


@contextmanager
def pretend_cuda(counts: Counter[str]) -> Iterator[None]:
    """Within it `torch.cuda` has streams and graphs; captures and replays are counted."""
    global cuda
    cuda = Cuda([Stream(torch.device("cuda", number)) for number in range(2)])
    replaced: dict[str, Any] = {
        "torch.cuda.Stream": Stream,
        "torch.cuda.CUDAGraph": CUDAGraph,
        "torch.cuda.graph.default_capture_stream": None,
        "torch._utils._get_available_device_type": lambda: "cuda",  # or contexts of streams do nothing
        "torch.cuda.current_device": lambda: cuda.device,
        "torch.cuda.current_stream": lambda device=None: cuda.streams[cuda.number(device)],
        "torch.cuda.set_stream": set_stream,
        "torch.cuda.device": Device,
        "torch.cuda.synchronize": synchronize,
        "torch.cuda.empty_cache": lambda: None,
        "torch.cuda.graph_pool_handle": lambda: object(),
        "torch.cuda.memory_reserved": lambda _device: 1000 * counts["captured"],
        "torch.cuda.mem_get_info": lambda _device: (FREE, FREE),
        "torch.Tensor.pin_memory": lambda tensor: tensor,
        "support.devices.pretend_devices.later": lambda device, work: cuda.streams[device.index or 0].work.append(work),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in replaced.items():
            patch.setattr(name, value)
        patch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
        patch.setattr(CUDAGraph, "counts", counts)
        patch.setattr("hf_specdecpp.cuda_graphs.graphs.can_capture", lambda device: device.type == "cuda")
        try:
            yield
        finally:
            for _, passes in list(target._known.values()):  # targets that go later have nothing to wait for then
                passes.close()


@contextmanager
def pretend_graphs_on_devices() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Graphs of pretended devices: what is captured and replayed, and what devices are asked for, is counted."""
    counts: Counter[str] = Counter()
    with pretend_devices.pretend_devices() as devices, pretend_cuda(counts):
        yield counts, devices
