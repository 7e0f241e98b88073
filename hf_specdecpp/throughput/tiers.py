"""How many candidates captured rounds have (`Followed`, `MostTokens`): few numbers, each captured by itself."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates

TIERS = (0, 1, 3, 5, 7, 11, 15)
TIMED = (0, 3, 7)  # whose rounds are timed before the first choice; a round's seconds grow evenly between them
FIRST = 5  # candidates of a rule's first rounds
FOLLOWS = 0.2  # weight of a round in what is expected of the next
KEPT = 31  # rounds whose seconds are remembered
PROBES = 64, 1024  # rounds without candidates until one is tried, at first and at most: each costs half a round more


def tiers_up_to(most: int) -> list[int]:
    """Those that may be chosen, the largest of them `most` itself where it lies between two."""
    return sorted({tier for tier in TIERS if tier <= most} | {min(most, TIERS[-1])})


class RoundSeconds:
    """What rounds of each tier take on a device, by what they took: medians of the latest.

    Example: rounds of 0, 3 and 7 candidates took 4, 5 and 7 ms, so one of 5 is expected to take 6, one of 11 9.
    """

    def __init__(self) -> None:
        self._taken: dict[int, list[float]] = {}

    def note(self, tier: int, seconds: float) -> None:
        self._taken[tier] = [*self._taken.get(tier, ())[1 - KEPT :], seconds]

    def time(self, tiers: list[int], run: Callable[[int], float]) -> None:
        """Time rounds that are not known and of which others follow."""
        for tier in tiers:
            if tier in TIMED and tier not in self._taken:
                self.note(tier, run(tier))

    def of(self, tiers: list[int]) -> np.ndarray:
        """Seconds of a round of each of the tiers."""
        known = sorted(self._taken)
        seconds = [float(np.median(self._taken[tier])) for tier in known]
        if len(known) > 1 and tiers[-1] > known[-1]:
            slope = max((seconds[-1] - seconds[0]) / (known[-1] - known[0]), 0.0)
            known, seconds = [*known, tiers[-1]], [*seconds, seconds[-1] + slope * (tiers[-1] - known[-1])]
        return np.interp(tiers, known, seconds)


class Followed:
    """For a rule that ends rounds by itself: the smallest tier that it mostly does not reach.

    Example: the rule stops after 2, 3 and 2 candidates: rounds of 3. It does not stop within 3: rounds of 5, then of 7.
    """

    def __init__(self, most: int) -> None:
        self.tiers = [tier for tier in tiers_up_to(most) if tier]
        self._expected = float(min(FIRST, most) - 1)

    def next(self) -> int:
        return next((tier for tier in self.tiers if tier > self._expected), self.tiers[-1])

    def note(self, tier: int, submitted: int) -> None:
        reached = submitted + 1 if submitted == tier else submitted
        self._expected += FOLLOWS * (reached - self._expected)


class MostTokens:
    """`rule="throughput"`: the tier that promises most tokens a second, by what was accepted and what rounds take.

    Where that is none, one is tried now and then, ever more seldom, since a text may change.
    """

    def __init__(self, most: int, rates: AcceptanceRates, seconds: RoundSeconds) -> None:
        self.tiers, self.rates, self.seconds = tiers_up_to(most), rates, seconds
        self._idle, self._until_probe = 0, PROBES[0]

    def next(self) -> int:
        tokens = self.rates.expected_tokens(self.tiers[-1])[self.tiers]
        rates = tokens / self.seconds.of(self.tiers)
        best = int(rates.argmax())
        if self.tiers[best] or len(self.tiers) == 1:
            self._idle, self._until_probe = 0, PROBES[0]
            return self.tiers[best]
        self._idle += 1
        if self._idle < self._until_probe:
            return 0
        self._idle, self._until_probe = 0, min(2 * self._until_probe, PROBES[1])
        return self.tiers[1 + int(rates[1:].argmax())]

    def note(self, tier: int, submitted: int) -> None:
        """Nothing: `rates` and `seconds` are told of rounds."""
