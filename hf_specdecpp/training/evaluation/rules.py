"""How good is a stopping rule? Exact expectations, no sampling.

Labels are acceptance probabilities, as in `estimation/metrics.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from hf_specdecpp.drafting.stopping import StoppingRule


@dataclass
class RecordedChain:
    """Candidates of one drafted chain, from its first one to well past where a rule would stop.

    Attributes:
        labels: chance that each is accepted if those before it were.
        signals: for each kind of signal, what a rule reads after each candidate (`None`: there is nothing to read).
    """

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


def outcome(rule: StoppingRule, chains: Iterable[RecordedChain], signal: str, setting: float) -> Outcome:
    """Expected discard and verification rate of a rule over the chains, each of them one round.

    Exact given the drafted tokens: candidate k is accepted with the product of the labels up to k, and a round
    generates its accepted candidates and one more token (also where the text would have ended). Rounds begin at places
    spread evenly over the text, where in generation they begin a little more often where candidates are rejected.

    Args:
        rule: one that learns nothing of its rounds.
        signal: which of the chains' signals the rule reads.
        setting: the threshold or length, for the record.
    """
    drafted, accepted, rounds = 0, 0.0, 0
    for chain in chains:
        length = stop_length(rule, chain.signals[signal])
        drafted, accepted, rounds = drafted + length, accepted + expected_accepted(chain.labels[:length]), rounds + 1
    generated = accepted + rounds
    return Outcome(setting, (drafted - accepted) / generated, rounds / generated, drafted / rounds)


def curve(
    maker: Callable[[float], StoppingRule],
    settings: Iterable[float],
    chains: Collection[RecordedChain],
    signal: str,
) -> list[Outcome]:
    """`outcome` of a rule over its thresholds (or lengths), of each of which `maker` makes it."""
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
