"""The exact distribution of whole rounds (draft, stop, verify) for every stopping rule; and mutants that must fail.

A right round is within rounding of p and a wrong one off by more than a thousandth, without sampling: nothing here can
fail by chance. Several seeds, because some pairs of p and q cannot tell a mutant from the truth."""

from typing import get_args

import pytest
import torch
from support.enumeration.exact_distribution import (
    Replay,
    Tokens,
    exact_distribution,
    is_caught,
    largest_error,
    worst_error,
)
from support.enumeration.plans import tell
from support.enumeration.toy_rounds import (
    BOUNDS,
    RULES,
    SCENARIOS,
    VERIFIERS,
    Models,
    OneUniform,
    ToyRound,
    draft_chain,
)
from torch import Tensor

from hf_specdecpp.config.speculation import Rule
from hf_specdecpp.drafting.chain import StoppingRule, Threshold
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees import verification
from hf_specdecpp.trees.tree import Chain

# All probabilities are float64 here (heads answer in float32, but they only decide when to stop).
TOLERANCE, SEEDS = 1e-12, range(10)


def test_every_rule_is_covered() -> None:
    assert {name.split("/")[0] for name in RULES} == set(get_args(Rule))


@pytest.mark.daily(
    "False-block-fixed-plain", "False-block-threshold/draft probability-nothing to propose",
    "False-block-threshold/after, untied-draft vocabulary", "False-block-throughput/draft probability-end of sequence",
    "False-block-throughput/before-p almost q", "False-token-threshold/draft probability-p equals q",
    "False-token-threshold/after, untied-one-hot rows", "False-token-throughput/draft probability-disjoint supports",
    "False-token-throughput/before-top-k", "False-block, at once-threshold/draft probability-temperature",
    "False-block, at once-threshold/after, untied-plain", "False-block, at once-threshold/before-nothing to propose",
    "False-block, at once-throughput/after, untied-draft vocabulary", "False-token, at once-fixed-end of sequence",
    "False-token, at once-threshold/after, tied-p almost q", "False-token, at once-threshold/before-p equals q",
    "False-token, at once-throughput/after, untied-one-hot rows", "False-block-threshold/path-plain",
    "False-token-throughput/path-temperature", "False-block, at once-threshold/path-end of sequence",
)  # fmt: skip
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_round_emits_exactly_p(verifier: str, rule: str, scenario: str, thorough: bool) -> None:
    vocab = 4 if scenario == "disjoint supports" else 3
    # `test_block_verification.py` compares those at once with the others.
    quick = SEEDS[:2] if verifier in ("block", "token") else SEEDS[:1]
    for seed in SEEDS if thorough else quick:
        models = Models(scenario, vocab, seed)
        distribution = exact_distribution(ToyRound(models, rule, BOUNDS[seed % len(BOUNDS)], seed, verifier))
        assert sum(distribution.values()) == pytest.approx(1.0, abs=TOLERANCE)
        error = worst_error(distribution, models.p, vocab)
        assert error < TOLERANCE, f"seed {seed}: off by {error}"


@pytest.mark.daily("fixed", "throughput/draft probability")
@pytest.mark.parametrize("rule", RULES)
def test_a_round_emits_exactly_p_with_four_tokens(rule: str) -> None:
    assert largest_error([ToyRound(Models("plain", 4, seed=0), rule)]) < TOLERANCE


@pytest.mark.daily("fixed", "throughput/draft probability")
@pytest.mark.parametrize("rule", RULES)
def test_rounds_of_several_lengths_occur(rule: str) -> None:
    """Otherwise the tests above would say little about stopping."""
    lengths = set()
    for seed in SEEDS:
        one_round = ToyRound(Models("plain", 3, seed), rule, (1, 3), seed)
        exact_distribution(one_round)
        lengths |= one_round.lengths
    if rule == "fixed":
        assert lengths == {3}
    elif "after" in rule:
        assert lengths == {2, 3}, "a head that judges afterwards always lets one more candidate through"
    else:
        assert lengths == {1, 2, 3}


