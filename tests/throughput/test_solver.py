"""The optimal stopping problem of a round: its solver against every stopping rule there is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hf_specdecpp import SpeculationConfig
from hf_specdecpp.config.costs import Costs, Floats
from hf_specdecpp.estimation.acceptance_rates import CENTRES
from hf_specdecpp.generation.target import MOST_PENDING
from hf_specdecpp.throughput.solver import Plan, solve

STEPS = [1.0, 1.0, 1.0, 1.7, 1.75, 1.8, 1.85, 1.9]  # a target on a CPU
Problem = tuple[Floats, Floats, Floats, int]


# The solver. ----------------------------------------------------------------------------------------------------------


def random_problem(seed: int) -> Problem:
    """Acceptance, transitions, seconds and lag: independent or Markov; with a step in the seconds, or of any form."""
    rng = np.random.default_rng(seed)
    bins, most = [(2, 4), (3, 3), (1, 6), (2, 3)][seed % 4]
    transitions = rng.dirichlet(np.ones(bins), bins + 1)
    if seed // 4 % 2:
        transitions[:] = transitions[0]
    verify = 1.0 + np.cumsum(rng.uniform(0.0, 0.1, most + 1))
    if seed // 8 % 2:
        verify += 0.7 * (np.arange(most + 1) >= rng.integers(1, most + 1))
    if seed // 32 % 2:
        verify = rng.permutation(verify) * rng.uniform(0.6, 1.4, most + 1)
    seconds = rng.uniform(0.0, 0.4) * np.arange(most + 1) + verify
    return rng.uniform(0.0, 1.0, bins), transitions, seconds, seed // 16 % 2


def every_rule(problem: Problem) -> Floats:
    """Tokens a second of every stopping rule: every way to stop or go on after every history of bins."""
    acceptance, transitions, seconds, lag = problem
    bins, most = len(acceptance), len(seconds) - 1
    next_acceptance = transitions @ acceptance

    def futures(k: int, row: int, survival: float) -> Floats:
        """Expected tokens and seconds beyond now, `[rules, 2]`."""
        stop = np.zeros((1, 2))
        if k == most:
            return stop
        total = np.array([[0.0, seconds[k + 1] - seconds[k]]])
        for column in range(bins):
            alive = survival * acceptance[column]
            gain = alive * next_acceptance[column] if lag else alive
            branch = transitions[row, column] * (futures(k + 1, column, alive) + np.array([gain, 0.0]))
            total = (total[:, None] + branch[None]).reshape(-1, 2)
        return np.concatenate((stop, total))

    rules = futures(lag, bins, 1.0)
    if lag:  # the first candidate brings no verdict
        rules = np.concatenate((np.zeros((1, 2)), rules + np.array([next_acceptance[bins], seconds[1] - seconds[0]])))
    return (1.0 + rules[:, 0]) / (seconds[0] + rules[:, 1])


def rate_of(plan: Plan, problem: Problem, starts: bool = True) -> float:
    """Tokens a second of following the table of `plan`."""
    acceptance, transitions, seconds, lag = problem
    tokens, time = 1.0, 0.0

    def follow(k: int, row: int, survival: float, chance: float) -> None:
        nonlocal tokens, time
        goes_on = starts if k == 0 else survival > plan.critical[k][row]
        if not goes_on:
            time += chance * seconds[k]
            return
        for column, weight in enumerate(transitions[row]):
            alive = survival * acceptance[column]
            if k >= lag:
                tokens += chance * weight * alive * ((transitions @ acceptance)[column] if lag else 1.0)
                follow(k + 1, column, alive, chance * weight)
        if k < lag:
            tokens += chance * float(transitions[row] @ acceptance)
            follow(k + 1, row, survival, chance)

    follow(0, len(acceptance), 1.0, 1.0)
    return tokens / time


@pytest.mark.parametrize("seed", range(64))
def test_no_stopping_rule_is_better(seed: int) -> None:
    problem = random_problem(seed)
    plan = solve(*problem)
    assert plan.rate == pytest.approx(every_rule(problem).max(), rel=1e-6)
    starts = plan.rate > plan.plain_rate * (1.0 + 1e-9)
    assert rate_of(plan, problem, starts) == pytest.approx(plan.rate, rel=1e-6), "the table is that rule"


def test_that_comparison_can_fail() -> None:
    """Looking one step ahead only, a usual approximation, is caught by it; so is a neglected last verdict."""
    myopic, blind = [], []
    for seed in range(64):
        problem = acceptance, transitions, seconds, lag = random_problem(seed)
        best = every_rule(problem).max()
        myopic.append(rate_of(one_step_ahead(problem, best), problem) / best - 1.0)
        alike = np.broadcast_to(transitions.mean(0), transitions.shape)
        blind.append(rate_of(solve(acceptance, alike, seconds, lag), problem) / best - 1.0)
    assert min(myopic) < -1e-2
    assert min(blind) < -1e-2


def one_step_ahead(problem: Problem, rate: float) -> Plan:
    """Go on if the next candidate alone pays."""
    acceptance, transitions, seconds, lag = problem
    following = transitions @ (acceptance * (transitions @ acceptance)[:-1] if lag else acceptance)
    critical = [[step * rate / max(each, 1e-9) for each in following] for step in np.diff(seconds)]
    return Plan([*critical, [np.inf] * len(following)], rate, 1.0 / seconds[0])


@pytest.mark.parametrize("seed", range(8))
def test_one_step_ahead_is_optimal_for_independent_estimates_without_steps(seed: int) -> None:
    acceptance, transitions, seconds, _ = random_problem(seed)
    transitions = np.broadcast_to(transitions[0], transitions.shape)
    convex = 1.0 + 0.05 * np.arange(len(seconds)) ** 1.5
    problem = (acceptance, transitions, convex, 0)
    best = every_rule(problem).max()
    myopic = rate_of(one_step_ahead(problem, best), problem)
    assert max(myopic, 1.0) == pytest.approx(best, rel=1e-9)


def test_it_looks_across_a_step() -> None:
    """The fourth token costs more than it brings, but once it is paid the next ones are cheap."""
    seconds = Costs(0.02, (1.0, 1.0, 1.0, 1.5, 1.5, 1.5, 1.5, 1.5)).round_seconds(7)
    problem = (np.array([0.9]), np.ones((2, 1)), seconds, 0)
    plan = solve(*problem)
    step = seconds[3] - seconds[2]
    assert plan.rate * step > 0.9**3, "the candidate at the step does not pay for itself"
    assert plan.critical[2][0] < 0.9**2
    assert plan.rate == pytest.approx(every_rule(problem).max(), rel=1e-9)
    assert plan.rate > 1.05 * rate_of(one_step_ahead(problem, plan.rate), problem)


def test_the_design_s_numbers() -> None:
    """Independent estimates, beta(0.45, 0.12), drafting at 0.19 of a target pass: threshold 0.48, 17 % over fixed K."""
    estimates = np.sort(np.random.default_rng(0).beta(0.45, 0.12, 200_000)).reshape(50, -1).mean(1)
    seconds = Costs(0.19, (1.0,)).round_seconds(20)
    plan = solve(estimates, np.full((51, 50), 1 / 50), seconds)
    mean = estimates.mean()
    fixed = max(float((mean ** np.arange(k + 1)).sum() / seconds[k]) for k in range(21))
    assert plan.rate / fixed == pytest.approx(1.17, abs=0.01)
    # One step ahead is optimal, so it is SpecDec++'s rule: one threshold whatever the position and the last estimate,
    # and it is the best one.
    thresholds = 1.0 - np.array(plan.critical[1:17])[:, :-1]
    assert thresholds == pytest.approx(1.0 - plan.rate * 0.19 / mean, abs=1e-3)
    assert thresholds.mean() == pytest.approx(0.48, abs=0.01)
    rates = {h: simulated_rate(estimates, h) for h in (0.3, 0.4, 0.48, 0.56, 0.66)}
    assert max(rates, key=lambda h: rates[h]) == 0.48
    assert rates[0.48] == pytest.approx(plan.rate, rel=0.01)


def simulated_rate(estimates: Floats, threshold: float) -> float:
    """Tokens a second of SpecDec++'s threshold rule on 100,000 rounds, the same draws for every threshold."""
    drawn = np.random.default_rng(1).choice(estimates, size=(100_000, 20))
    survival = drawn.cumprod(axis=1)
    stops = 1.0 - survival > threshold
    lengths = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, 20)
    accepted = (survival * (np.arange(20) < lengths[:, None])).sum(axis=1)
    return float((1.0 + accepted).sum() / (1.0 + 0.19 * lengths).sum())


