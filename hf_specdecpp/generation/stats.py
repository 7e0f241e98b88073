"""Statistics of a generation (`SpeculationStats`), of the latest call of a thread or task (`LatestCalls`), and the
verdict: was speculation faster, and if not, why (`outcome`); may the draft be for another target (`suspicion`)?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import count
from threading import current_thread, get_ident, main_thread
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from hf_specdecpp.estimation.ledger import LOSES, PAYS, Speed, effect, verdict
from hf_specdecpp.generation.counters import OF_TWO, Counters, add, ratio

PREPARING_SHARE = 0.05  # share of a call's seconds, above which preparing is reported separately
# A draft is suspect if less than this share of 30 or more first candidates is accepted, or none of 6 or more: rules may
# soon stop drafting.
TOO_FEW, OF_MANY, OF_NONE = 0.15, 30, 6
FEWER = "SpeculationConfig(rule='throughput') drafts only as many tokens as make generation faster"


@dataclass
class SpeculationStats(Counters):
    """Counts and seconds of one `generate()` call (`Counters`). `a + b` sums two calls; `str()` is a small table."""

    @classmethod
    def of_batch(cls, rows: list[SpeculationStats]) -> SpeculationStats:
        """The sum of the statistics of a batch's sequences, which each have an equal share of the seconds."""
        total = sum(rows[1:], rows[0])
        total.rows = rows
        return total

    @property
    def verdict(self) -> str:
        """A few sentences: was speculation faster, and if not, why; and the gain by faster matrix multiplications."""
        return " ".join(filter(None, (outcome(self), suspicion(self))))

    def __add__(self, other: SpeculationStats) -> SpeculationStats:
        if not isinstance(other, SpeculationStats):
            return NotImplemented
        total = SpeculationStats()
        for item in fields(self):
            of_two = item.metadata.get(OF_TWO, add)
            setattr(total, item.name, of_two(getattr(self, item.name), getattr(other, item.name)))
        tokens = self.generated + other.generated
        for name in ("plain_pass_seconds", "same_pass_seconds"):  # means weighted by tokens, if both are known
            own, others = getattr(self, name), getattr(other, name)
            if own is not None and others is not None:
                own = ratio(self.generated * own + other.generated * others, tokens) or own
            setattr(total, name, None if others is None else own)
        return total

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
        beside = f" ({self.compared_passes} passes compared)" if self.compared_passes else ""
        preparing = f"preparing {self.preparing_seconds:.2f} s{beside}, " if self.preparing_seconds >= 0.005 else ""
        split = f"prompt {self.prompt_seconds:.2f} s, draft {self.draft_seconds:.2f} s, "
        split += f"target {self.target_seconds:.2f} s, overhead {self.overhead_seconds:.2f} s"
        rows.append(("time", preparing + split))
        rows.append(("verdict", self.verdict))
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


@dataclass(eq=False)
class Noted:
    """The statistics of a call, and the thread that made it. Later calls have larger numbers.

    `for_others`: a later call by `asyncio.to_thread` in a copy of this call's context; `stats` gives its statistics.
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
    """The statistics of the latest call of this thread or asyncio task, for `assistant.stats`; if there was none, those
    of the latest call of any thread.

    Two kinds of calls run in a thread on behalf of another: calls by `asyncio.to_thread` also count as calls of the
    task that started them, calls with an iterable streamer (`TextIteratorStreamer`) as calls of the main thread.
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

    def record_call(self, stats: SpeculationStats, streamer: Any = None) -> None:
        """Called in the thread of a call, when it begins or ends."""
        known = known_here()
        before, noted = known.get(self), Noted(next(_numbers), stats)
        self._latest = noted  # another thread may replace it at any time
        if before is not None and before.thread != noted.thread:
            before.for_others = noted
        if isinstance(streamer, Iterator | AsyncIterator):
            self._streamed = noted
        # A new dictionary, because tasks share the dictionary of the task that started them.
        own: Own = WeakKeyDictionary(known)
        own[self] = noted
        _own.set(own)


# The verdict. --------------------------------------------------------------------------------------------------------


def suspicion(stats: Counters) -> str:
    """A warning if a published draft seems to be for another target; else an empty string."""
    rounds = stats.rounds - stats.idle_rounds - stats.lookup_rounds
    accepted = sum(stats.accepted_at[:1])
    is_low = accepted < TOO_FEW * rounds if rounds >= OF_MANY else rounds >= OF_NONE and not accepted
    if stats.suspect is None or not is_low:
        return ""
    return (
        f"Only {accepted} of {rounds} first candidates were accepted, so {stats.suspect} may be for another target, "
        "or be read wrongly. Find out: specdecpp inspect REPO --target ID, with its repository and this target."
    )


