"""Metrics of acceptance estimates, as exact expectations without sampling.

Labels are acceptance probabilities: a candidate with label P counts as accepted with weight P and as rejected with
weight 1 - P."""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 15  # of `ece`
SMALLEST = 1e-6  # at an estimate of exactly 0 or 1 the divergence may be infinite


def auc(estimate: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """Probability that an accepted candidate has a higher estimate than a rejected one; ties count half. All arguments
    are `[n]`, one number a candidate. NaN if no candidate is accepted or none is rejected."""
    weight = torch.ones_like(label) if weight is None else weight
    accepted, rejected = (weight * label).double(), (weight * (1.0 - label)).double()
    _, group = estimate.unique(return_inverse=True)  # sorted; equal estimates share a group
    sums = torch.zeros(2, int(group.max()) + 1, dtype=torch.float64)
    sums.index_add_(1, group, torch.stack((accepted, rejected)))
    below = sums[1].cumsum(0) - 0.5 * sums[1]
    pairs = accepted.sum() * rejected.sum()
    return float((sums[0] * below).sum() / pairs) if float(pairs) > 0.0 else float("nan")


def ece(estimate: Tensor, label: Tensor) -> float:
    """Expected calibration error of estimates `[n]`: |mean estimate - mean label| in each of 15 bins of equal width,
    averaged with the bins' numbers of candidates as weights."""
    which = (estimate.double() * BINS).long().clamp(0, BINS - 1)
    difference = torch.zeros(BINS, dtype=torch.float64).index_add_(0, which, estimate.double() - label.double())
    return float(difference.abs().sum() / len(which))


def binary_kl(estimate: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """Mean of KL(Bernoulli(label) || Bernoulli(estimate)) in nats, of n candidates with weights: SpecDec++'s metric."""
    weight = torch.ones_like(label) if weight is None else weight
    estimate, label, weight = estimate.double().clamp(SMALLEST, 1.0 - SMALLEST), label.double(), weight.double()
    cross = -(label * estimate.log() + (1.0 - label) * torch.log1p(-estimate))
    entropy = torch.special.entr(label) + torch.special.entr(1.0 - label)
    return float(((cross - entropy) * weight).sum() / weight.sum())
