"""The statistics that `assistant.stats` shows: of the latest call of a thread or asyncio task (`LatestCalls`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import current_thread, get_ident, main_thread
from time import perf_counter
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from hf_specdecpp.generation.stats import SpeculationStats


@dataclass(eq=False)
class Noted:
    """The statistics of a call, with the time at which they were recorded (seconds) and the thread of the call."""

    stats: SpeculationStats
    at: float = field(default_factory=perf_counter)
    thread: int = field(default_factory=get_ident)
    for_others: Noted | None = None  # a later call by `asyncio.to_thread` in a copy of this call's context


Own: TypeAlias = "WeakKeyDictionary[LatestCalls, Noted]"
_own: ContextVar[Own] = ContextVar("own")  # of this thread or asyncio task, by assistant


def known_here() -> Own:
    return _own.get(WeakKeyDictionary())


class LatestCalls:
    """The statistics of the latest call of this thread or asyncio task, for `assistant.stats`; if there was none, those
    of the latest call of any thread.

    Two kinds of calls run in a thread on behalf of another: calls by `asyncio.to_thread` also count as calls of the
    task that started them, calls with an iterable streamer (`TextIteratorStreamer`) as calls of the main thread."""

    def __init__(self) -> None:
        self._latest = self._streamed = Noted(SpeculationStats())

    @property
    def stats(self) -> SpeculationStats:
        own = known_here().get(self, self._latest)
        own = own.for_others or own
        if current_thread() is main_thread() and self._streamed.at > own.at:
            own = self._streamed
        return own.stats

    def record_call(self, stats: SpeculationStats, streamer: Any = None) -> None:
        """Called in the thread of a call, before its first pass; for a batch at its end. `streamer`: of the call."""
        known = known_here()
        before, noted = known.get(self), Noted(stats)
        self._latest = noted  # another thread may replace it at any time
        if before is not None and before.thread != noted.thread:
            before.for_others = noted
        if isinstance(streamer, Iterator | AsyncIterator):
            self._streamed = noted
        # A new dictionary, because tasks share the dictionary of the task that started them.
        own: Own = WeakKeyDictionary(known)
        own[self] = noted
        _own.set(own)
