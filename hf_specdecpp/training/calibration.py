"""Stage `calibrate`: fit a bias and temperatures that turn the head's log-odds into calibrated probabilities.

The weight of rejections in the loss shifts the fitted log-odds by about -log w_rej, which the bias corrects. Stopping
rules multiply estimates, so that errors multiply, too: each position in a chain has a temperature. Greedy and sampled
generation are calibrated separately, on half of the held-out prompts; the other half measures the result."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_specdecpp.estimation.acceptance_head import Calibration
from hf_specdecpp.estimation.estimators import MODES
from hf_specdecpp.estimation.metrics import SMALLEST, binary_kl, ece
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training import recorded_chains
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.models import CALIBRATION, HEAD, HEAD_WEIGHTS, Trained, save_module
from hf_specdecpp.training.trainers import save_json

MIN_CANDIDATES = 200  # the first position with fewer, and all later ones, share the temperature of the position before
MOST_BIAS, MOST_LOG = 8.0, 3.0  # bounds of the bias and of a temperature's logarithm


def run(config: TrainingConfig) -> dict[str, object]:
    """Calibrate the head in `work/head` on held-out chains. Returns the report, also in `work/head/calibration.json`,
    by temperature. `ValueError` without a head, two held-out prompts, or answers at one of the temperatures."""
    made = Trained.load(config)
    head, report = made.head.cpu(), dict[str, object]()
    samplings = [config.sampling(temperature) for temperature in config.rollouts.temperatures]
    for sampling in samplings:
        made.texts("heldout", sampling)  # raises its errors before minutes of drafting
    # One calibration serves all sampled generation: of several temperatures above 0, the last one's is kept.
    for sampling in samplings:
        rows = recorded_chains.record(made, "heldout", sampling)
        log_odds = recorded_chains.head_estimates(head, rows, made.drafter)
        fitting = calibration_half(made, sampling, rows["text"])
        of_q = rows["scalars"][:, 0].exp().logit(SMALLEST)[fitting]
        calibration = calibrate(log_odds[fitting], rows["label"][fitting], rows["index"][fitting])
        raw, label, index = log_odds[~fitting], rows["label"][~fitting], rows["index"][~fitting]
        report[f"{sampling.temperature:g}"] = {
            **asdict(calibration),
            "q": asdict(calibrate(of_q, rows["label"][fitting], rows["index"][fitting])),
            "before": quality(raw.sigmoid(), label, index),
            "after": quality(calibration.apply(raw, index).sigmoid(), label, index),
        }
        head.calibration[MODES[sampling.greedy]] = calibration
    save_module(head, head.state_dict(), config.work / HEAD / HEAD_WEIGHTS)
    save_json(report, config.work / HEAD / CALIBRATION)
    return report


def calibration_half(made: Trained, sampling: Sampling, text: Tensor) -> Tensor:
    """Bool `[n]`: which candidates to fit on, those of every second prompt. `text`: `[n]`, rows of their rollouts."""
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
    """Fit a bias, and a temperature for each `index` in a chain, to `log_odds` and `label` `[n]` by cross-entropy."""
    log_odds, label = log_odds.detach().double(), label.double()
    counts = index.bincount().tolist()
    positions = max(next((i for i, count in enumerate(counts) if count < MIN_CANDIDATES), len(counts)), 1)
    groups = index.clamp_max(positions - 1)
    bias, logs = (torch.zeros(size, dtype=torch.float64, requires_grad=True) for size in (1, positions))
    optimizer = torch.optim.LBFGS([bias, logs], max_iter=200, tolerance_change=1e-12, line_search_fn="strong_wolfe")

    def bounded() -> tuple[Tensor, Tensor]:
        return bias.clamp(-MOST_BIAS, MOST_BIAS), logs.clamp(-MOST_LOG, MOST_LOG).exp()

    def loss() -> Tensor:
        optimizer.zero_grad()
        shift, temperatures = bounded()
        error = F.binary_cross_entropy_with_logits((log_odds + shift) / temperatures[groups], label)
        error.backward()
        return error

    optimizer.step(loss)
    shift, temperatures = bounded()
    return Calibration(float(shift.detach()), temperatures.tolist())


def quality(estimate: Tensor, label: Tensor, index: Tensor) -> dict[str, object]:
    """ECE, binary KL and mean signed error of `survival`, of estimates `[n]` against `label`. All chain after chain."""
    predicted, true = survival(estimate, index), survival(label, index)
    return {
        "ece": ece(estimate, label),
        "binary_kl": binary_kl(estimate, label),
        "survival_bias": float((predicted - true).nanmean()),
    }


def survival(values: Tensor, index: Tensor) -> Tensor:
    """Cumulative products `[chains, longest]` of values `[n]` along each chain, NaN after a chain's end: values [0.5,
    0.8, 0.9] with index [0, 1, 0] are two chains and give [[0.5, 0.4], [0.9, NaN]]."""
    chain = (index == 0).cumsum(0) - 1
    table = torch.full((int(chain[-1]) + 1, int(index.max()) + 1), float("nan"), dtype=torch.float64)
    table[chain, index] = values.double()
    return table.cumprod(1)
