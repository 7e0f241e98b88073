"""How far chains are drafted: looking ahead by the prices of candidates, and the costs of rounds."""

from typing import Any

import numpy as np
import pytest
from support.plans import chain_plan

from hf_specdecpp import SpeculationConfig
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.acceptance_rates import NO_VERDICT, AcceptanceRates
from hf_specdecpp.generation.target import MOST_PENDING
from hf_specdecpp.throughput.chains import seconds_ahead


def rates_of(acceptance: float) -> AcceptanceRates:
    """Estimates that are all alike, and come true with this probability."""
    rates = AcceptanceRates()
    rates.acceptance = np.full(NO_VERDICT, acceptance)
    return rates


def test_the_example_of_the_docstring() -> None:
    found = [row[0] for row in seconds_ahead(rates_of(0.5), np.array([1.0, 1.1, 1.5]), 0)]
    assert found == pytest.approx([0.2, 0.4 / 0.5, np.inf])


def test_it_looks_across_a_step_and_into_a_dip() -> None:
    """The fourth token costs more than it brings, but once it is paid the next ones are cheap."""
    seconds = Costs(0.02, (1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5)).round_seconds(7)
    ahead, alone = seconds_ahead(rates_of(0.9), seconds, 0)[2][0], (seconds[3] - seconds[2]) / 0.9
    assert ahead < 0.5 * alone
    assert seconds_ahead(rates_of(0.9), Costs(0.02, (1.0, 1.2, 1.4, 0.9, 0.95)).round_seconds(4), 0)[1][0] < 0.0


def test_a_late_verdict_is_one_that_is_missing() -> None:
    """After k candidates, the last of which is not judged, a further one stands if that one does, too."""
    seconds = Costs(0.1, (1.0,)).round_seconds(4)
    early, late = (np.array(seconds_ahead(rates_of(0.8), seconds, lag)) for lag in (0, 1))
    assert late[0] == pytest.approx(early[0])
    assert late[1:4] == pytest.approx(early[1:4] / 0.8)


def test_independent_estimates_without_steps_have_one_threshold() -> None:
    """SpecDec++'s rule, h computed: one survival whatever the position and the last estimate."""
    plan = chain_plan(Costs(0.19, (1.0,)), 20)
    plan.rates.following[:] = plan.rates.following[NO_VERDICT]
    plan._fit()
    critical = np.array([[plan.critical(k, b) for b in range(NO_VERDICT + 1)] for k in range(20)])
    assert critical == pytest.approx(plan.rate * 0.19 / float(plan.rates.following[0] @ plan.rates.acceptance))


# Costs. ---------------------------------------------------------------------------------------------------------------


def test_seconds_of_a_round() -> None:
    costs = Costs(0.1, (1.0, 0.9, 2.0), overhead=0.5)
    expected = [1.5, 0.9 + 0.6, 2.0 + 0.7, 2.5 + 0.8, 3.0 + 0.9]  # of any form; then a straight line
    assert costs.round_seconds(4) == pytest.approx(expected)
    assert costs.round_seconds(1) == pytest.approx(expected[:2])
    assert Costs(0.1, (1.0,)).round_seconds(3) == pytest.approx([1.0, 1.1, 1.2, 1.3])


@pytest.mark.parametrize(("costs", "message"), [
    ({"draft": 0.1}, "must look like"),
    ({"draft": 0.1, "verify": 1.0}, "must look like"),
    ({"draft": 0.1, "verify": [1.0], "speed": 2}, "must look like"),
    ({"draft": -0.1, "verify": [1.0]}, "none negative"),
    ({"draft": 0.1, "verify": ["1"]}, "none negative"),
    ({"draft": 0.1, "verify": []}, "must list"),
    ({"draft": 0.1, "verify": [1.0, 0.0]}, "must be positive"),
])  # fmt: skip
def test_bad_costs_are_refused(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(rule="throughput", costs=costs)


# A target that reads tokens again after a rejection. -----------------------------------------------------------------


def rate_read_again(acceptance: float, length: int, draft: float, slope: float) -> float:
    """Tokens a second of `length` candidates a round, each accepted with the same chance, on a target whose pass over n
    tokens takes 1 + slope (n - 1): after a rejection those that stand are read with the next pass, until one without
    candidates settles `MOST_PENDING` of them. Exact: pending tokens are a Markov chain."""
    most = MOST_PENDING + length + 2
    steps, tokens, seconds = np.zeros((most, most)), np.zeros(most), np.zeros(most)
    for pending in range(most):
        drafted = 0 if pending >= MOST_PENDING else length
        outcomes = [(kept, acceptance**kept * (1.0 - acceptance)) for kept in range(drafted)]
        for kept, chance in outcomes:
            steps[pending, min(pending + kept + 1, most - 1)] += chance
            tokens[pending] += chance * (kept + 1)
        steps[pending, 0] += acceptance**drafted
        tokens[pending] += acceptance**drafted * (drafted + 1)
        seconds[pending] = 1.0 + slope * (pending + drafted) + draft * drafted
    often = np.linalg.matrix_power(steps, 4096)[0]
    return float(often @ tokens / (often @ seconds))


def share_of_the_best(acceptance: float, draft: float, slope: float, twice: bool) -> float:
    """Tokens a second at the length that the rule chooses, beside the best length in hindsight."""
    most = 12
    costs = Costs(draft, tuple(1.0 + slope * np.arange(most + 1)))
    seconds, rates = (costs.read_twice(most) if twice else costs).round_seconds(most), rates_of(acceptance)
    rate, ahead = float((rates.expected_tokens(most) / seconds).max()), seconds_ahead(rates, seconds, 0)
    chosen = next((k for k in range(most) if acceptance**k <= rate * ahead[k][0]), most)
    found = [rate_read_again(acceptance, length, draft, slope) for length in range(most + 1)]
    return found[chosen] / max(found)


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("draft", [0.05, 0.2])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.85, 0.95])
def test_the_price_of_reading_twice_leads_to_good_lengths(acceptance: float, draft: float, slope: float) -> None:
    """`Costs.read_twice` is an estimate: at most 5 % are lost to the best length in hindsight."""
    assert share_of_the_best(acceptance, draft, slope, twice=True) >= 0.95


def test_another_price_does_not() -> None:
    assert share_of_the_best(0.5, 0.05, 0.1, twice=False) < 0.9
