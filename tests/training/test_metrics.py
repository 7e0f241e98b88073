"""Metrics against their definitions, written as loops; expected discards against simulated coins."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.stopping import FixedLength, StoppingRule
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation.rules import make_rule
from hf_specdecpp.training.metrics import (
    Outcome,
    RecordedChain,
    auc,
    binary_kl,
    curve,
    discards_at,
    ece,
    outcome,
    stop_length,
)


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


# Stopping rules on recorded chains ------------------------------------------------------------------------------------


def recorded(seed: int, count: int = 30) -> list[RecordedChain]:
    chance = random.Random(seed)
    chains = []
    for text in range(count):
        labels = [chance.random() for _ in range(chance.randint(1, 20))]
        signals: list[float | None] = [min(max(y + chance.gauss(0, 0.2), 0.01), 0.99) for y in labels]
        chains.append(RecordedChain(text // 3, labels, {"q": signals}))
    return chains


def threshold(h: float) -> StoppingRule:
    return make_rule(SpeculationConfig(rule="threshold", threshold=h), DraftProbability())


def simulated(make: Callable[[], StoppingRule], chains: list[RecordedChain], coins: int) -> tuple[float, float]:
    chance = random.Random(0)
    discarded = generated = passes = 0
    for chain in chains:
        length = stop_length(make(), chain.signals["q"])
        for _ in range(coins):
            accepted = 0
            while accepted < length and chance.random() < chain.labels[accepted]:
                accepted += 1
            discarded, generated, passes = discarded + length - accepted, generated + accepted + 1, passes + 1
    return discarded / generated, passes / generated


@pytest.mark.parametrize("make", [lambda: FixedLength(4), lambda: threshold(0.6)])
def test_expected_rates_are_what_coins_give(make: Callable[[], StoppingRule]) -> None:
    chains = recorded(0)
    exact = outcome(make, chains, "q", 0.0)
    discard_rate, verification_rate = simulated(make, chains, coins=3000)
    assert exact.discard_rate == pytest.approx(discard_rate, rel=0.02)  # about eight standard deviations
    assert exact.verification_rate == pytest.approx(verification_rate, rel=0.02)


@pytest.mark.parametrize("h", [0.2, 0.6, 0.9])
def test_rates_obey_the_papers_identity(h: float) -> None:
    """Every round yields its accepted candidates and one more token: discards = (K + 1) x verification rate - 1."""
    point = outcome(lambda: threshold(h), recorded(1), "q", h)
    assert point.discard_rate == pytest.approx((point.mean_length + 1) * point.verification_rate - 1)


def test_a_threshold_counts_the_candidate_that_stops() -> None:
    assert stop_length(threshold(0.5), [0.9, 0.9, 0.5, 0.9]) == 3
    assert stop_length(threshold(0.5), [None, 0.9, 0.5, 0.9]) == 3
    assert stop_length(FixedLength(2), [0.9] * 5) == 2
    assert stop_length(FixedLength(9), [0.9] * 5) == 5
    config = SpeculationConfig(rule="threshold", threshold=0.1, min_tokens=3)
    assert stop_length(make_rule(config, DraftProbability()), [0.5] * 5) == 3


def test_a_rule_that_adapts_begins_anew_with_each_text() -> None:
    made = []

    def make() -> StoppingRule:
        made.append(make_rule(SpeculationConfig(rule="adaedl"), DraftProbability()))
        return made[-1]

    outcome(make, recorded(2, count=30), "q", 0.0)
    assert len(made) == 10


def test_longer_rounds_verify_less_and_discard_more() -> None:
    points = curve(lambda k: lambda: FixedLength(int(k)), range(1, 8), recorded(3), "q")
    assert [point.verification_rate for point in points] == sorted((p.verification_rate for p in points), reverse=True)
    assert [point.discard_rate for point in points] == sorted(point.discard_rate for point in points)


def test_discards_between_two_points_of_a_curve() -> None:
    points = [Outcome(1, 0.2, 0.6, 1), Outcome(2, 0.6, 0.4, 2)]
    assert discards_at(points, 0.5) == pytest.approx(0.4)
    assert discards_at(points, 0.6) == pytest.approx(0.2)
    assert discards_at(points, 0.7) is None