def test_a_solution_takes_milliseconds_and_thinning_costs_nothing_to_speak_of() -> None:
    rng = np.random.default_rng(0)
    problem = (CENTRES, rng.dirichlet(np.linspace(0.3, 3, 9), 10), Costs(0.1, tuple(STEPS)).round_seconds(20))
    exact = solve(*problem, most_kinks=1000)
    assert solve(*problem).rate == pytest.approx(exact.rate, rel=1e-4)


# Costs. ---------------------------------------------------------------------------------------------------------------


def test_seconds_of_a_round() -> None:
    costs = Costs(0.1, (1.0, 0.9, 2.0), overhead=0.5)
    expected = [1.5, 0.9 + 0.6, 2.0 + 0.7, 2.5 + 0.8, 3.0 + 0.9]  # of any form; then a straight line
    assert costs.round_seconds(4) == pytest.approx(expected)
    assert costs.round_seconds(1) == pytest.approx(expected[:2])
    assert Costs(0.1, (1.0,)).round_seconds(3) == pytest.approx([1.0, 1.1, 1.2, 1.3])


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        ({"draft": 0.1}, "must look like"),
        ({"draft": 0.1, "verify": 1.0}, "must look like"),
        ({"draft": 0.1, "verify": [1.0], "speed": 2}, "must look like"),
        ({"draft": -0.1, "verify": [1.0]}, "none negative"),
        ({"draft": 0.1, "verify": ["1"]}, "none negative"),
        ({"draft": 0.1, "verify": []}, "must list"),
        ({"draft": 0.1, "verify": [0.0]}, "must be positive"),
    ],
)
def test_bad_costs_are_refused(costs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculationConfig(rule="throughput", costs=costs)


def test_the_example_of_the_docstring() -> None:
    plan = solve(np.array([0.2, 0.9]), np.full((3, 2), 0.5), np.array([1.0, 1.3, 1.6]))
    assert plan.rate == pytest.approx((1 + 0.55 + 0.5 * 0.9 * 0.55) / (1.3 + 0.5 * 0.3))
    assert plan.critical[1] == pytest.approx([0.676] * 3, abs=1e-3)


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
    """Tokens a second at the length that the solver chooses, beside the best length in hindsight."""
    most = 12
    costs = Costs(draft, tuple(1.0 + slope * np.arange(most + 1)))
    priced = costs.read_twice(most) if twice else costs
    plan = solve(np.array([acceptance]), np.ones((2, 1)), priced.round_seconds(most))
    survivals = acceptance ** np.arange(most)
    chosen = next((k for k in range(most) if survivals[k] <= plan.critical[k][-1 if k == 0 else 0]), most)
    rates = [rate_read_again(acceptance, length, draft, slope) for length in range(most + 1)]
    return rates[chosen] / max(rates)


@pytest.mark.parametrize("slope", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("draft", [0.05, 0.2])
@pytest.mark.parametrize("acceptance", [0.5, 0.7, 0.85, 0.95])
def test_the_price_of_reading_twice_leads_to_good_lengths(acceptance: float, draft: float, slope: float) -> None:
    """`Costs.read_twice` is an estimate: at most 5 % are lost to the best length in hindsight."""
    assert share_of_the_best(acceptance, draft, slope, twice=True) >= 0.95


def test_another_price_does_not() -> None:
    assert share_of_the_best(0.5, 0.05, 0.1, twice=False) < 0.9