@pytest.mark.daily("block-threshold/draft probability", takes=3)
@pytest.mark.parametrize("rule", [
    "threshold/draft probability",
    *(pytest.param(rule, marks=pytest.mark.slow) for rule in ["threshold/after, untied", "threshold/before"]),
])  # fmt: skip
@pytest.mark.parametrize("verifier", ["block", "token"])
def test_two_rounds_emit_exactly_p(verifier: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second round continues the text of the first, with the same rule, which has learnt how the first went."""
    monkeypatch.setattr("hf_specdecpp.estimation.estimators.FIRST_FITS", (1,))
    lines = set()
    for seed in range(2):
        models = Models("plain", 3, seed)
        toy = ToyRound(models, rule, (1, 2), seed, verifier)

        def two_rounds(randomness: Replay, toy: ToyRound = toy) -> Tokens:
            stopping = toy.new_rule()
            emitted = toy.run(randomness, stopping)
            tell(stopping, toy.drafted, toy.accepted)
            assert isinstance(stopping, Threshold)
            assert stopping.rates is not None
            lines.add(tuple(stopping.rates.line))
            return toy.run(randomness, stopping, emitted)

        assert worst_error(exact_distribution(two_rounds), models.p, 3) < TOLERANCE
    assert len(lines) > 1, "the calibration must depend on how many candidates were accepted"


# Mutants. Each has one mistake that real implementations have made. ---------------------------------------------------


class Withdraws(ToyRound):
    """Takes the last candidate back because the draft is not confident of it."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix)
        confidence = float(chain.drawn_from[-1].softmax(dim=-1)[chain.candidates[-1]])
        return Chain(chain.candidates[:-1], chain.drawn_from[:-1]) if confidence < 0.3 else chain


class DropsWhatItHasSeen(ToyRound):
    """Takes the candidate back at which the rule stops, as if its estimate had been known before the draw."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix)
        assert isinstance(rule, Threshold)
        count = len(chain) - (len(chain) > 1 and 1.0 - rule.chance > rule.h)
        return Chain(chain.candidates[:count], chain.drawn_from[:count])


class ReportsAnotherTemperature(ToyRound):
    """Draws at temperature 0.9 and reports q at temperature 1."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        honest = self.stepper(prefix)

        def step(candidates: list[Tensor]):
            draft = honest(candidates)
            assert draft is not None  # not in this scenario
            draft.scores = draft.scores / 0.9
            return draft

        chain = draft_chain(step, rule, randomness, max_tokens=3)
        return Chain(chain.candidates, [scores * 0.9 for scores in chain.drawn_from])


class DraftsGreedily(ToyRound):
    """Takes the likeliest token and reports the softmax as q."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        return draft_chain(self.stepper(prefix), rule, None, max_tokens=3)


class AcceptsEverything(ToyRound):
    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens):
        return len(candidates), int(randomness.categorical(p[-1]))


class ReusesTheUniform(ToyRound):
    """Makes every test of the round with the same random number."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens):
        return self.verifier(candidates, p, q, OneUniform(randomness))


class DrawsTheBonusFromQ(ToyRound):
    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens):
        bonus = self.models.q((*prefix, *candidates))
        return self.verifier(candidates, torch.cat((p[:-1], bonus[None])), q, randomness)


class ResamplesFromP(ToyRound):
    """After a rejection draws from p instead of the residual."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "leftovers", lambda carries, p_rows, q_rows: p_rows)
            return self.verifier(candidates, p, q, randomness)


class SubtractsTheFirstQ(ToyRound):
    """Computes the residual with the q of the round's first position."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens):
        leftovers = verification.leftovers
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                verification, "leftovers", lambda carries, p, rows: leftovers(carries, p, q[:1].expand_as(rows))
            )
            return self.verifier(candidates, p, q, randomness)


MUTANTS = [
    Withdraws, ReportsAnotherTemperature, DraftsGreedily, AcceptsEverything, ReusesTheUniform, DrawsTheBonusFromQ,
    ResamplesFromP, SubtractsTheFirstQ,
]  # fmt: skip


@pytest.mark.daily(
    "Withdraws-block-fixed", "ReportsAnotherTemperature-block-threshold/draft probability",
    "DraftsGreedily-token-fixed", "AcceptsEverything-token-threshold/draft probability",
    "DrawsTheBonusFromQ-block-fixed", "ResamplesFromP-block-threshold/draft probability",
    "SubtractsTheFirstQ-token-fixed",
)  # fmt: skip
@pytest.mark.parametrize("rule", ["fixed", "threshold/draft probability"])
@pytest.mark.parametrize(("mutant", "verifier"), [(m, v) for m in MUTANTS for v in ("block", "token")])
def test_mutants_are_caught(mutant: type[ToyRound], verifier: str, rule: str) -> None:
    assert is_caught(mutant(Models("plain", 3, seed), rule, (1, 3), seed, verifier) for seed in SEEDS)


@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("rule", ["threshold/draft probability", "threshold/before"])
def test_a_candidate_that_its_estimate_has_seen_is_not_dropped(rule: str, verifier: str) -> None:
    assert is_caught(DropsWhatItHasSeen(Models("plain", 3, seed), rule, (1, 3), seed, verifier) for seed in SEEDS)


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_a_candidate_that_its_estimate_has_not_seen_may_stay_undrawn(verifier: str) -> None:
    """As for the mutant above, but with estimates of what came before: this is the product code."""
    assert not is_caught(
        ToyRound(Models("plain", 3, seed), "threshold/path", (1, 3), seed, verifier) for seed in SEEDS[:2]
    )
