"""Metrics of estimates against their definitions, written as loops."""

import math

import pytest
import torch
from torch import Tensor

from hf_specdecpp.estimation.metrics import auc, binary_kl, ece


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
