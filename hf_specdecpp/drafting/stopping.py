"""Stopping rules of a chain: after each drafted candidate, draft one more?

Losslessness: a rule may look at anything the draft knows, the last candidate included, because that candidate is
submitted whatever the rule says. No rule can take a candidate back. (`docs/specdecpp.md`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftStep, Estimator


class Proposal(Protocol):
    """What a round proposed: a chain or a tree."""

    @property
    def num_drawn(self) -> int:
        """Candidates that the draft drew; what was looked up is none of them."""

    def drawn(self, path: Sequence[int], /) -> Sequence[int]:
        """Those of accepted candidates that the draft drew."""


class StoppingRule:
    """Base: never stops before `max_tokens`. One instance serves one generation, so it may keep state.

    A rule reads one number a candidate, `signal` (a 0-d tensor, so that the host waits once for token and signal), and
    decides in `stops`.

    Attributes:
        looks_at_nothing: whether `signal` and `stops` never say anything.
        survival: chance that all candidates so far stand; `None` where that is not known, or nothing may follow them.
        worth: of a further candidate in a row of a batch, as a multiple of its price (`pays_to_go_on`).
    """

    min_tokens = 1
    looks_at_nothing = False

    @property
    def survival(self) -> float | None:
        return None

    @property
    def worth(self) -> float:
        return math.inf

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

    def saw(self, proposal: Proposal, stands: Sequence[int]) -> None:
        """Learn the outcome of a round (`StoppingRule.saw`)."""


def pays_to_go_on(rules: Sequence[StoppingRule], rows: int) -> bool:
    """Whether another candidate for each row that goes on pays for the batch: a further column of a pass has the price
    of one for every row, whoever fills it.

    Example: two of four rows go on, for which a candidate is worth 3 and 1.7 times its price. 4.7 > 4: they do.

    Args:
        rules: of the rows that go on.
        rows: in the batch.
    """
    return sum(rule.worth for rule in rules) > rows


class FixedLength(StoppingRule):
    """Classic speculative decoding: `max_tokens` candidates every round."""

    looks_at_nothing = True


class Threshold(StoppingRule):
    """SpecDec++ (section 3): stop when the chance that at least one candidate was rejected passes h.

    Args:
        rates: calibrates the estimates by what earlier rounds said, and learns from each round; `None` takes them as
            they are, as the paper does.
        min_tokens (candidates): the fewest in a round.
    """

    def __init__(
        self, config: SpeculationConfig, estimator: Estimator, rates: AcceptanceRates | None = None, min_tokens: int = 1
    ) -> None:
        super().__init__(config.max_tokens)
        self.min_tokens, self.h, self.estimator, self.rates = min_tokens, config.threshold, estimator, rates
        self.begin_round()

    def begin_round(self) -> None:
        self.chance = 1.0
        self.estimates: list[float] = []

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        # A head that judges "after" has nothing to say on the first candidate: its estimate counts as 1.
        if signal is not None:
            self.estimates.append(signal)
            self.chance *= signal if self.rates is None else self.rates.calibrated(signal)
        return 1.0 - self.chance > self.h

    def saw(self, proposal: Proposal, stands: Sequence[int]) -> None:
        if self.rates is not None:
            self.rates.observe(self.estimates, proposal.num_drawn, len(proposal.drawn(stands)))
