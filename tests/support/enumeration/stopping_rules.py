"""Steps of a draft at random, and what a stopping rule is to make of them."""

import math

import torch

from hf_specdecpp.drafting.chain import StoppingRule
from hf_specdecpp.estimation.estimators import DraftStep


def make_step(seed: int) -> DraftStep:
    generator = torch.Generator().manual_seed(seed)
    scores = 2.0 * torch.randn(8, generator=generator, dtype=torch.float64)
    token = torch.randint(8, (), generator=generator)
    return DraftStep(0, scores, torch.zeros(2), embed=lambda each: torch.zeros(2), token=token)


def decides(rule: StoppingRule, step: DraftStep) -> bool:
    """Whether a rule stops after a step."""
    signal = rule.signal(step)
    return rule.stops(None if signal is None else float(signal))


def distribution_of(step: DraftStep) -> list[float]:
    """q, computed by hand."""
    weights = [math.exp(score) for score in step.scores.tolist()]
    return [weight / sum(weights) for weight in weights]
