"""The rules of others that replays compare with, each against its formula."""

import math
from collections.abc import Callable

import pytest
import torch
from support.plans import tell
from support.stopping_rules import decides, distribution_of, make_step

from hf_specdecpp.benchmark.replay.chains import BASELINES, AdaEDL
from hf_specdecpp.estimation.estimators import DraftStep

STEPS = [make_step(seed) for seed in range(50)]


def entropy_of(step: DraftStep) -> float:
    return -sum(q * math.log(q) for q in distribution_of(step))


# Each rule's bounds, and when it stops after a candidate.
FORMULAS: dict[str, tuple[tuple[float, ...], Callable[[DraftStep, float], bool]]] = {
    "confidence": ((0.05, 0.2, 0.5), lambda step, bound: distribution_of(step)[int(step.token)] < bound),
    "svip": ((0.3, 0.4), lambda step, bound: math.sqrt(0.15 * entropy_of(step)) > bound),
    "adaedl": ((0.4, 0.6), lambda step, bound: 1.0 - math.sqrt(0.2 * entropy_of(step)) < bound),
}


@pytest.mark.parametrize("name", BASELINES)
def test_a_rule_stops_by_its_formula(name: str) -> None:
    bounds, stops = FORMULAS[name]
    for bound in bounds:
        answers = [decides(BASELINES[name](bound, 20), step) for step in STEPS]
        assert answers == [stops(step, bound) for step in STEPS]
        assert {True, False} == set(answers)


def test_a_certain_q_has_no_entropy() -> None:
    certain = DraftStep(0, torch.tensor([0.0, -math.inf]), torch.zeros(2), lambda each: each, token=torch.tensor(0))
    for rule in BASELINES.values():
        assert not decides(rule(0.4, 20), certain)


def test_adaedl_follows_the_acceptance_rate() -> None:
    rule, bound, rate = AdaEDL(0.4, 20), 0.4, 0.9
    moves = set()
    for drafted, accepted in [(4, 4), (4, 4), (5, 0), (3, 1), (1, 1), (2, 2), (2, 2), (2, 2), (2, 2)]:
        tell(rule, drafted, accepted)
        rate = 0.5 * rate + 0.5 * accepted / drafted
        wanted = bound + 0.01 if rate < 0.9 else bound - 0.01
        before, bound = bound, 0.9 * bound + 0.1 * wanted
        moves.add(bound > before)
        assert rule.bound == pytest.approx(bound)
    assert moves == {True, False}


def test_adaedl_keeps_its_bound_a_probability_and_ignores_empty_rounds() -> None:
    for start, accepted in ((0.0, 1), (1.0, 0)):
        rule = AdaEDL(start, 20)
        tell(rule, 0, 0)
        assert rule.bound == start
        for _ in range(5):
            tell(rule, 1, accepted)
            assert rule.bound == start
