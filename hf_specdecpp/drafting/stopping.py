"""Stopping rules of a chain: after each drafted candidate, draft one more?

Losslessness: a rule may look at anything the draft knows, the last candidate included, because that candidate is
submitted whatever the rule says. No rule can take a candidate back. (`docs/specdecpp.md`)
"""

from __future__ import annotations

from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftStep, Estimator


class StoppingRule:
    """Base: never stops before `max_tokens`. One instance serves one generation, so it may keep state.

    A rule reads one number a candidate, `signal` (a 0-d tensor, so that the host waits once for token and signal), and
    decides in `stops`.
    """

    min_tokens = 1
    looks_at_nothing = False  # whether `signal` and `stops` never say anything

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def begin_round(self) -> None:
        """Forget the previous round."""

    def starts(self, unread: int) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the round drafts at all. `unread`: how many tokens the draft would have to read first."""
        return True

    def signal(self, step: DraftStep) -> Tensor | None:  # noqa: ARG002 - for subclasses
        """What `stops` looks at, or `None` if nothing."""
        return None

    def stops(self, signal: float | None) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the round ends after the candidate that `signal` belongs to."""
        return False

    def update(self, num_drafted: int, num_accepted: int) -> None:
        """Learn the outcome of a round."""


class FixedLength(StoppingRule):
    """Classic speculative decoding: `max_tokens` candidates every round."""

    looks_at_nothing = True


class Threshold(StoppingRule):
    """SpecDec++ (section 3): stop when the chance that at least one candidate was rejected passes h.

    Args:
        rates: calibrates the estimates by what earlier rounds said, and learns from each round; `None` takes them as
            they are, as the paper does.
    """

    def __init__(self, config: SpeculationConfig, estimator: Estimator, rates: AcceptanceRates | None = None) -> None:
        super().__init__(config.max_tokens)
        self.min_tokens, self.h, self.estimator, self.rates = config.min_tokens, config.threshold, estimator, rates
        self.begin_round()

    def begin_round(self) -> None:
        self.survival = 1.0
        self.estimates: list[float] = []

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        # A head that judges "after" has nothing to say on the first candidate: its estimate counts as 1.
        if signal is not None:
            self.estimates.append(signal)
            self.survival *= signal if self.rates is None else self.rates.calibrated(signal)
        return 1.0 - self.survival > self.h

    def update(self, num_drafted: int, num_accepted: int) -> None:
        if self.rates is not None:
            self.rates.observe(self.estimates, num_drafted, num_accepted)
