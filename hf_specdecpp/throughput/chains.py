"""The stopping rule of chains that maximises tokens a second: `rule="throughput"`. Derived in `docs/throughput.md`.

What it needs to know it learns from the rounds themselves: rates of acceptance (`AcceptanceRates`), and what rounds
cost (`KnownCosts`). Both are kept between generations (`ThroughputState`). Now and then it solves for the best plan
(`solver.solve`), and looks that up after every candidate (`Throughput`). Costs change between texts only, so within a
text no decision depends on a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.acceptance_rates import NO_VERDICT, AcceptanceRates, bin_of
from hf_specdecpp.estimation.estimators import DraftStep, Estimator
from hf_specdecpp.throughput.exploration import LEAST_GAIN, LEAST_GAIN_IN_BATCHES, ExplorationBudget
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.round_times import RoundTimes, alike, length_class
from hf_specdecpp.throughput.solver import Plan, solve

LEAST_CRITICAL = 1e-9
NEXT_STEPS = 2  # from the last rate a step or two are enough, and what is left the next plan will catch up
CLOSE = 0.01  # change of the rate, as a share of it, after which one is: by its square the plan is worse than the best
TRIED, TRIALS = 3, 3  # lengths that a text tries at most, and rounds of each
ROUNDS_AHEAD = 64  # of a batch, which have to bring what it takes the draft to read the texts of all rows
TRIED_WHEN_WRONG = 4  # after a text of which some rounds did not take what they should
TRIED_AGAIN = 16  # texts for which costs that rounds have confirmed are not tried


class ThroughputState:
    """What the rule knows about one draft and target: rates of acceptance, costs, and the plan that follows from them.

    Args:
        costs: of a round; `KnownCosts` follow the rounds.
        max_tokens: the most candidates in one.
        lag: 1 if verdicts come one candidate late (`Estimator.inputs == "after"`).
        rates: what is known of the estimates.
        is_batch: whether it is for the rows of a batch.

    Attributes:
        credit: for probes, while speculation does not pay.
        trials: lengths that the next rounds of the text try out.
        trial: the one of the round now; `None` for an ordinary round.
        unread, starts: of the round of a batch, which all rows share: tokens that the draft reads first in the row that
            has most, and whether it drafts at all.
    """

    def __init__(
        self,
        costs: Costs | KnownCosts,
        max_tokens: int,
        lag: int,
        rates: AcceptanceRates | None = None,
        is_batch: bool = False,
    ) -> None:
        self.settings = (costs, max_tokens, lag)
        self.known = costs if isinstance(costs, KnownCosts) else None
        self.max_tokens, self.lag = max_tokens, lag
        self.is_batch, self.were_wrong = is_batch, False
        self.least_gain = LEAST_GAIN_IN_BATCHES if is_batch else LEAST_GAIN
        self.rates = rates or AcceptanceRates()
        self.trials: list[int] = []
        self.trial: int | None = None
        self.unread, self.starts = 0, True
        self.texts, self._kind = 0, 0  # how many there were, and the class of the length of the one now
        self._plans: dict[int, tuple[Costs, Plan]] = {}  # by class, the latest
        self._is_stale = False  # whether the plan is to be made again
        self._confirmed: dict[tuple[int, int], int] = {}  # by class and width of passes: in which text
        self.credit = ExplorationBudget(1.0)
        self._reckon_with(costs.at(0) if isinstance(costs, KnownCosts) else costs)

    @property
    def plan(self) -> Plan:
        """What to do, by what is known; `plan.rate` are the tokens a second that it promises."""
        self._catch_up()
        return self._plan

    @property
    def pays(self) -> bool:
        """Whether speculating beats plain decoding."""
        return self.plan.rate >= self.least_gain * self.plan.plain_rate

    def _reckon_with(self, costs: Costs) -> None:
        self.costs, self.seconds = costs, costs.round_seconds(self.max_tokens)
        self.credit.plain = float(self.seconds[0])
        known, plan = self._plans.get(self._kind, (None, None))
        if plan is not None and known is costs:
            self._plan = plan
        else:
            self._solve(self._plan.rate if self._plans else None)

    def _solve(self, rate: float | None) -> None:
        """Make the plan for the rates as they are known now: two to four milliseconds a step.

        Args:
            rate: of the last plan, if there was one.
        """
        how: dict[str, Any] = {"tolerance": CLOSE} | ({} if rate is None else {"rate": rate, "most_steps": NEXT_STEPS})
        self._plan = solve(self.rates.acceptance, self.rates.following, self.seconds, self.lag, **how)
        self._plans[self._kind], self._is_stale = (self.costs, self._plan), False

    def begin_text(self) -> None:
        """The rounds that follow are of another text."""
        self.texts, self._kind, self.trials = self.texts + 1, 0, []

    def follow(self, length: int) -> None:
        """Reckon with what rounds cost at this length of the text, where that is known."""
        if self.known is not None and length_class(length) != self._kind:
            self._kind = length_class(length)
            if (costs := self.known.at(length)) is not self.costs:
                self._reckon_with(costs)
            self.trials = self._worth_trying()
        self._catch_up()  # now, and not when the round is timed: it takes a while

    def _catch_up(self) -> None:
        if self._is_stale:
            self._solve(self._plan.rate)

    def _worth_trying(self) -> list[int]:
        """Lengths whose costs no round has confirmed for long, so that what is known of them may be wrong: none, by
        which all others are judged, and those that would pay most if their passes cost as little as the cheapest.

        In batches none only: there a draft has to read all rows' texts first, and wider passes cost far more.
        """
        verify = self.costs.verify_seconds(self.max_tokens)
        promise = self.rates.expected_tokens(self.max_tokens) / (self.seconds - verify + verify.min())
        promise[0] = math.inf
        longest = 0 if self.is_batch else self.max_tokens
        due = [k for k in range(longest + 1) if promise[k] > self.plan.rate and self._is_due(k)]
        most = TRIED_WHEN_WRONG if self.were_wrong else TRIED
        return sorted(due, key=lambda k: -promise[k])[:most] * TRIALS

    def _is_due(self, length: int) -> bool:
        """Whether no round has confirmed for long what a length costs, in texts of about this length."""
        latest = max(self._confirmed.get((kind, length + 1), -TRIED_AGAIN) for kind in alike(self._kind))
        return self.texts - latest >= TRIED_AGAIN

    def rests(self, length: int) -> bool:
        """Whether a text of this length, which the draft has not read, is left to the target."""
        self.follow(length)
        return not (self.pays or any(self.trials) or self.credit.is_worth_following(self._price(length)))

    def may_start(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        if self.pays or not self.max_tokens:  # nothing drafts
            return self.pays
        return self.credit.seconds >= self._price(unread)

    def _price(self, unread: int) -> float:
        """Of the next probe."""
        return self.costs.read * unread + float(self.seconds[1] - self.seconds[0])

    def next_trial(self) -> int | None:
        """The number of candidates that the next round has to see what that costs; `None` where the rule decides."""
        self.trial = self.trials.pop(0) if self.trials else None
        return self.trial

    def begin_batch_round(self, unread: int) -> None:
        """Decide whether the rows of a batch draft in the round that begins: all or none, since the draft's pass is as
        wide as the row with most to read.

        Args:
            unread: tokens that the draft reads first in that row.
        """
        trial, self.unread = self.next_trial(), unread
        gain = (self.plan.rate / self.plan.plain_rate - 1.0) * float(self.seconds[0])
        pays = not self.pays or self.costs.read * unread <= ROUNDS_AHEAD * gain
        self.starts = trial > 0 if trial is not None else pays and self.may_start(unread)

    def observe(self, estimates: list[float], unread: int, num_drafted: int, num_accepted: int) -> None:
        """Learn the outcome of a round."""
        if num_drafted == 0:
            self.credit.rest()
            return
        plain = (num_accepted + 1) * float(self.seconds[0]) / self.least_gain
        self.credit.settle(self.pays, plain - float(self.seconds[num_drafted]) - self.costs.read * unread)
        self._is_stale |= self.rates.observe(estimates, num_drafted, num_accepted)

    def learn(self, times: RoundTimes) -> None:
        """Let the costs follow the rounds of a text that is over."""
        if self.known is not None:
            was_assumed, as_expected = self.known.is_assumed, self.known.learn(times)
            if was_assumed:  # what was reckoned with passes is seconds now
                self._plans.clear()
                self._reckon_with(self.known.at(0))
            self._confirmed |= dict.fromkeys(as_expected, self.texts)
            self.were_wrong = len(as_expected) < sum(map(len, times.passes.values()))


class Throughput(StoppingRule):
    """Draft on while that raises the expected tokens a second, several candidates ahead included."""

    min_tokens = 0

    def __init__(self, estimator: Estimator, state: ThroughputState) -> None:
        super().__init__(len(state.seconds) - 1)
        self.estimator, self.state = estimator, state
        self.unread = 0
        self.begin_round()

    def begin_round(self) -> None:
        self.survival, self.row, self.num_drafted = 1.0, NO_VERDICT, 0
        self.estimates: list[float] = []
        self.trial: int | None = None

    def starts(self, unread: int) -> bool:
        self.unread, self.trial = unread, self.state.next_trial()
        return self.state.may_start(unread) if self.trial is None else self.trial > 0

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        self.num_drafted += 1
        if signal is not None:
            self.estimates.append(signal)
            self.survival *= self.state.rates.calibrated(signal)
            self.row = bin_of(signal)
        return self.survival <= self.critical if self.trial is None else self.num_drafted >= self.trial

    @property
    def critical(self) -> float:
        """The survival at which another candidate no longer pays."""
        return self.state.plan.critical[self.num_drafted][self.row]

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self.state.observe(self.estimates, self.unread, num_drafted, num_accepted)


class BatchThroughput(Throughput):
    """The rule for a row of a batch. Rows share passes, so they go on together or not at all (`pays_to_go_on`), and
    begin together or not at all (`ThroughputState.begin_batch_round`)."""

    def starts(self, unread: int) -> bool:
        self.unread, self.trial = max(unread, self.state.unread), self.state.trial
        return self.state.starts

    def stops(self, signal: float | None) -> bool:
        super().stops(signal)
        return False


def pays_to_go_on(rules: Sequence[BatchThroughput], rows: int) -> bool:
    """Whether another candidate for each row that goes on pays for the batch.

    A row alone goes on while its chance S that everything so far is accepted lies above a critical one, c: another
    candidate is then worth S / c times its price. A further column of a pass has the price of one for every row,
    whoever fills it, so the batch goes on while these add up to more than its rows.

    Example: two of four rows go on, with S of 0.9 and 0.5, where c is 0.3. 0.9 / 0.3 + 0.5 / 0.3 = 4.7 > 4: they do.

    Args:
        rules: of the rows that go on.
        rows: in the batch.
    """
    if (trial := rules[0].trial) is not None:
        return rules[0].num_drafted < trial
    return sum(rule.survival / max(rule.critical, LEAST_CRITICAL) for rule in rules) > rows


def given_costs(config: SpeculationConfig) -> Costs:
    """The costs that the settings give.

    Raises:
        ValueError: they give none.
    """
    if config.costs is None:
        raise ValueError(
            "rule='throughput' has to know what a round costs, and there is no target here to measure. Attach the "
            "assistant: assistant.attach(model), or give SpeculationConfig(costs=...)."
        )
    return Costs.from_dict(config.costs)


def lag_of(estimator: Estimator) -> int:
    """How many candidates late verdicts come."""
    return int(estimator.inputs == "after")
