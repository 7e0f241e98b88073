"""How good are acceptance estimates, and how good is a stopping rule? Exact expectations, no sampling.

Labels are acceptance probabilities. A candidate with label P counts as accepted with weight P and as rejected with
weight 1 - P, so no coin needs to be thrown.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_specdecpp.drafting.stopping import StoppingRule

SMALLEST = 1e-6  # a probability of exactly 0 or 1 would make the divergence infinite


def auc(estimate: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """Chance that an accepted candidate has a higher estimate than a rejected one, ties counting half. All `[n]`."""
    weight = torch.ones_like(label) if weight is None else weight
    accepted, rejected = (weight * label).double(), (weight * (1.0 - label)).double()
    _, group = estimate.unique(return_inverse=True)  # sorted; equal estimates share a group
    sums = torch.zeros(2, int(group.max()) + 1, dtype=torch.float64)
    sums.index_add_(1, group, torch.stack((accepted, rejected)))
    below = sums[1].cumsum(0) - 0.5 * sums[1]
    pairs = accepted.sum() * rejected.sum()
    return float((sums[0] * below).sum() / pairs) if float(pairs) > 0.0 else float("nan")


def ece(estimate: Tensor, label: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean |estimate - label| over equally wide bins, by their share. Both `[n]`."""
    _, estimates, labels, counts = reliability(estimate, label, bins)
    return float(((estimates - labels).abs() * counts).sum() / counts.sum())


def reliability(estimate: Tensor, label: Tensor, bins: int = 15) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Which bins have candidates; their mean estimates, mean labels and numbers: each `[bins used]`."""
    which = (estimate.double() * bins).long().clamp(0, bins - 1)
    sums = torch.zeros(3, bins, dtype=torch.float64)
    sums.index_add_(1, which, torch.stack((estimate.double(), label.double(), torch.ones_like(label).double())))
    used = sums[2].nonzero()[:, 0]
    counts = sums[2, used]
    return used, sums[0, used] / counts, sums[1, used] / counts, counts


def binary_kl(estimate: Tensor, label: Tensor, weight: Tensor | None = None) -> float:
    """Mean of KL(Bernoulli(label) || Bernoulli(estimate)) in nats, the paper's metric. All `[n]`."""
    weight = torch.ones_like(label) if weight is None else weight
    estimate, label, weight = estimate.double().clamp(SMALLEST, 1.0 - SMALLEST), label.double(), weight.double()
    cross = -(label * estimate.log() + (1.0 - label) * torch.log1p(-estimate))
    entropy = torch.special.entr(label) + torch.special.entr(1.0 - label)
    return float(((cross - entropy) * weight).sum() / weight.sum())


@dataclass
class RecordedChain:
    """Candidates of one drafted chain, from its first one to well past where a rule would stop.

    Attributes:
        text: which text it continues; a rule that adapts begins anew with each.
        labels: chance that each is accepted if those before it were.
        signals: for each kind of signal, what a rule reads after each candidate (`None`: there is nothing to read).
    """

    text: int
    labels: list[float]
    signals: dict[str, list[float | None]]


@dataclass
class Outcome:
    """What a rule does: discarded candidates and target passes, each per generated token; candidates a round."""

    setting: float
    discard_rate: float
    verification_rate: float
    mean_length: float


def stop_length(rule: StoppingRule, signals: Sequence[float | None]) -> int:
    """How many candidates `draft_chain` would have submitted under `rule`."""
    rule.begin_round()
    limit = min(len(signals), rule.max_tokens)
    for length in range(1, limit):
        if rule.stops(signals[length - 1]) and length >= rule.min_tokens:
            return length
    return limit


def outcome(
    make_rule: Callable[[], StoppingRule], chains: Iterable[RecordedChain], signal: str, setting: float
) -> Outcome:
    """Expected discard and verification rate of a rule over the chains, each of them one round.

    Exact given the drafted tokens: candidate k is accepted with the product of the labels up to k, and a round
    generates its accepted candidates and one more token (also where the text would have ended). Rounds begin at places
    spread evenly over the text, where in generation they begin a little more often where candidates are rejected.

    Args:
        make_rule: called for each text.
        signal: which of the chains' signals the rule reads.
        setting: the threshold or length, for the record.
    """
    drafted, accepted, rounds, text = 0, 0.0, 0, None
    for chain in chains:
        if chain.text != text:
            rule, text = make_rule(), chain.text
        length = stop_length(rule, chain.signals[signal])
        expected = expected_accepted(chain.labels[:length])
        rule.update(length, expected)  # type: ignore[arg-type]  # the mean of a whole number
        drafted, accepted, rounds = drafted + length, accepted + expected, rounds + 1
    generated = accepted + rounds
    return Outcome(setting, (drafted - accepted) / generated, rounds / generated, drafted / rounds)


def curve(
    maker: Callable[[float], Callable[[], StoppingRule]],
    settings: Iterable[float],
    chains: Collection[RecordedChain],
    signal: str,
) -> list[Outcome]:
    """`outcome` of a rule over its thresholds (or lengths), `maker` of which gives what makes the rule for a text."""
    return [outcome(maker(setting), chains, signal, setting) for setting in settings]


def expected_accepted(labels: Sequence[float]) -> float:
    """Σ_k Π_{i <= k} label_i."""
    survival, total = 1.0, 0.0
    for label in labels:
        survival *= label
        total += survival
    return total


def discards_at(points: Sequence[Outcome], verification_rate: float) -> float | None:
    """Discard rate of a curve at a verification rate, interpolated; `None` outside of what the curve covers.

    `points` are in the order of their thresholds. Where the curve passes the rate more than once, the least counts.
    """
    found = []
    for pair in zip(points, points[1:], strict=False):
        low, high = sorted(pair, key=lambda point: (point.verification_rate, point.discard_rate))
        if low.verification_rate <= verification_rate <= high.verification_rate:
            width = high.verification_rate - low.verification_rate
            share = (verification_rate - low.verification_rate) / width if width else 0.0
            found.append(low.discard_rate + share * (high.discard_rate - low.discard_rate))
    return min(found, default=None)
