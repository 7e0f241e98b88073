"""What rounds have brought and taken (`Ledger`): of chains, of trees, of drafting beside lookups. Whether speculation
pays, and what faster passes do (`verdict`): in statistics, reports and cards."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from hf_specdecpp.figures import Floats

LEAST_GAIN = 1.02  # over plain decoding that candidates must promise: measured costs are not more exact
LASTING, RECENT = 0.995, 0.98  # what is left of a round one round later: of all rounds of a draft; of a passage
PAYS, LOSES = 1.03, 0.97  # times the speed of plain `generate()`: between them speeds count as equal
TRUSTED = 8.0  # plain rounds that a promise counts for, before anything has been seen


class Ledger:
    """Tokens and seconds of rounds. Older rounds count less, and a promise counts for the rounds that are to come.

    Example: a plain round takes 1 s, and 2 tokens a second are promised. A round then brings 3 tokens in 2 s. The
    promise still counts for 8 * 0.98 = 7.84 rounds, so the rate is (3 + 7.84 * 2) / (2 + 7.84) = 1.9 tokens a second.

    Args:
        memory: what is left of a round one round later.
        promise (tokens a second): expected before anything is seen.
        plain (seconds): of a round without candidates.
        trusted (rounds): plain rounds that the promise counts for.

    Attributes:
        prices (seconds): of each thing that rounds may take; `1.0` where rounds are noted in seconds.
    """

    def __init__(self, memory: float, promise: float = 0.0, plain: float = 1.0, trusted: float = TRUSTED) -> None:
        self.memory, self.promise, self.plain, self.trusted = memory, promise, plain, trusted
        self.prices: float | Floats = 1.0
        self._tokens, self._taken = 0.0, np.zeros(())

    def record_round(self, tokens: float, taken: Any) -> None:
        """Take note of a round: its tokens, and its seconds or how many of each thing in `prices` the round took."""
        self.trusted *= self.memory
        self._tokens = self.memory * self._tokens + tokens
        self._taken = self.memory * self._taken + taken

    @property
    def rate(self) -> float:
        """Tokens a second."""
        tokens = self._tokens + self.trusted * self.promise * self.plain
        return tokens / (float((self._taken * self.prices).sum()) + self.trusted * self.plain)


SAID = {
    "gain": "Speculation pays here",
    "loss": "Speculation does not pay here",
    "none": "Speculation neither pays nor costs here",
    "unclear": "Whether speculation pays here is too close to tell",
}


class Speed(NamedTuple):
    """Relative to plain `generate()`, with the ends of its 95 % interval: the same, where it was measured once."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f}" + (f" ({self.low:.2f} to {self.high:.2f})" if self.low < self.high else "")


def effect(plain: Speed, same: Speed) -> Literal["gain", "loss", "none", "unclear"]:
    """What speculation does: a gain is faster than plain generation as it is and with the same passes, by more than
    chance."""
    value, low, high = min(plain, same)
    if LOSES < value < PAYS:
        return "none"
    return "unclear" if low <= 1.0 <= high else "gain" if value >= PAYS else "loss"


def verdict(plain: Speed, same: Speed, passes: Speed | None, of: str = "") -> str:
    """Sentences on speeds over plain generation as it is, and with the same passes.

    Example: "Speculation pays here: fixed 3 runs at 2.10 times the speed of plain generate() and at 1.30 times that
    with the same passes. These passes alone take plain generate() to 1.60, so most of the speed comes from them."

    Args:
        passes: what the passes alone bring to plain generation; `None` where they are plain generation's own.
        of: what was measured, such as "fixed 3 runs at ".
    """
    said = f"{SAID[effect(plain, same)]}: {of}{plain} times the speed of plain generate()"
    if passes is None:
        return f"{said}."
    said += f" and {'at ' if of else ''}{same} times that with the same passes."
    if LOSES < passes.value < PAYS:
        return said
    most = ", so most of the speed comes from them" if passes.low > 1.0 and passes.value**2 > plain.value else ""
    slower = ": turn them off (cpu_products)" if passes.high < 1.0 else ""
    return f"{said} These passes alone take plain generate() to {passes.value:.2f}{most}{slower}."
