"""`AcceptanceRates`: what rounds teach about estimates."""

import math
from collections.abc import Callable

import numpy as np
import pytest

from hf_specdecpp.estimation.acceptance_rates import NO_VERDICT, AcceptanceRates, bin_of


def test_only_candidates_with_accepted_predecessors_count() -> None:
    rates = AcceptanceRates()
    rates.observe([0.5, 0.97, 0.3, 0.2], num_drafted=4, num_accepted=1)
    assert rates.accepted.sum() == rates.accepted[bin_of(0.5)] == 1
    assert rates.transitions.sum() == 2
    assert rates.transitions[NO_VERDICT, bin_of(0.5)] == rates.transitions[bin_of(0.5), bin_of(0.97)] == 1


def test_a_late_verdict_that_never_came_is_guessed() -> None:
    rates = AcceptanceRates()
    for _ in range(20):
        rates.observe([], num_drafted=1, num_accepted=0)
    assert rates.transitions.sum() == pytest.approx(20)
    before = rates.acceptance
    rates.fit()
    assert (rates.acceptance < before).all()


@pytest.mark.parametrize(
    "truth", [lambda e: e, lambda e: e**3, lambda e: 0.1 + 0.0 * e], ids=["right", "high", "noise"]
)
def test_estimates_are_calibrated(truth: Callable[[float], float]) -> None:
    rng = np.random.default_rng(0)
    rates = AcceptanceRates()
    for _ in range(5000):
        estimate = rng.beta(1.0, 0.4)
        rates.observe([estimate], 1, int(rng.random() < truth(estimate)))
    rates.fit()
    for estimate in (0.3, 0.6, 0.85, 0.95):
        assert rates.calibrated(estimate) == pytest.approx(truth(estimate), abs=0.08)
    assert 0.0 < rates.calibrated(0.0) < rates.calibrated(1.0) < 1.0


def judged(rates: AcceptanceRates, rounds: int, truth: Callable[[float], float], seed: int = 0) -> list[float]:
    """Observe rounds of one candidate each; how far the calibrated estimates were from the truth before each."""
    rng, errors = np.random.default_rng(seed), []
    for _ in range(rounds):
        estimate = rng.beta(1.0, 0.4)
        errors.append(abs(rates.calibrated(estimate) - truth(estimate)))
        rates.observe([estimate], 1, int(rng.random() < truth(estimate)))
    return errors


def test_it_begins_with_the_line_that_is_given_and_moves_with_evidence() -> None:
    def truth(estimate: float) -> float:  # log-odds + 1
        return 1.0 / (1.0 + (1.0 - estimate) / estimate / math.e)

    informed, untaught = AcceptanceRates((1.0, 1.0)), AcceptanceRates()
    for estimate in (0.2, 0.5, 0.9):
        assert informed.calibrated(estimate) == pytest.approx(truth(estimate), abs=1e-3)
        assert untaught.calibrated(estimate) == pytest.approx(estimate, abs=1e-3)
    first, later = np.split(np.array(judged(untaught, 2000, truth)), 2)
    assert later.mean() < 0.5 * first[:8].mean()
    assert untaught.line == pytest.approx([1.0, 1.0], abs=0.3)


def test_it_follows_a_text_that_changes() -> None:
    rates = AcceptanceRates()
    judged(rates, 3000, lambda e: e)
    judged(rates, 1500, lambda e: 0.3 * e, seed=1)
    assert rates.calibrated(0.9) == pytest.approx(0.27, abs=0.1)
    assert rates.judged < 1000, "old counts fade"


def test_a_tree_counts_the_siblings_that_the_target_got_to() -> None:
    chain, tree = AcceptanceRates(), AcceptanceRates()
    tree.observe_tree([([0.5, 0.97, 0.3], 1), ([0.2], None)])
    assert tree.judged == 3
    assert tree.accepted.sum() == tree.accepted[bin_of(0.97)] == 1
    assert tree.transitions[bin_of(0.5), bin_of(0.97)] == tree.transitions[NO_VERDICT, bin_of(0.2)] == 1
    assert chain.judged == 0
