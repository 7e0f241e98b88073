"""Expected discards of stopping rules against simulated coins."""

import random

import pytest

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.stopping import FixedLength, StoppingRule
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.training.evaluation import Outcome, RecordedChain, curve, discards_at, outcome, stop_length


def recorded(seed: int, count: int = 30) -> list[RecordedChain]:
    chance = random.Random(seed)
    chains = []
    for _ in range(count):
        labels = [chance.random() for _ in range(chance.randint(1, 20))]
        signals: list[float | None] = [min(max(y + chance.gauss(0, 0.2), 0.01), 0.99) for y in labels]
        chains.append(RecordedChain(labels, {"q": signals}))
    return chains


def threshold(h: float) -> StoppingRule:
    return make_rule(SpeculationConfig(rule="threshold", threshold=h), DraftProbability())


def simulated(rule: StoppingRule, chains: list[RecordedChain], coins: int) -> tuple[float, float]:
    chance = random.Random(0)
    discarded = generated = passes = 0
    for chain in chains:
        length = stop_length(rule, chain.signals["q"])
        for _ in range(coins):
            accepted = 0
            while accepted < length and chance.random() < chain.labels[accepted]:
                accepted += 1
            discarded, generated, passes = discarded + length - accepted, generated + accepted + 1, passes + 1
    return discarded / generated, passes / generated


@pytest.mark.parametrize("rule", [FixedLength(4), threshold(0.6)])
def test_expected_rates_are_what_coins_give(rule: StoppingRule) -> None:
    chains = recorded(0)
    exact = outcome(rule, chains, "q", 0.0)
    discard_rate, verification_rate = simulated(rule, chains, coins=3000)
    assert exact.discard_rate == pytest.approx(discard_rate, rel=0.02)  # about eight standard deviations
    assert exact.verification_rate == pytest.approx(verification_rate, rel=0.02)


@pytest.mark.parametrize("h", [0.2, 0.6, 0.9])
def test_rates_obey_the_papers_identity(h: float) -> None:
    """Every round yields its accepted candidates and one more token: discards = (K + 1) x verification rate - 1."""
    point = outcome(threshold(h), recorded(1), "q", h)
    assert point.discard_rate == pytest.approx((point.mean_length + 1) * point.verification_rate - 1)


def test_a_threshold_counts_the_candidate_that_stops() -> None:
    assert stop_length(threshold(0.5), [0.9, 0.9, 0.5, 0.9]) == 3
    assert stop_length(threshold(0.5), [None, 0.9, 0.5, 0.9]) == 3
    assert stop_length(FixedLength(2), [0.9] * 5) == 2
    assert stop_length(FixedLength(9), [0.9] * 5) == 5
    config = SpeculationConfig(rule="threshold", threshold=0.1)
    assert stop_length(make_rule(config, DraftProbability(), min_tokens=3), [0.5] * 5) == 3


def test_longer_rounds_verify_less_and_discard_more() -> None:
    points = curve(lambda k: FixedLength(int(k)), range(1, 8), recorded(3), "q")
    assert [point.verification_rate for point in points] == sorted((p.verification_rate for p in points), reverse=True)
    assert [point.discard_rate for point in points] == sorted(point.discard_rate for point in points)


def test_discards_between_two_points_of_a_curve() -> None:
    points = [Outcome(1, 0.2, 0.6, 1), Outcome(2, 0.6, 0.4, 2)]
    assert discards_at(points, 0.5) == pytest.approx(0.4)
    assert discards_at(points, 0.6) == pytest.approx(0.2)
    assert discards_at(points, 0.7) is None
