"""The stopping rule of chains that maximises tokens a second: `rule="throughput"`. Derived in `docs/throughput.md`.

What it needs to know it learns from the rounds themselves (`AcceptanceRates`) and keeps between generations
(`ThroughputState`), solves now and then (`solver.solve`), and looks up after every candidate (`Throughput`). With the
same costs the same calls draft the same candidates; what rounds really took is only compared with the costs
(`CostCheck`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.acceptance_rates import NO_VERDICT, AcceptanceRates, bin_of
from hf_specdecpp.estimation.estimators import DraftStep, Estimator
from hf_specdecpp.throughput.exploration import LEAST_GAIN, ExplorationBudget
from hf_specdecpp.throughput.solver import MOST_STEPS, Plan, solve

WRONG = 1.5  # times another price of a draft step, in target passes, than was measured; longer contexts explain less
LEAST_CRITICAL = 1e-9
JUDGED = 8  # rounds with candidates before that is said


@dataclass
class CostCheck:
    """What rounds really took beside what the costs say.

    A machine that is slower in everything changes no decision, so only the proportion of drafting and verifying counts.
    Example: the costs say 10 ms of drafting and 40 ms of target passes. If these took 12 and 24 ms, a candidate costs
    (12 / 10) / (24 / 40) = 2 times what the rule reckons with.

    Attributes:
        rounds: those with candidates.
        drafting, verifying: seconds that they and the target passes of all rounds should have taken by the costs.
        draft_seconds, target_seconds: that they took.
    """

    rounds: int = 0
    drafting: float = 0.0
    verifying: float = 0.0
    draft_seconds: float = 0.0
    target_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """The real price of drafting, in target passes, relative to the measured one; 1 while little is known."""
        if self.rounds < JUDGED or not (self.drafting > 0.0 and self.draft_seconds > 0.0 and self.target_seconds > 0.0):
            return 1.0
        return self.draft_seconds / self.drafting / (self.target_seconds / self.verifying)

    @property
    def fails(self) -> bool:
        return not 1.0 / WRONG <= self.ratio <= WRONG


class ThroughputState:
    """What the rule knows about one draft and target: rates of acceptance, and the plan that follows from it.

    Args:
        costs: of a round.
        max_tokens: the most candidates in one.
        lag: 1 if verdicts come one candidate late (`Estimator.inputs == "after"`).
        rates: what is known of the estimates.

    Attributes:
        plan: `solver.Plan`, `plan.rate` being the tokens a second that it promises.
        credit: for probes, while speculation does not pay.
        check: whether the costs are those of the rounds.
        again: whether the costs were measured again, because they were not.
    """

    def __init__(self, costs: Costs, max_tokens: int, lag: int, rates: AcceptanceRates | None = None) -> None:
        self.settings = (costs, max_tokens, lag)
        self.costs, self.lag, self.seconds = costs, lag, costs.round_seconds(max_tokens)
        self.rates = rates or AcceptanceRates()
        self.credit = ExplorationBudget(float(self.seconds[0]))
        self.again = False
        self.check, self._verify = CostCheck(), costs.verify_seconds(max_tokens)
        self.plan = self._solved(0.0, MOST_STEPS)

    @property
    def pays(self) -> bool:
        """Whether speculating beats plain decoding."""
        return self.plan.rate >= LEAST_GAIN * self.plan.plain_rate

    def _solved(self, rate: float, most_steps: int) -> Plan:
        """The solution of the stopping problem for the rates as they are known now (milliseconds)."""
        rates = self.rates
        return solve(rates.acceptance, rates.following, self.seconds, self.lag, rate, most_steps=most_steps)

    def may_start(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        if self.pays:
            return True
        return self.credit.seconds >= self.costs.read * unread + float(self.seconds[1] - self.seconds[0])

    def observe(self, estimates: list[float], unread: int, num_drafted: int, num_accepted: int) -> None:
        """Learn the outcome of a round."""
        self.check.verifying += float(self._verify[num_drafted])
        if num_drafted == 0:
            self.credit.rest()
            return
        plain = (num_accepted + 1) * float(self.seconds[0])
        self.credit.settle(self.pays, plain - float(self.seconds[num_drafted]) - self.costs.read * unread)
        self.check.rounds += 1
        self.check.drafting += num_drafted * self.costs.draft + (unread - 1) * self.costs.read
        if self.rates.observe(estimates, num_drafted, num_accepted):
            # From the last rate a step or two are enough, and what is left the next plan will catch up.
            self.plan = self._solved(self.plan.rate, 2)


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

    def starts(self, unread: int) -> bool:
        self.unread = unread
        return self.state.may_start(unread)

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        self.num_drafted += 1
        if signal is not None:
            self.estimates.append(signal)
            self.survival *= self.state.rates.calibrated(signal)
            self.row = bin_of(signal)
        return self.survival <= self.critical

    @property
    def critical(self) -> float:
        """The survival at which another candidate no longer pays."""
        return self.state.plan.critical[self.num_drafted][self.row]

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self.state.observe(self.estimates, self.unread, num_drafted, num_accepted)

    def finish(self, draft_seconds: float, target_seconds: float) -> float | None:
        check = self.state.check
        check.draft_seconds += draft_seconds
        check.target_seconds += target_seconds
        return check.ratio if check.fails else None


class BatchThroughput(Throughput):
    """The rule for a row of a batch. Rows share passes, so they go on together or not at all (`pays_to_go_on`)."""

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
    return sum(rule.survival / max(rule.critical, LEAST_CRITICAL) for rule in rules) > rows


def settings_of(config: SpeculationConfig, estimator: Estimator) -> tuple[Costs, int, int]:
    """The arguments of a `ThroughputState` that has learned nothing yet.

    Raises:
        ValueError: it gives none.
    """
    if config.costs is None:
        raise ValueError(
            "rule='throughput' has to know what a round costs, and there is no target here to measure. Attach the "
            "assistant: assistant.attach(model), or give SpeculationConfig(costs=...)."
        )
    return Costs.from_dict(config.costs), config.max_tokens, int(estimator.inputs == "after")
