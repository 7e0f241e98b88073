"""Copies of weights for faster matrix multiplications (`WeightCopies`), and the thread that makes them (`Background`).

A copy takes 10 to 60 nanoseconds per element, which is seconds to a minute for a model. So a thread of low priority
makes the copies, and each layer uses its copy as soon as it exists."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary, ref

import torch
from torch import Tensor, nn

from hf_specdecpp.models.cpu.products import ending

ROWS, BUCKETS = 16, 1021  # of `fingerprint`: a prime number of sums, so that moved rows or columns change sums
MOST_OF_FREE = 0.25  # share of the free memory that copies may take
SHARE = 0.04  # share of generation time for making copies, if PyTorch uses every core
POLL = 0.02  # seconds until the waiting thread looks again
NICE = 10  # priority of the thread: about a tenth of a core that others also use
NEVER = -1  # instead of a write count, which is never negative
# Memory of a container: folder, file with its limit, file with its usage, and the name in `memory.stat` of pages of
# files, which are counted as used but can be freed.
CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(eq=False)
class WeightCopy:
    """The copy of one weight, shared by all layers with this weight, and what identifies the copied contents."""

    made: Any = None  # the copy; `None` if not made yet, dropped, or not possible
    state: Tensor | None = None  # `fingerprint` of the copied weight
    version: int = NEVER  # PyTorch's write count of the copied weight; `NEVER` if not requested, or dropped
    address: int = 0  # of the data of the copied weight
    bytes: int = 0  # memory of the copy

    def make(self, weight: Tensor, make: Callable[[Tensor], Any]) -> None:
        """Set `made` to `make(weight)`, unless the weight changes meanwhile: then a copy may be requested again."""
        version, address, state = weight._version, weight.data_ptr(), fingerprint(weight)
        made = make(weight)
        if weight._version == version and weight.data_ptr() == address and torch.equal(fingerprint(weight), state):
            self.version, self.address, self.state, self.made = version, address, state, made
            self.bytes = 0 if made is None else weight.numel() * getattr(made, "bytes_of_element", 1)
        else:
            self.version = NEVER

    def is_of(self, weight: Tensor) -> bool:
        """Whether PyTorch has neither counted a write to the weight nor moved it since the copy was made or checked."""
        return weight._version == self.version and weight.data_ptr() == self.address

    def check(self, weight: Tensor) -> None:
        """Drop the copy if the weight's `fingerprint` has changed, which reads the whole weight, as a pass does."""
        if self.made is None or self.state is None:
            return
        if torch.equal(fingerprint(weight), self.state):
            self.version, self.address = weight._version, weight.data_ptr()
        else:
            self.made, self.version, self.bytes = None, NEVER, 0


class WeightCopies:
    """Copies of the weights of layers. Each lives as long as this object and any layer with its weight.

    Layers with the same weight share a copy, and so do two `WeightCopies` with the same `make`.

    Args:
        make: function that returns the copy of a weight `[out, in]`, or `None` if there is no copy.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make
        # By layer: PyTorch cannot swap tensors that weak references refer to (`set_swap_module_params_on_conversion`).
        self._copies: WeakKeyDictionary[nn.Linear, WeightCopy] = WeakKeyDictionary()

    def _shared(self, layer: nn.Linear) -> WeightCopy:
        """The `WeightCopy` of the layer's weight. Its `made` is `None` if the copy is missing or was outdated."""
        weight = layer.weight
        with _lock:
            copy = _shared.setdefault((self.make, id(weight), weight.shape), WeightCopy())
            self._copies[layer] = copy
        copy.check(weight)
        return copy

    def current(self, layer: nn.Linear) -> WeightCopy:
        """The copy of the layer's current weight, made now if missing or outdated."""
        copy = self._shared(layer)
        if copy.made is None:
            copy.make(layer.weight, self.make)
        return copy

    def prepared(self, layer: nn.Linear) -> WeightCopy:
        """The copy of the layer's current weight, made in the background if missing or outdated."""
        copy = self._shared(layer)
        if copy.version == NEVER:
            copy.version = layer.weight._version
            background.ask(layer, copy, self)
        return copy

    def clear(self) -> None:
        with _lock:
            self._copies.clear()

    @property
    def bytes(self) -> int:
        """Bytes of memory of all copies."""
        with _lock:
            return sum(copy.bytes for copy in set(self._copies.values()))


# The copies by the function that makes them, and the id and shape of the weight. An id may be reused: see `check`.
_shared: WeakValueDictionary[tuple[Any, int, torch.Size], WeightCopy] = WeakValueDictionary()
_lock = threading.RLock()  # guards this dictionary and those of `WeightCopies`


_Asked = tuple[ref[nn.Linear], ref[WeightCopy], ref[WeightCopies]]


