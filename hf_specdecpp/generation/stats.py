"""What a generation did and whether it paid, as users see it: `SpeculationStats`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import count
from threading import current_thread, get_ident, main_thread
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from hf_specdecpp.generation.counters import OF_TWO, Counters, add, ratio
from hf_specdecpp.generation.verdict import outcome, suspicion


@dataclass
class SpeculationStats(Counters):
    """Counts and seconds of one `generate()` call (`Counters`). `a + b` sums two calls; `str()` is a small table."""

    @classmethod
    def of_batch(cls, rows: list[SpeculationStats]) -> SpeculationStats:
        """The sum over the sequences of a batch, whose shares of common passes they have."""
        total = sum(rows[1:], rows[0])
        total.rows = rows
        return total

    @property
    def verdict(self) -> str:
        """A few sentences: did speculation pay, and if not, why not; and what faster passes alone give."""
        return " ".join(filter(None, (outcome(self), suspicion(self))))

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        total = SpeculationStats()
        for item in fields(self):
            of_two = item.metadata.get(OF_TWO, add)
            setattr(total, item.name, of_two(getattr(self, item.name), getattr(other, item.name)))
        for name in ("plain_pass_seconds", "same_pass_seconds"):
            setattr(total, name, self._mean_with(other, getattr(self, name), getattr(other, name)))
        return total

    def _mean_with(self, other: SpeculationStats, own: float | None, others: float | None) -> float | None:
        """The mean by tokens of a time that both calls may know."""
        if own is None or others is None:
            return None
        weighted = self.generated * own + other.generated * others
        return ratio(weighted, self.generated + other.generated) or own

    def __str__(self) -> str:
        if self.is_unused:
            return self.verdict
        rows = [
            ("tokens generated", f"{self.generated} in {self.target_passes} target passes"),
            ("tokens per pass", f"{self.tokens_per_pass:.2f}"),
            ("candidates", f"{self.drafted} drafted, {self.accepted} accepted ({self.acceptance_rate:.0%})"),
            ("discard rate", f"{self.discard_rate:.2f} candidates per token"),
            ("verification rate", f"{self.verification_rate:.2f} target passes per token"),
        ]
        if self.acceptance_by_position:
            shares = " ".join(f"{share:.0%}" for share in self.acceptance_by_position[:8])
            rows.append(("accepted by position", shares + (" ..." if len(self.drafted_at) > 8 else "")))
        if num_trees := sum(self.tree_depths):
            means = [
                sum(value * count for value, count in enumerate(counts)) / num_trees
                for counts in (self.tree_depths, self.tree_widths)
            ]
            sizes = f"{self.drafted / num_trees:.1f} nodes, depth {means[0]:.1f}, width {means[1]:.1f}"
            rows.append(("trees", f"{sizes} on average"))
            shares = " ".join(f"{share:.0%}" for share in self.acceptance_by_rank[:8]) or "none were drawn"
            rows.append(("accepted by sibling", shares + (" ..." if len(self.tested_by_rank) > 8 else "")))
        if self.looked_up and self.looked_up == self.drafted:
            rows.append(("looked up", f"all candidates, in {self.lookup_rounds} of {self.rounds} rounds"))
        elif self.looked_up:
            share = ratio(self.accepted_lookups, self.looked_up)
            counts = f"{self.looked_up} of the candidates, {self.accepted_lookups} accepted ({share:.0%})"
            rows.append(("looked up", f"{counts}; {self.lookup_rounds} of {self.rounds} rounds drafted no others"))
        rows.append(("time", self._time_split()))
        rows.append(("verdict", self.verdict))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)

    def _time_split(self) -> str:
        beside = f" ({self.compared_passes} passes compared)" if self.compared_passes else ""
        preparing = f"preparing {self.preparing_seconds:.2f} s{beside}, " if self.preparing_seconds >= 0.005 else ""
        return (
            f"{preparing}prompt {self.prompt_seconds:.2f} s, draft {self.draft_seconds:.2f} s, "
            f"target {self.target_seconds:.2f} s, overhead {self.overhead_seconds:.2f} s"
        )


@dataclass(eq=False)
class Noted:
    """The statistics of a call, and the thread that made it. Later calls have larger numbers.

    `for_others`: a call that `asyncio.to_thread` made, in a copy of the context that this one was made in.
    """

    number: int
    stats: SpeculationStats
    thread: int = field(default_factory=get_ident)
    for_others: Noted | None = None


Own: TypeAlias = "WeakKeyDictionary[LatestCalls, Noted]"
_numbers = count()
_own: ContextVar[Own] = ContextVar("own")  # of this thread or asyncio task, by assistant


def known_here() -> Own:
    return _own.get(WeakKeyDictionary())


class LatestCalls:
    """Whose statistics `assistant.stats` shows: those of the latest call of this thread or asyncio task; where there is
    none, of the latest call of all.

    Two kinds of call are made in one thread for another: those of `asyncio.to_thread`, and those whose streamer is
    iterated over (`TextIteratorStreamer`), mostly by the main thread. There they count as that thread's own.
    """

    def __init__(self) -> None:
        self._latest = self._streamed = Noted(-1, SpeculationStats())

    @property
    def stats(self) -> SpeculationStats:
        own = known_here().get(self, self._latest)
        own = own.for_others or own
        if current_thread() is main_thread() and self._streamed.number > own.number:
            own = self._streamed
        return own.stats

    def note(self, stats: SpeculationStats, streamer: Any = None) -> None:
        """Take the statistics of a call that begins or ends in this thread."""
        known = known_here()
        before, noted = known.get(self), Noted(next(_numbers), stats)
        self._latest = noted  # another thread may replace it at any time
        if before is not None and before.thread != noted.thread:
            before.for_others = noted
        if isinstance(streamer, Iterator | AsyncIterator):
            self._streamed = noted
        # A new dictionary, because tasks begin with that of the task that started them.
        own: Own = WeakKeyDictionary(known)
        own[self] = noted
        _own.set(own)
