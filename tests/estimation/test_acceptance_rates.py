"""`AcceptanceRates`: what rounds teach about estimates."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from hf_specdecpp.estimation.acceptance_rates import NO_VERDICT, AcceptanceRates, bin_of
from hf_specdecpp.estimation.metrics import auc, binary_kl, ece


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
    rng, rates = np.random.default_rng(0), AcceptanceRates()
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


# Metrics of estimates against their definitions, written as loops. ----------------------------------------------------


def some(seed: int, n: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    estimate, label = torch.rand(2, n, generator=generator, dtype=torch.float64)
    return (estimate * 10).round() / 10, label  # with ties


@pytest.mark.parametrize("hard", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_auc(seed: int, hard: bool) -> None:
    estimate, label = some(seed)
    label = label.round() if hard else label
    won = total = 0.0
    for e, y in zip(estimate.tolist(), label.tolist(), strict=True):
        for other, z in zip(estimate.tolist(), label.tolist(), strict=True):
            total += y * (1 - z)
            won += y * (1 - z) * (1.0 if e > other else 0.5 if e == other else 0.0)
    assert auc(estimate, label) == pytest.approx(won / total)


def test_auc_of_one_class_is_undefined() -> None:
    assert math.isnan(auc(torch.rand(3), torch.ones(3)))


@pytest.mark.parametrize("seed", range(3))
def test_ece(seed: int) -> None:
    estimate, label = some(seed)
    error = 0.0
    for b in range(15):
        inside = [i for i, e in enumerate(estimate.tolist()) if min(int(e * 15), 14) == b]
        if inside:
            gap = sum(float(estimate[i] - label[i]) for i in inside) / len(inside)
            error += abs(gap) * len(inside) / len(label)
    assert ece(estimate, label) == pytest.approx(error)


@pytest.mark.parametrize("seed", range(3))
def test_binary_kl(seed: int) -> None:
    estimate, label = some(seed)
    estimate = estimate.clamp(0.05, 0.95)
    pairs = list(zip(estimate.tolist(), label.tolist(), strict=True))
    expected = sum(y * math.log(y / e) + (1 - y) * math.log((1 - y) / (1 - e)) for e, y in pairs) / len(pairs)
    assert binary_kl(estimate, label) == pytest.approx(expected)
    assert binary_kl(label.round(), label.round()) == pytest.approx(0.0, abs=1e-5)


def test_weights_count_as_repetition() -> None:
    estimate, label = some(0)
    weight = torch.tensor([1.0, 2.0] * 20)
    twice = weight.long()
    for metric in (auc, binary_kl):
        repeated = metric(estimate.repeat_interleave(twice), label.repeat_interleave(twice))
        assert metric(estimate, label, weight) == pytest.approx(repeated)