def outcome(stats: Counters) -> str:
    """Sentences on the speed relative to plain `generate()`, with the reason if speculation was not faster."""
    if stats.refusal is not None:
        how = "Drafting was given up" if stats.drafted else "The call was a plain one, without its assistant"
        return f"{how}: {stats.refusal}"
    if stats.is_unused:
        return "Nothing was generated with this assistant yet: model.generate(**inputs, assistant_model=assistant)."
    if stats.rounds == 0:
        return "Nothing was drafted: the answer was too short, so no speed was gained or lost."
    if 2 * stats.rounds_at_change > stats.rounds:
        return (
            f"Nothing could be drafted in {stats.rounds_at_change} of {stats.rounds} rounds: the target's rotary "
            "frequencies change there with the length of the text (rope_type='dynamic' or 'longrope'), and a pass "
            "over several tokens would alter the text."
        )
    if stats.speedup is None or stats.same_pass_speedup is None:
        return (
            f"{stats.tokens_per_pass:.2f} tokens per target pass. The speed relative to plain generate() was not "
            "measured."
        )
    prepares = stats.preparing_seconds > PREPARING_SHARE * stats.call_seconds
    faster = stats.call_seconds / (stats.call_seconds - stats.preparing_seconds) if prepares else 1.0
    passes = stats.speedup / stats.same_pass_speedup
    # A round takes at least one pass, so counts bound the gain; timings vary on a busy machine.
    gain = min(faster * stats.same_pass_speedup, ratio(stats.generated - stats.plain_passes, stats.rounds))
    plain, same, of_passes = (Speed(each, each, each) for each in (gain * passes, gain, passes))
    pays = effect(plain, same) == "gain"
    why = f"{stats.tokens_per_pass:.2f} tokens per target pass." if pays else _reason(stats, gain)
    later = (
        f"This call took {stats.preparing_seconds:.2f} s longer to compare passes and copy weights: it ran at "
        f"{stats.speedup:.2f} times the speed of plain generate()."
    )
    parts = verdict(plain, same, None if LOSES < passes < PAYS else of_passes), why, later if prepares else ""
    return " ".join(filter(None, parts))


def _reason(stats: Counters, gain: float) -> str:
    """Why speculation is not faster. `gain`: its speed relative to plain generation with the same kind of passes."""
    if 2 * stats.idle_rounds > stats.rounds:
        by_rule = not {"throughput", "draft"} & stats.remedies
        why = "rule='throughput' stopped" if by_rule else "Little was drafted"
        return f"{why}: {stats.idle_rounds} of {stats.rounds} passes without candidates."
    if not stats.accepted:  # for any times
        none = "The only candidate was not" if stats.drafted == 1 else f"None of {stats.drafted} candidates was"
        return f"{none} accepted. {_better_draft(stats)}"
    return "" if gain >= PAYS else _why_not(stats)


def _why_not(stats: Counters) -> str:
    """The costs and tokens of a round, and a remedy for the largest cost."""
    unit = stats.rounds * ((stats.same_pass_seconds if stats.has_products else stats.plain_pass_seconds) or 1.0)
    draft, verify, overhead = (
        seconds / unit for seconds in (stats.draft_seconds, stats.target_seconds, stats.overhead_seconds)
    )
    reason = (
        f"A round costs {draft + verify + overhead:.2f} passes over one token (drafting {draft:.2f}, verifying "
        f"{verify:.2f}, overhead {overhead:.2f}) and yields {1 + stats.accepted / stats.rounds:.2f} tokens: "
        f"{stats.acceptance_rate:.0%} of the candidates are accepted."
    )
    # Most nodes of a tree are discarded, however good the draft is, so trees are judged by their first level.
    first = ratio(sum(stats.accepted_at[:1]), stats.rounds - stats.idle_rounds)
    if (first if stats.tree_depths else stats.acceptance_rate) < 0.5:
        return f"{reason} {_better_draft(stats)}"
    dearest = max(draft, verify - 1.0, overhead)
    if dearest == overhead:
        return f"{reason} The target is too fast for the overhead of a round: speculation helps with larger targets."
    if dearest == draft:
        slow = f"one of its tokens costs {draft * stats.rounds / stats.drafted:.2f} target passes"
        return f"{reason} The draft is too slow: {slow}."
    ways = _remedies_of(stats, throughput=FEWER)
    return f"{reason} Verifying several tokens at once is expensive on this device.{ways}"


def _better_draft(stats: Counters) -> str:
    """A sentence that the draft is not good enough, and remedies that the assistant does not use yet."""
    parts = [what for name, what in (("training", "it"), ("head", "a head")) if name in stats.remedies]
    train = f" Train {' and '.join(parts)}: specdecpp train." if parts else ""
    others = _remedies_of(stats, throughput=FEWER, draft="A draft proposes candidates where nothing is found")
    other = train + others or " Another one may be, or one that is trained on texts like these."
    return f"The {'text' if 'draft' in stats.remedies else 'draft'} is not good enough for this target.{other}"


def _remedies_of(stats: Counters, **ways: str) -> str:
    """The sentences of `ways` whose names are in `stats.remedies`."""
    return "".join(f" {way}." for name, way in ways.items() if name in stats.remedies)