@dataclass
class Background:
    """Makes requested copies in a thread of low priority, those of the largest weights first.

    During generations in which PyTorch uses every core, the thread works for at most 4 % (`SHARE`) of the time. A
    process that ends waits for the block of rows that the thread is packing, not for all copies."""

    texts: int = 0  # running generations
    made: int = 0  # weights that were copied, or could not be
    _asked: list[_Asked] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _thread: threading.Thread | None = None
    _making: int = 0  # bytes of weights that are being copied now, also in `wait`

    def ask(self, layer: nn.Linear, copy: WeightCopy, owner: WeightCopies) -> None:
        """Queue the copy of a layer's weight for the background thread. A deleted layer, copy or owner cancels it."""
        with self._lock:
            self._asked.append((ref(layer), ref(copy), ref(owner)))
            if self._thread is None or not self._thread.is_alive():
                computing = torch.get_num_threads()
                self._thread = threading.Thread(target=self._run, args=(computing,), name="weight copies", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the process ends, or has too many threads: no copies
                    self._thread = None

    def wait(self) -> None:
        """Make all queued copies, in this thread as well as in the background thread."""
        while (item := self._next()) is not None:
            self._make(*item)
        if (thread := self._thread) is not None:
            thread.join()

    def end(self) -> None:
        """Called when the process ends: let the thread stop, possibly within a copy, and wait for it."""
        ending.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _next(self) -> _Asked | None:
        """Remove the item with the largest weight from the queue, and return it; `None` if the queue is empty."""
        with self._lock:
            if not self._asked:
                self._thread = None if threading.current_thread() is self._thread else self._thread
                return None
            self._asked.sort(key=lambda item: 0 if (layer := item[0]()) is None else layer.weight.numel())
            return self._asked.pop()

    def _run(self, computing: int) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))  # of this thread
        has_core = usable_cores() > computing
        while not ending.is_set() and (item := self._next()) is not None:
            begin = time.perf_counter()
            self._make(*item)
            end = time.perf_counter()
            until = begin + (end - begin) / SHARE
            while self.texts and self._asked and not has_core and time.perf_counter() < until and not ending.is_set():
                time.sleep(POLL)

    @torch.no_grad()
    def _make(self, of: ref[nn.Linear], into: ref[WeightCopy], by: ref[WeightCopies]) -> None:
        """Make the copy of an item of the queue, if all three are alive and memory allows (`MOST_OF_FREE`)."""
        layer, copy, owner = of(), into(), by()
        if copy is None:
            return
        if layer is None or owner is None:
            copy.version = NEVER  # another layer or owner that shares the copy may ask again
            return
        weight = layer.weight
        with self._lock:
            made = owner.bytes
            if made + self._making + weight.nbytes > MOST_OF_FREE * (made + free_memory()):
                return
            self._making += weight.nbytes
        with suppress(RuntimeError, MemoryError):  # too little memory, or the process ends
            copy.make(weight, owner.make)
        with self._lock:
            self._making -= weight.nbytes
            self.made += 1


background = Background()
atexit.register(background.end)


def _begin_child() -> None:
    """Called in a forked child, which has no background thread, so that its next generation requests missing copies."""
    global _lock
    _lock = threading.RLock()  # a thread of the parent may hold the other one
    background.__init__()  # type: ignore[misc]
    for copy in _shared.values():
        if copy.made is None:
            copy.version = NEVER


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_begin_child)


def usable_cores() -> int:
    """Number of cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fingerprint(weight: Tensor) -> Tensor:
    """Sums over all bits of a weight, to detect writes that autograd does not count (`.data`, numpy).

    The bits are read as 64-bit integers. Integer j is added to sum j mod 1021, with overflow. So a write to one element
    is always detected, and several writes unless they cancel out in each sum.

    Returns:
        `[1021 + n]` int64: the sums, then the last n integers, fewer than 1021, which are in no sum.
    """
    numbers = weight.detach().view(-1).view(torch.int64)
    whole = numbers.numel() - numbers.numel() % (ROWS * BUCKETS)
    rest = numbers[whole:]
    # First sums of 16 rows, then the sum of these: more than twice as fast as one sum.
    sums = numbers[:whole].view(-1, ROWS, BUCKETS).sum(1).sum(0)
    if len(rest) >= BUCKETS:
        whole = len(rest) - len(rest) % BUCKETS
        sums, rest = sums + rest[:whole].view(-1, BUCKETS).sum(0), rest[whole:]
    return torch.cat((sums, rest))


def can_fingerprint(weight: Tensor) -> bool:
    """Whether the bits of a weight can be viewed as 64-bit integers without a copy."""
    size = weight.element_size()
    return weight.is_contiguous() and weight.nbytes % 8 == 0 and weight.storage_offset() * size % 8 == 0


def free_memory() -> float:
    """Bytes of memory that this process may still use, by the limits of its machine and container. 0 if unknown, as on
    systems other than Linux."""
    try:
        found = dict(line.split(":") for line in _lines(Path("/proc/meminfo")))
        free = 1024.0 * int(found["MemAvailable"].split()[0])
        for folder, limit, used, pages in CONTAINERS:
            if Path(folder, limit).is_file() and (most := _lines(Path(folder, limit))[0]) != "max":
                stat = dict(line.split() for line in _lines(Path(folder, "memory.stat")))
                free = min(free, int(most) - int(_lines(Path(folder, used))[0]) + int(stat[pages]))
    except (OSError, KeyError, ValueError, IndexError):
        return 0.0
    return max(free, 0.0)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()
