"""Stopping rules: each against its formula, and the SpecDec++ round against a transcription of the authors' loop."""

from typing import Any

import pytest
import torch
from support.enumeration.exact_distribution import Replay, Tokens, exact_distribution
from support.enumeration.toy_rounds import Models, ToyRound, draft_chain, make_estimator
from torch import Tensor

from hf_specdecpp import AcceptanceHead, SpeculationConfig
from hf_specdecpp.drafting.chain import Step, StoppingRule
from hf_specdecpp.estimation.estimators import DraftProbability, DraftStep
from hf_specdecpp.generation.setup import make_rule

VOCAB = 3


def rule_for(min_tokens: int = 1, **knobs: Any) -> StoppingRule:
    return make_rule(SpeculationConfig(**{"rule": "threshold", **knobs}), DraftProbability(), min_tokens=min_tokens)


@pytest.mark.parametrize("signals", [[0.5], [1.0, 0.5], [None, 0.5]])
def test_threshold_stops_above_h_not_at_h(signals: list[float | None]) -> None:
    rule = rule_for(rule="threshold", threshold=0.5)
    assert not any(rule.stops(signal) for signal in signals)  # 1 - 0.5 is exactly h
    assert rule.stops(1.0 - 1e-12)


class Told:
    """Says what it is told of each candidate before that is drawn."""

    inputs = "path"

    def __init__(self, estimates: list[float]) -> None:
        self.estimates = estimates

    def estimate(self, step: DraftStep) -> Tensor:
        assert step.token is None, "asked before the draw"
        return torch.tensor(self.estimates[step.index], dtype=torch.float64)


@pytest.mark.parametrize(("h", "least", "expected"), [(0.0, 1, 1), (0.0, 3, 3), (0.5, 1, 2), (0.55, 1, 3), (1.0, 1, 4)])
def test_a_threshold_is_asked_before_each_draw(h: float, least: int, expected: int) -> None:
    """All candidates stand with 0.9, 0.63, 0.504 and 0.4032: at 0.5 the third is still drawn, as 1 - 0.504 < 0.5."""
    estimator = Told([0.9, 0.7, 0.8 if h != 0.5 else 0.7, 0.8])
    config = SpeculationConfig(rule="threshold", threshold=h)
    rule = make_rule(config, estimator, min_tokens=least)
    draws = Replay([])
    chain = draft_chain(steps_of(Models("plain", VOCAB, seed=0)), rule, draws, max_tokens=4)
    assert (len(chain), draws.made) == (expected, expected), "what was drawn is submitted"


def steps_of(models: Models) -> Step:
    """Those of a draft. Each has a row of `models.rows`."""
    return ToyRound(models, "fixed").stepper(())


def authors_round(models: Models, head: Any, randomness: Replay, h: float, bounds: tuple[int, int]) -> Tokens:
    """The loop of hf_generation.py in SpecDec_pp, from the pseudo-code in reference/specdecpp.md, section 1.5."""
    least, most = bounds
    drafted: list[int] = []
    steps, cumulative = 0, 1.0
    while True:
        _, scores, last_hidden = models.at(tuple(drafted))  # of the last input position: the previous candidate
        token = int(randomness.categorical(scores.softmax(dim=-1)))
        drafted.append(token)
        if token in models.eos:
            break
        steps += 1
        accept = 1.0 if steps == 1 else float(two_logits(head, last_hidden).softmax(dim=-1)[1])
        cumulative *= accept
        stop = (1 - cumulative) > h
        if steps >= most:
            stop = True
        elif steps < least:
            stop = False
        if stop:
            break
    return tuple(drafted)


def two_logits(head: Any, x: Tensor) -> Tensor:
    for index in range(head.num_blocks):
        x = x + torch.nn.functional.silu(head.blocks[0 if head.tied else index].linear(x))
    return head.output(x)


@pytest.mark.daily(
    "0.0-bounds0-plain", "0.0-bounds2-end of sequence", "0.0-bounds5-plain", "0.3-bounds1-end of sequence",
    "0.3-bounds4-plain", "0.5-bounds0-end of sequence", "0.5-bounds3-plain", "0.5-bounds5-end of sequence",
    "0.7-bounds2-plain", "0.7-bounds4-end of sequence", "1.0-bounds1-plain", "1.0-bounds3-end of sequence",
)  # fmt: skip
@pytest.mark.parametrize("scenario", ["plain", "end of sequence"])
@pytest.mark.parametrize("bounds", [(1, 4), (2, 4), (3, 4), (4, 4), (1, 1), (2, 2)])
@pytest.mark.parametrize("h", [0.0, 0.3, 0.5, 0.7, 1.0])
@torch.no_grad()
def test_rounds_are_the_authors(h: float, bounds: tuple[int, int], scenario: str) -> None:
    for seed in range(3):
        models = Models(scenario, VOCAB, seed)
        head = make_estimator("threshold/after, tied" if seed else "threshold/after, untied", seed)
        assert isinstance(head, AcceptanceHead)
        config = SpeculationConfig(rule="threshold", threshold=h, max_tokens=bounds[1])

        def ours(randomness: Replay, models: Models = models, config: Any = config, head: Any = head) -> Tokens:
            rule = make_rule(config, head, min_tokens=bounds[0])
            return tuple(draft_chain(steps_of(models), rule, randomness, 10, models.eos).candidates)

        def theirs(randomness: Replay, models: Models = models, head: Any = head) -> Tokens:
            return authors_round(models, head, randomness, h, bounds)

        assert exact_distribution(ours) == exact_distribution(theirs)


@pytest.mark.parametrize(("room", "length"), [(0, 0), (1, 1), (3, 3), (9, 5)])
def test_room_and_the_rules_own_limit_bound_a_round(room: int, length: int) -> None:
    models = Models("plain", VOCAB, 0)
    chain = draft_chain(steps_of(models), rule_for(rule="fixed", num_tokens=5), Replay([]), max_tokens=room)
    assert len(chain.candidates) == len(chain.drawn_from) == len(models.rows) == length
