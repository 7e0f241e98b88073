"""The stopping rule that maximises tokens a second: `rule="throughput"`. Derived in `docs/throughput.md`.

What it needs to know it learns from the rounds themselves (`AcceptanceLaw`) and keeps between generations
(`ThroughputState`), solves now and then (`optimal_stopping.solve`), and looks up after every candidate (`Throughput`).
Nothing here reads a clock, so with the same costs the same calls draft the same candidates.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
from torch import Tensor
from transformers import GenerationConfig

from hf_specdecpp.acceptance import DraftStep, Estimator
from hf_specdecpp.configuration import SpeculationConfig
from hf_specdecpp.costs import costs_of
from hf_specdecpp.optimal_stopping import MOST_STEPS, Costs, Floats, Plan, solve
from hf_specdecpp.stopping import StoppingRule
from hf_specdecpp.typing import CausalLM

if TYPE_CHECKING:
    from hf_specdecpp.assistant import SpecDecPPAssistant

# Bins of estimates: narrow where they are many and where survival after a few candidates depends on them.
EDGES = (0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 0.96, 0.99)
CENTRES = np.array([0.05, 0.175, 0.35, 0.55, 0.725, 0.85, 0.93, 0.975, 0.995])
NO_VERDICT = len(CENTRES)  # the row of a round whose first verdict is still to come

# Before anything is observed: the estimates are right, and mostly high. Each prior counts as so many candidates.
PRIOR_LAW = np.array([0.05, 0.05, 0.08, 0.10, 0.10, 0.10, 0.12, 0.15, 0.25])
PRIOR_COUNT = 8.0
LINE_PRIOR = (2.0, 0.5)

REPLAN_EVERY = 64  # rounds
FIRST_REPLANS = (2, 4, 8, 16, 32)
REMEMBERED = 0.9  # of all counts at each of these, so that they follow the text: a memory of some 600 rounds

LEAST_GAIN = 1.02  # over plain decoding that speculation must promise: measured costs are not more exact than that
PROBE_SHARE = 0.01  # of the time without speculation may be lost on probes
MOST_CREDIT = 5.0  # plain passes that may be lost on probes in a row, so that bad luck does not end them


class AcceptanceLaw:
    """What the rounds so far say about estimates: how often each came true, and which follows which.

    Only candidates whose predecessors in the round were accepted count. The target has judged no others, and the gain
    of drafting on depends on no others.
    """

    def __init__(self) -> None:
        bins = len(CENTRES)
        self.transitions = np.zeros((bins + 1, bins))
        self.estimated, self.accepted = np.zeros(bins), np.zeros(bins)
        self.fit()

    def observe(self, estimates: list[float], num_drafted: int, num_accepted: int) -> None:
        """Count a round: its estimates in order (a late last one is missing), and how many of the candidates stood."""
        row = NO_VERDICT
        for position in range(min(num_drafted, num_accepted + 1)):
            stood = position < num_accepted
            if position < len(estimates):
                following = bin_of(estimates[position])
                share = np.eye(len(CENTRES))[following]
                self.estimated += share * estimates[position]
            else:  # which bin it was in can only be guessed, from what came before it and from its fate
                following = NO_VERDICT
                share = self.law[row] * (self.acceptance if stood else 1.0 - self.acceptance)
                share = share / share.sum()
                self.estimated += share * CENTRES
            self.transitions[row] += share
            self.accepted += share * stood
            row = following

    def fade(self, share: float) -> None:
        """Keep `share` of every count."""
        for counts in (self.transitions, self.estimated, self.accepted):
            counts *= share

    def fit(self) -> None:
        """Turn counts into probabilities, small ones shrunk towards what is known better.

        Sets `acceptance` `[bins]`, `shift` `[bins]` (what to add to the log-odds of an estimate), and `law`
        `[bins + 1, bins]` (of the next bin given the last; the last row is that of a round's first verdict).
        """
        judged = self.transitions.sum(0)
        estimated = _log_odds((self.estimated + CENTRES) / (judged + 1.0))
        # All bins together first: a useless draft shows after a few candidates, whichever bins they are in.
        expected = _line(estimated, judged, self.accepted)
        self.acceptance = (self.accepted + PRIOR_COUNT * expected) / (judged + PRIOR_COUNT)
        self.shift = _log_odds(self.acceptance) - estimated
        usual = (judged + PRIOR_COUNT * PRIOR_LAW) / (judged.sum() + PRIOR_COUNT)
        rows = self.transitions.sum(1, keepdims=True)
        self.law = (self.transitions + PRIOR_COUNT * usual) / (rows + PRIOR_COUNT)


class ThroughputState:
    """What the rule knows about one draft and target: the law, and the plan that follows from it.

    Args:
        costs: of a round.
        max_tokens: the most candidates in one.
        lag: 1 if verdicts come one candidate late (`Estimator.inputs == "after"`).
        law: what earlier generations have taught.

    Attributes:
        plan: `optimal_stopping.Plan`, `plan.rate` being the tokens a second that it promises.
        credit: seconds that probes may cost now, while speculation does not pay.
    """

    def __init__(self, costs: Costs, max_tokens: int, lag: int, law: AcceptanceLaw | None = None) -> None:
        self.settings = (costs, max_tokens, lag)
        self.costs, self.lag, self.seconds = costs, lag, costs.round_seconds(max_tokens)
        self.law = law or AcceptanceLaw()
        self.rounds, self.credit = 0, MOST_CREDIT * float(self.seconds[0])
        self.replan()

    @property
    def pays(self) -> bool:
        """Whether speculating beats plain decoding."""
        return self.plan.rate >= LEAST_GAIN * self.plan.plain_rate

    def replan(self) -> None:
        """Solve the stopping problem for the law as it is known now (milliseconds)."""
        law = self.law
        law.fit()
        self.shift = law.shift.tolist()
        # From the last rate a step or two are enough, and what is left the next plan will catch up.
        rate, steps = (self.plan.rate, 2) if self.rounds else (0.0, MOST_STEPS)
        self.plan: Plan = solve(law.acceptance, law.law, self.seconds, self.lag, rate, most_steps=steps)

    def calibrated(self, estimate: float) -> float:
        """The chance that a candidate with this estimate is accepted."""
        estimate = min(max(estimate, 1e-4), 1.0 - 1e-4)
        return 1.0 / (1.0 + (1.0 - estimate) / estimate * math.exp(-self.shift[bin_of(estimate)]))

    def may_start(self, unread: int) -> bool:
        """Whether a round drafts at all. `unread`: tokens that the draft has to read first."""
        if self.pays:
            return True
        return self.credit >= self.costs.read * unread + float(self.seconds[1] - self.seconds[0])

    def observe(self, estimates: list[float], unread: int, num_drafted: int, num_accepted: int) -> None:
        """Learn the outcome of a round."""
        plain = float(self.seconds[0])
        if num_drafted == 0:
            self.credit += PROBE_SHARE * plain
        else:
            saved = (num_accepted + 1) * plain - float(self.seconds[num_drafted]) - self.costs.read * unread
            change = PROBE_SHARE * plain if self.pays else saved
            self.credit = min(self.credit + change, MOST_CREDIT * plain)
        if num_drafted == 0:
            return
        self.law.observe(estimates, num_drafted, num_accepted)
        self.rounds += 1
        if self.rounds % REPLAN_EVERY == 0:
            self.law.fade(REMEMBERED)
            self.replan()
        elif self.rounds in FIRST_REPLANS:
            self.replan()


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
            self.survival *= self.state.calibrated(signal)
            self.row = bin_of(signal)
        return self.survival <= self.state.plan.critical[self.num_drafted][self.row]

    def update(self, num_drafted: int, num_accepted: int) -> None:
        self.state.observe(self.estimates, self.unread, num_drafted, num_accepted)


class ThroughputMemory:
    """The states of one assistant, by target and by how the target samples. `clear()` forgets all of them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was learned, so that a seeded run can be repeated."""
        self.states: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], ThroughputState]] = WeakKeyDictionary()

    def state(
        self, assistant: SpecDecPPAssistant, target: CausalLM | None, generation: GenerationConfig
    ) -> ThroughputState:
        """What is known of `target`, its costs measured now if they have to be.

        Raises:
            ValueError: costs are neither given nor can be measured.
        """
        config, estimator = assistant.speculation, assistant.estimator
        sampling = (generation.temperature, generation.top_k, generation.top_p) if generation.do_sample else ()
        states = self.states.setdefault(assistant if target is None else target, {})
        known = states.get(sampling)
        if config.costs is None and target is not None:
            costs = costs_of(target, assistant.ready_drafter(), estimator, config.max_tokens)
            config = replace(config, costs=costs.to_dict())
        settings = settings_of(config, estimator)
        if known is None or known.settings != settings:
            states[sampling] = ThroughputState(*settings, known.law if known is not None else None)
        return states[sampling]


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


def bin_of(estimate: float) -> int:
    return bisect_right(EDGES, estimate)


def _line(log_odds: Floats, judged: Floats, accepted: Floats) -> Floats:
    """Acceptance probabilities whose log-odds are a straight line in the estimates' (a logistic regression).

    The line is thought to be the estimates themselves, give or take `LINE_PRIOR` in level and slope.
    """
    inputs = np.stack((np.ones_like(log_odds), log_odds), axis=1)
    prior, precision = np.array([0.0, 1.0]), np.diag(1.0 / np.square(LINE_PRIOR))
    line = prior
    for _ in range(20):
        expected = _sigmoid(inputs @ line)
        weight = np.maximum(judged * expected * (1.0 - expected), 0.05 * judged)  # no wild steps where it is flat
        slope = inputs.T @ (accepted - judged * expected) - precision @ (line - prior)
        line = line + np.linalg.solve(inputs.T @ (weight[:, None] * inputs) + precision, slope)
    return _sigmoid(inputs @ line)


def _log_odds(probability: Any) -> Any:
    probability = np.clip(probability, 1e-6, 1.0 - 1e-6)
    return np.log(probability / (1.0 - probability))


def _sigmoid(log_odds: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-log_odds))
