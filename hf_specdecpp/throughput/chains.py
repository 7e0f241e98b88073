"""How far chains are drafted under `rule="throughput"`: `ChainPlan`, and the rule that follows it, `Throughput`.

Drafting goes on while the tokens that are expected of a further candidate exceed the rate, in tokens a second, times
the seconds that it adds. Derived in `docs/throughput.md`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from hf_specdecpp.config.costs import Floats
from hf_specdecpp.drafting.stopping import Proposal, StoppingRule
from hf_specdecpp.estimation.acceptance_rates import NO_VERDICT, AcceptanceRates, bin_of
from hf_specdecpp.estimation.estimators import DraftStep, Estimator
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.plan import Plan

LEAST_GAIN_IN_BATCHES = 1.1  # there rows end one by one, and those that are left pay for passes alone
LEAST_CRITICAL = 1e-9
ROUNDS_AHEAD = 64  # of a batch, which have to bring what it takes the draft to read the texts of all rows


class ChainPlan(Plan):
    """What the rule knows of one draft and target in chains.

    Args:
        lag: 1 if verdicts come one candidate late (`Estimator.inputs == "after"`).
    """

    def __init__(self, known: KnownCosts, most: int, lag: int, rates: AcceptanceRates | None = None) -> None:
        self.lag = lag
        super().__init__(known, most, rates)

    def rule(self, estimator: Estimator) -> Throughput:
        return Throughput(estimator, self)

    def _fit(self) -> None:
        self._ahead = seconds_ahead(self.rates, self.seconds, self.lag)
        super()._fit()

    def tokens(self) -> Floats:
        return self.rates.expected_tokens(self.most)

    def critical(self, drafted: int, last: int) -> float:
        """The survival at which candidates after so many no longer pay; `last`: bin of the last estimate."""
        return self.price * self._ahead[drafted][last]

    def observe(self, estimates: list[float], unread: int, num_drafted: int, num_accepted: int) -> None:
        if num_drafted == 0:
            self.pause()
            return
        passes = -(-num_drafted // self.costs.block)
        self._settle(num_accepted + 1, num_drafted, passes, num_drafted, unread)
        self._is_stale |= self.rates.observe(estimates, num_drafted, num_accepted)


class BatchPlan(ChainPlan):
    """The same for the rows of a batch, which begin together or not at all, since the draft's pass is as wide as the
    row with most to read.

    Attributes:
        unread, begins, trial: of the round now: tokens that the draft reads first in that row, whether the rows draft,
            and how many candidates the round tries out, if any.
    """

    least_gain = LEAST_GAIN_IN_BATCHES
    tries_to = 0  # a draft has to read all rows' texts first, and wider passes cost far more

    def __init__(self, known: KnownCosts, most: int, lag: int, rates: AcceptanceRates | None = None) -> None:
        super().__init__(known, most, lag, rates)
        self.unread, self.begins = 0, True
        self.trial: int | None = None

    def rule(self, estimator: Estimator) -> BatchThroughput:
        return BatchThroughput(estimator, self)

    def begin_batch(self, unread: int) -> None:
        """Decide whether the rows draft in the round that begins."""
        self.trial, self.unread = self.next_trial(), unread
        gain = self.rate * self.plain**2 - self.plain
        pays = not self.pays or self.costs.read * unread <= ROUNDS_AHEAD * gain
        self.begins = self.trial > 0 if self.trial is not None else pays and self.starts(unread)


def seconds_ahead(rates: AcceptanceRates, seconds: Floats, lag: int) -> list[list[float]]:
    """`[k][b]`: seconds for a token that is expected of drafting on after k candidates that are sure to stand, the last
    of them in bin b (the last b: no estimate is known yet). Of all numbers of further candidates the best counts, so
    that a step of the costs is gone beyond where that pays, and a dip is made use of.

    Example: each candidate is accepted with 0.5 whatever its estimate says. After none a further one takes 0.1 s, two
    take 0.5 s: 0.1 / 0.5 = 0.2 s a token for one, 0.5 / 0.75 = 0.67 s for both.

    Args:
        seconds: `[n + 1]` of rounds with 0, 1, ... candidates.
        lag: 1 if the last candidate's estimate is not known, where there is one.
    """
    most = len(seconds) - 1
    survives = rates.following * rates.acceptance  # [bins + 1, bins]: the next candidate is in a bin, and stands
    tokens = [np.zeros(len(survives))]
    for _ in range(most + lag):
        tokens.append(tokens[-1] + survives.sum(axis=1))
        survives = survives @ (rates.following[:NO_VERDICT] * rates.acceptance)
    expected = np.array(tokens).T  # [bins + 1, further candidates]
    found = []
    for k in range(most + 1):
        late = lag if k else 0
        further = expected[:, 1 + late : 1 + late + most - k] - expected[:, late : late + 1]
        added = seconds[k + 1 :] - seconds[k]
        per_token = added / np.maximum(further, 1e-12)
        found.append(per_token.min(axis=1, initial=math.inf).tolist())
    return found


class Throughput(StoppingRule):
    """Draft on while that raises the expected tokens a second."""

    min_tokens = 0

    def __init__(self, estimator: Estimator, plan: ChainPlan) -> None:
        super().__init__(plan.most)
        self.estimator, self.plan = estimator, plan
        self.unread = 0
        self.begin_round()

    def begin_round(self) -> None:
        self.stands, self.last, self.num_drafted = 1.0, NO_VERDICT, 0
        self.estimates: list[float] = []
        self.trial: int | None = None

    def starts(self, unread: int) -> bool:
        self.unread, self.trial = unread, self.plan.next_trial()
        return self.plan.starts(unread) if self.trial is None else self.trial > 0

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        self.num_drafted += 1
        if signal is not None:
            self.estimates.append(signal)
            self.stands *= self.plan.rates.calibrated(signal)
            self.last = bin_of(signal)
        return self.stands <= self.critical if self.trial is None else self.num_drafted >= self.trial

    @property
    def critical(self) -> float:
        """The survival at which another candidate no longer pays."""
        return self.plan.critical(self.num_drafted, self.last)

    @property
    def survival(self) -> float | None:
        return self.stands if self.trial is None else None

    def saw(self, proposal: Proposal, stands: Sequence[int]) -> None:
        self.plan.observe(self.estimates, self.unread, proposal.num_drawn, len(proposal.drawn(stands)))


class BatchThroughput(Throughput):
    """The rule for a row of a batch. Rows share passes, so they go on together or not at all (`pays_to_go_on`), and
    begin together or not at all (`BatchPlan.begin_batch`)."""

    plan: BatchPlan

    def starts(self, unread: int) -> bool:
        self.unread, self.trial = max(unread, self.plan.unread), self.plan.trial
        return self.plan.begins

    def stops(self, signal: float | None) -> bool:
        super().stops(signal)
        return False

    @property
    def worth(self) -> float:
        """A row alone goes on while its chance S that everything so far is accepted lies above a critical one, c:
        another candidate is then worth S / c times its price."""
        if self.trial is not None:
            return math.inf if self.num_drafted < self.trial else 0.0
        return self.stands / max(self.critical, LEAST_CRITICAL)
