"""Copies of weights that faster matrix products use (`WeightCopies`), and the thread that makes them (`Background`).

A copy takes 10 to 60 nanoseconds an element to make, seconds to a minute for a model. So a thread of low priority makes
them, and each layer takes its copy from the moment when that is there.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_specdecpp.models.cpu.products import ending

ROWS, BUCKETS = 16, 1021  # the latter prime, so that what moves rows or columns moves numbers to other buckets
MOST_OF_FREE = 0.25  # of the memory that is free, which copies may take
SHARE = 0.04  # of the seconds of texts that copies may be made in, where PyTorch computes on every core
POLL = 0.02  # seconds
NICE = 10  # priority of the thread: about a tenth of a core that others want, too
NEVER = -1
# Folders of a container's memory: the files with its limit and with what it uses, and the name of pages of files, which
# count as used, in `memory.stat`.
CONTAINERS = (
    ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(eq=False)
class WeightCopy:
    """The copy of one weight.

    Attributes:
        made: the copy; `None` until it was made, or where there is none.
        state: the `fingerprint` of the weight that it was made of.
        version, address: of that weight: PyTorch's count of writes, and where its data lay. The version is `NEVER`
            before anybody has asked for the copy.
    """

    made: Any = None
    state: Tensor | None = None
    version: int = NEVER
    address: int = 0

    def make(self, weight: Tensor, make: Callable[[Tensor], Any]) -> None:
        """Make the copy of a weight; it is left out if the weight is written to meanwhile."""
        version, address, state = weight._version, weight.data_ptr(), fingerprint(weight)
        made = make(weight)
        if weight._version == version and weight.data_ptr() == address and torch.equal(fingerprint(weight), state):
            self.version, self.address, self.state, self.made = version, address, state, made
        else:
            self.version = NEVER

    def is_of(self, weight: Tensor) -> bool:
        """Whether no write to the weight was counted since the copy was made."""
        return weight._version == self.version and weight.data_ptr() == self.address

    def check(self, weight: Tensor) -> None:
        """Drop the copy if the weight has changed. The whole weight is read for this, as in a pass over one token."""
        if self.made is None or self.state is None:
            return
        if torch.equal(fingerprint(weight), self.state):
            self.version, self.address = weight._version, weight.data_ptr()
        else:
            self.made, self.version = None, NEVER


class WeightCopies:
    """Copies of weights. They go with this object, and each of them with its weight.

    Objects that copy a weight by the same function share the copy.

    Args:
        make: makes the copy of a weight `[out, in]`; `None` if there is none.
    """

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        self.make = make
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> WeightCopy

    def _shared(self, weight: Tensor) -> WeightCopy:
        """The copy of the weight if it is up to date, else one that is to be made."""
        with _lock:
            shared = _shared[self.make].get(weight)
            copy = None if shared is None else shared()
            if copy is None:
                copy = WeightCopy()
                _shared[self.make][weight] = ref(copy)
            self._copies[weight] = copy
        copy.check(weight)
        return copy

    def current(self, weight: Tensor) -> WeightCopy:
        """The copy of the weight as it is now, which is made here if there is none."""
        copy = self._shared(weight)
        if copy.made is None:
            copy.make(weight, self.make)
        return copy

    def prepared(self, weight: Tensor) -> WeightCopy:
        """The copy of the weight, which is made in the background if there is none."""
        copy = self._shared(weight)
        if copy.version == NEVER:
            copy.version = weight._version
            background.ask(weight, copy, self)
        return copy

    def clear(self) -> None:
        with _lock:
            self._copies.clear()

    @property
    def bytes(self) -> int:
        """Memory of the copies."""
        with _lock:
            made = [(weight, copy.made) for weight, copy in self._copies.items() if copy.made is not None]
        return sum(weight.numel() * getattr(copy, "bytes_of_element", 1) for weight, copy in made)


# By the function that makes copies: weight -> weak reference to its copy.
_shared: defaultdict[Callable[[Tensor], Any], WeakIdKeyDictionary] = defaultdict(WeakIdKeyDictionary)
_lock = threading.RLock()  # of these dictionaries and of those of `WeightCopies`


_Asked = tuple[ref[Tensor], ref[WeightCopy], ref[WeightCopies]]


@dataclass
class Background:
    """Makes copies in a thread of low priority, the largest weights first.

    While PyTorch computes texts on every core of this process, the thread takes `SHARE` of the texts' seconds at most.
    A process that ends waits for one call of the thread, not for all copies.
    """

    texts: int = 0  # that are being generated
    text_seconds: float = 0.0  # of all texts so far
    seconds: float = 0.0  # of all copies so far, while there were texts
    made: int = 0  # weights that were copied, or left out
    _asked: list[_Asked] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _thread: threading.Thread | None = None
    _begin: float = 0.0
    _making: int = 0  # bytes of weights that are being copied, by the thread and by whoever waits

    def ask(self, weight: Tensor, copy: WeightCopy, owner: WeightCopies) -> None:
        """Make the copy of a weight soon, as long as weight, copy and owner exist."""
        with self._lock:
            self._asked.append((ref(weight), ref(copy), ref(owner)))
            if self._thread is None or not self._thread.is_alive():
                computing = torch.get_num_threads()
                self._thread = threading.Thread(target=self._run, args=(computing,), name="weight copies", daemon=True)
                try:
                    self._thread.start()
                except RuntimeError:  # the process ends, or may have no more threads: layers stay as they are
                    self._thread = None

    def begin_text(self) -> None:
        with self._lock:
            self._begin = time.perf_counter() if not self.texts else self._begin
            self.texts += 1

    def end_text(self) -> None:
        with self._lock:
            self.texts -= 1
            self.text_seconds += time.perf_counter() - self._begin if not self.texts else 0.0

    def wait(self) -> None:
        """Make all copies that are missing, in this thread too, which has no low priority."""
        while (item := self._next()) is not None:
            self._make(*item)
        if (thread := self._thread) is not None:
            thread.join()

    def end(self) -> None:
        """Let the thread end with the weight that it is copying."""
        ending.set()
        if (thread := self._thread) is not None:
            thread.join()

    def _next(self) -> _Asked | None:
        """The largest weight that is asked for; `None` where there is none."""
        with self._lock:
            if not self._asked:
                self._thread = None if threading.current_thread() is self._thread else self._thread
                return None
            self._asked.sort(key=lambda item: 0 if (weight := item[0]()) is None else weight.numel())
            return self._asked.pop()

    def _run(self, computing: int) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, 0, max(NICE, os.getpriority(os.PRIO_PROCESS, 0)))  # of this thread
        has_core = usable_cores() > computing
        while not ending.is_set():
            is_busy = bool(self.texts) and not has_core
            spent = SHARE * (self.text_seconds + time.perf_counter() - self._begin) < self.seconds
            if is_busy and self._asked and spent:
                time.sleep(POLL)
                continue
            if (item := self._next()) is None:
                return
            begin = time.perf_counter()
            self._make(*item)
            if is_busy:
                self.seconds += time.perf_counter() - begin

    @torch.no_grad()
    def _make(self, of: ref[Tensor], into: ref[WeightCopy], by: ref[WeightCopies]) -> None:
        weight, copy, owner = of(), into(), by()
        if weight is None or copy is None or owner is None:
            return
        with self._lock:
            made = owner.bytes
            if made + self._making + weight.nbytes > MOST_OF_FREE * (made + free_memory()):
                return
            self._making += weight.nbytes
        with suppress(RuntimeError, MemoryError):  # there is too little memory, or the process ends
            copy.make(weight, owner.make)
        with self._lock:
            self._making -= weight.nbytes
            self.made += 1


background = Background()
atexit.register(background.end)


def _begin_child() -> None:
    """After a fork, whose child has no thread: copies that were asked for are asked for again by the next text."""
    global _lock
    _lock = threading.RLock()  # a thread of the parent may have held the other one
    background.__init__()  # type: ignore[misc]
    for shared in _shared.values():
        for each in shared.values():
            copy = each()
            if copy is not None and copy.made is None:
                copy.version = NEVER


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_begin_child)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def fingerprint(weight: Tensor) -> Tensor:
    """Sums over all bits of a weight, to notice writes that autograd does not count (`.data`, numpy).

    The bits are taken as 64-bit integers; number j is added to sum j mod 1021, overflow wrapping around. So a write to
    one element always shows, and several are missed only if they cancel out in each sum.

    Returns:
        `[1021 + rest]` int64, the `rest` being numbers that do not fill a row of 1021.
    """
    numbers = weight.detach().view(-1).view(torch.int64)
    whole = numbers.numel() - numbers.numel() % (ROWS * BUCKETS)
    rest = numbers[whole:]
    # In two steps, the first of which adds few rows: more than twice as fast.
    sums = numbers[:whole].view(-1, ROWS, BUCKETS).sum(1).sum(0)
    if len(rest) >= BUCKETS:
        whole = len(rest) - len(rest) % BUCKETS
        sums, rest = sums + rest[:whole].view(-1, BUCKETS).sum(0), rest[whole:]
    return torch.cat((sums, rest))


def can_fingerprint(weight: Tensor) -> bool:
    """Whether the bits of a weight can be read as 64-bit integers where they lie."""
    size = weight.element_size()
    return weight.is_contiguous() and weight.nbytes % 8 == 0 and weight.storage_offset() * size % 8 == 0


def free_memory() -> float:
    """Bytes that this process may still use; 0 where the system does not say."""
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
