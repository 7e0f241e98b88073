"""Tokens per second of rounds (`Ledger`), for decisions; sentences on the measured speed (`verdict`), for statistics,
reports and cards."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from hf_specdecpp.figures import Floats

LEAST_GAIN = 1.02  # least expected speed over plain decoding with which candidates are tried: costs are not more exact
LASTING, RECENT = 0.995, 0.98  # weight of a round relative to the next: for averages over about 200, and 50, rounds
PAYS, LOSES = 1.03, 0.97  # relative to plain `generate()`; speeds between them count as equal
TRUSTED = 8.0  # weight of the promise before the first round, in plain rounds


class Ledger:
    """Tokens per second of rounds: an average with less weight on older rounds, and with a prior.

    Example: memory is 0.98, a plain round takes 1 s, the promise is 2. After a round of 3 tokens in 2 s the promise
    counts as 8 * 0.98 = 7.84 plain rounds: the rate is (3 + 7.84 * 2) / (2 + 7.84) = 1.9 tokens per second.

    Args:
        memory: weight of a round divided by the weight of the next round.
        promise (tokens per second): the prior: the rate expected before any round.
        plain (seconds): time of a round without candidates.
        trusted: weight of the prior before the first round, as a number of plain rounds.

    Attributes:
        prices (seconds): time of each unit of work that `record_round` counts; `1.0` if rounds are recorded in seconds.
    """

    def __init__(self, memory: float, promise: float = 0.0, plain: float = 1.0, trusted: float = TRUSTED) -> None:
        self.memory, self.promise, self.plain, self.trusted = memory, promise, plain, trusted
        self.prices: float | Floats = 1.0
        self._tokens, self._taken = 0.0, np.zeros(())

    def record_round(self, tokens: float, taken: Any) -> None:
        """Add a round that emitted `tokens` tokens. `taken`: its seconds; if `prices` is an array, an array of the same
        shape with the round's number of each unit of work."""
        self.trusted *= self.memory
        self._tokens = self.memory * self._tokens + tokens
        self._taken = self.memory * self._taken + taken

    @property
    def rate(self) -> float:
        """Tokens per second, at the current `prices`."""
        tokens, seconds = self.totals
        return (tokens + self.trusted * self.promise * self.plain) / (seconds + self.trusted * self.plain)

    @property
    def totals(self) -> tuple[float, float]:
        """Tokens and seconds of all rounds, at the current `prices` and without the prior; older rounds count less."""
        return self._tokens, float((self._taken * self.prices).sum())


SUMMARIES = {
    "gain": "Speculation makes this faster",
    "loss": "Speculation makes this slower",
    "none": "Speculation hardly changes the speed",
    "unclear": "The measured speeds vary too much to tell whether speculation makes this faster",
}


class Speed(NamedTuple):
    """Speed relative to plain `generate()`, with its 95 % interval; after one measurement all three are equal."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.low < self.high else "")


def effect(plain: Speed, same: Speed) -> Literal["gain", "loss", "none", "unclear"]:
    """The effect of speculation, by the smaller of two speeds: relative to plain generation as it is (`plain`), and
    to plain generation with the faster matrix multiplications that speculation uses (`same`). "none" between `LOSES`
    and `PAYS`; otherwise "unclear" if the interval of the speed contains 1."""
    value, low, high = min(plain, same)
    if LOSES < value < PAYS:
        return "none"
    return "unclear" if low <= 1.0 <= high else "gain" if value >= PAYS else "loss"


def verdict(plain: Speed, same: Speed, passes: Speed | None, of: str = "") -> str:
    """One or two sentences on the speeds `plain` and `same` (see `effect`), for statistics, reports and cards.

    Example: "Speculation makes this faster: fixed 3 runs at 2.10 times the speed of plain generate() and at 1.30 times
    its speed with the same matrix multiplications. These multiplications (cpu_products) alone bring plain generate() to
    1.60 times its speed, so most of the gain comes from them."

    Args:
        passes: how much the faster matrix multiplications alone speed up plain generation; `None` if none are used.
        of: subject and verb of the first sentence, such as "fixed 3 runs at "."""
    text = f"{SUMMARIES[effect(plain, same)]}: {of}{plain} times the speed of plain generate()"
    if passes is None:
        return f"{text}."
    text += f" and {'at ' if of else ''}{same} times its speed with the same matrix multiplications."
    if LOSES < passes.value < PAYS:
        return text
    most = ", so most of the gain comes from them" if passes.low > 1.0 and passes.value**2 > plain.value else ""
    slower = ": set cpu_products='off'" if passes.high < 1.0 else ""
    text += f" These multiplications (cpu_products) alone bring plain generate() to {passes.value:.2f} times its speed"
    return f"{text}{most}{slower}."
