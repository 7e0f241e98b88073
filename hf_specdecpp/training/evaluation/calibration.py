"""Stage `calibrate`: make the head's estimates mean what they say.

The weight of rejections in the loss moves the fitted log-odds by about -log w_rej, and a product of many estimates
multiplies any error. One bias for all candidates undoes the first, one temperature for each position in the chain the
rest; greedy and sampled targets have their own. Half of the held-out prompts are used for that, the other half measure
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.estimation.estimators import MODES
from hf_specdecpp.estimation.head import Calibration
from hf_specdecpp.estimation.metrics import binary_kl, ece
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.evaluation import chains
from hf_specdecpp.training.models import HEAD, Trained, save_head
from hf_specdecpp.training.resuming import save_json

MIN_CANDIDATES = 200  # a position with fewer shares the temperature of the one before


def run(config: TrainingConfig) -> dict[str, object]:
    """Calibrate the head in `work/head` on held-out chains; the report, also in `work/head/calibration.json`.

    Raises:
        ValueError: there is no head, fewer than two held-out prompts, or no answer at one of the temperatures.
    """
    made = Trained.load(config)
    head, report = made.head.cpu(), dict[str, object]()
    samplings = [config.sampling(temperature) for temperature in config.head_temperatures]
    for sampling in samplings:
        made.texts("heldout", sampling)  # raises now, and not after minutes
    # The last temperature of a mode wins where there are several: one calibration serves all sampled targets.
    for sampling in samplings:
        rows = chains.record(made, "heldout", sampling)
        log_odds = chains.head_estimates(head, rows, made.drafter)
        fitting = calibration_half(made, sampling, rows["text"])
        calibration = calibrate(log_odds[fitting], rows["label"][fitting], rows["index"][fitting])
        raw, label, index = log_odds[~fitting], rows["label"][~fitting], rows["index"][~fitting]
        report[f"{sampling.temperature:g}"] = {
            **asdict(calibration),
            "candidates": {"fitting": int(fitting.sum()), "measuring": int((~fitting).sum())},
            "before": quality(raw.sigmoid(), label, index),
            "after": quality(calibration.apply(raw, index).sigmoid(), label, index),
        }
        head.calibration[MODES[sampling.greedy]] = calibration
    save_head(head, config.work / HEAD)
    save_json(report, config.work / HEAD / "calibration.json")
    return report


def calibration_half(made: Trained, sampling: Sampling, text: Tensor) -> Tensor:
    """Which candidates (`text` `[n]`: the rollout that each belongs to) are for fitting: those of every other prompt.

    Raises:
        ValueError: only one prompt, so that nothing would be left to measure with.
    """
    prompts = list(made.texts("heldout", sampling)["prompt_id"])
    used = sorted({prompts[row] for row in text.unique().tolist()})
    if len(used) < 2:
        raise ValueError(
            f"Only {len(used)} held-out prompt has an answer to draft in, and calibration needs two: one to fit, one "
            "to measure. Raise rollouts.heldout, or give more prompts."
        )
    fitting = set(used[::2])
    return torch.tensor([prompts[row] in fitting for row in text.tolist()])


def calibrate(log_odds: Tensor, label: Tensor, index: Tensor) -> Calibration:
    """The bias and temperatures that minimise the binary cross-entropy; all `[n]`, `index` the place in the chain."""
    log_odds, label = log_odds.double(), label.double()
    counts = index.bincount()
    positions = next((i for i, count in enumerate(counts.tolist()) if count < MIN_CANDIDATES), len(counts))
    calibration = Calibration(0.0, [1.0] * max(positions, 1))
    for _ in range(3):  # alternating; each problem is convex (in 1 / temperature)
        temperatures = calibration.temperatures
        calibration.bias = minimise(
            lambda bias: _bce(Calibration(bias, temperatures).apply(log_odds, index), label),  # noqa: B023
            -8.0,
            8.0,
        )
        shifted = log_odds + calibration.bias
        groups = index.clamp_max(len(calibration.temperatures) - 1)
        for position in range(len(calibration.temperatures)):
            here = groups == position
            z, y = shifted[here], label[here]
            best = minimise(lambda t: _bce(z / math.exp(t), y), math.log(0.05), math.log(20.0))  # noqa: B023
            calibration.temperatures[position] = math.exp(best)
    return calibration


def minimise(function: Callable[[float], float], low: float, high: float, tolerance: float = 1e-4) -> float:
    """Where a function with one minimum between `low` and `high` has it (golden section)."""
    golden = (math.sqrt(5.0) - 1.0) / 2.0
    left, right = high - golden * (high - low), low + golden * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > tolerance:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - golden * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + golden * (high - low)
            at_right = function(right)
    return (low + high) / 2.0


def quality(estimate: Tensor, label: Tensor, index: Tensor) -> dict[str, object]:
    """ECE and binary KL of estimates, and how far off their cumulative product is; all `[n]`, chain after chain."""
    predicted, true = survival(estimate, index), survival(label, index)
    bias = (predicted - true).nanmean(0)
    return {
        "ece": ece(estimate, label),
        "binary_kl": binary_kl(estimate, label),
        "survival_bias": float((predicted - true).nanmean()),
        "survival_bias_by_position": bias.tolist(),
    }


def survival(values: Tensor, index: Tensor) -> Tensor:
    """Cumulative products `[chains, longest]` of values `[n]` along each chain; NaN past a chain's end."""
    chain = (index == 0).cumsum(0) - 1
    table = torch.full((int(chain[-1]) + 1, int(index.max()) + 1), float("nan"), dtype=torch.float64)
    table[chain, index] = values.double()
    return table.cumprod(1)


def _bce(log_odds: Tensor, label: Tensor) -> float:
    return float(F.binary_cross_entropy_with_logits(log_odds, label))
