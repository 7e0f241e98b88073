"""Block verification: mutants of its formulas that must fail, how much more it accepts, and the at-once version.

That whole rounds with it emit exactly p under every rule is in `test_chain_rounds.py`. Everything here is enumerated,
so nothing can fail by chance."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.enumeration.exact_distribution import (
    Answering,
    Probs,
    Tokens,
    accepted_in,
    exact_distribution,
    is_caught,
    largest_error,
)
from support.enumeration.readable_verification import verify_block, verify_chain
from support.enumeration.toy_rounds import RULES, SCENARIOS, VERIFIERS, Models, ToyRound
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness, TorchRandomness
from hf_specdecpp.trees.verification import as_tests, verify_sampled

TOLERANCE = 1e-12


class Block(ToyRound):
    """Block verification written anew, with parts that a mutant gets wrong."""

    carries = True  # c_i = min(1, c_{i-1} r_i), otherwise min(1, r_i)
    last_is_special = True  # the last test is c_k, otherwise h_k like the others
    longest = True  # the longest candidate that passes, otherwise all before the first that fails
    carries_residual = True  # norm((c_i p - q)+), otherwise norm((p - q)+)

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens):
        count, c = len(candidates), [1.0]
        for i, token in enumerate(candidates):
            c.append(min(1.0, (c[-1] if self.carries else 1.0) * float(p[i, token] / q[i, token])))
        after = torch.cat((q, self.models.q((*prefix, *candidates))[None]))
        left = [(c[i] * p[i] - after[i]).clamp_min(0.0) for i in range(count + 1)]
        tests = [1.0 if c[i] == 1.0 else float(left[i].sum() / (left[i].sum() + 1.0 - c[i])) for i in range(count + 1)]
        if self.last_is_special:
            tests[count] = c[count]
        accepted = 0
        if self.longest:
            accepted = next((i for i in range(count, 0, -1) if randomness.bernoulli(tests[i])), 0)
        else:
            while accepted < count and randomness.bernoulli(tests[accepted + 1]):
                accepted += 1
        if accepted == count:
            return accepted, int(randomness.categorical(p[count]))
        rest = left[accepted] if self.carries_residual else (p[accepted] - q[accepted]).clamp_min(0.0)
        return accepted, int(randomness.categorical(rest if float(rest.sum()) > 0.0 else p[accepted]))


class ResidualOfTheTokenRule(Block):
    carries_residual = False


class ForgetsToCarry(Block):
    carries = False


class LastLikeTheOthers(Block):
    last_is_special = False


class FromTheLeft(Block):
    longest = False


def rounds_of(program: type[ToyRound], rule: str, count: int = 10) -> Iterator[ToyRound]:
    return (program(Models("plain", 3, seed), rule, (1, 3), seed) for seed in range(count))


@pytest.mark.parametrize("rule", ["fixed", "threshold/draft probability"])
def test_the_formulas_are_right_with_all_parts(rule: str) -> None:
    """So that what catches a mutant is the part that it lacks."""
    assert largest_error(rounds_of(Block, rule, 3)) < TOLERANCE


@pytest.mark.daily("ResidualOfTheTokenRule-fixed", "ForgetsToCarry-threshold/draft probability", "FromTheLeft-fixed")
@pytest.mark.parametrize("rule", ["fixed", "threshold/draft probability"])
@pytest.mark.parametrize("mutant", [ResidualOfTheTokenRule, ForgetsToCarry, LastLikeTheOthers, FromTheLeft])
def test_mutants_are_caught(mutant: type[ToyRound], rule: str) -> None:
    assert is_caught(rounds_of(mutant, rule))


@pytest.mark.daily("fixed-False")
@pytest.mark.parametrize(("rule", "thorough"), [
    *((rule, False) for rule in RULES if "throughput/" not in rule),
    *(pytest.param(rule, True, marks=pytest.mark.slow) for rule in RULES),
])  # fmt: skip
def test_a_block_round_accepts_no_fewer(rule: str, thorough: bool) -> None:
    block, token = [], []
    for scenario in SCENARIOS:
        for seed in range(6 if thorough else 4 if scenario == "plain" else 1):
            vocab = 4 if scenario == "disjoint supports" else 3
            counts = [
                accepted_in(ToyRound(Models(scenario, vocab, seed), rule, (1, 3 if thorough else 2), seed, verifier))
                for verifier in ("block", "token")
            ]
            assert counts[0] > counts[1] - TOLERANCE
            if scenario == "plain":
                block.append(counts[0])
                token.append(counts[1])
    assert sum(block) > sum(token) + 0.01


def test_the_readable_loops_agree() -> None:
    def outcomes(verify: Callable[..., tuple[int, int]], models: Models, candidates: list[int]) -> Probs:
        p = torch.stack([models.p(tuple(candidates[:i])) for i in range(len(candidates) + 1)])
        q = torch.stack([models.q(tuple(candidates[:i])) for i in range(len(candidates))]) if candidates else p[:0]
        return exact_distribution(lambda replay: verify(candidates, p, q, replay))

    for seed in range(4):
        for candidates in ([], [1], [0, 2], [2, 1, 0, 0]):
            models = Models("plain", 3, seed)
            for name, loop in {"block": verify_block, "token": verify_chain}.items():
                expected = outcomes(loop, models, candidates)
                for verifier in (VERIFIERS[name], VERIFIERS[f"{name}, at once"]):
                    assert outcomes(verifier, models, candidates) == pytest.approx(expected, abs=TOLERANCE)


def test_a_block_of_which_nothing_is_left_falls_back_to_p() -> None:
    """Rounding can reject a candidate although p equals q, which leaves nothing to draw from."""
    rejecting, q = Answering([False, True]), torch.tensor([[0.8, 0.2], [0.8, 0.2]], dtype=torch.float64)
    verify_sampled([1], q, q[:1], rejecting, "block")
    assert torch.equal(rejecting.drawn_from[0], q[0])


@pytest.mark.takes(2)
def test_outcomes_are_drawn_by_their_chances() -> None:
    """20,000 draws: four standard deviations are 0.014, which chance exceeds once in 2,500 such tests."""
    torch.manual_seed(0)
    weights = torch.tensor([0.2, 0.0, 0.5, 0.3], dtype=torch.float64)
    rows = torch.tensor([[0.1, 0.9, 0.0], [1.0, 0.0, 0.0], [0.3, 0.3, 0.4], [0.0, 0.0, 2.0]])
    counts, randomness = torch.zeros(4, 3), TorchRandomness()
    for _ in range(20_000):
        counts[randomness.outcome(as_tests(weights), rows)] += 1.0
    expected = weights[:, None] * rows / rows.sum(-1, keepdim=True)
    assert float((counts / counts.sum() - expected).abs().max()) < 0.014
    assert float(counts[expected == 0.0].sum()) == 0.0


def test_draws_have_numbers_of_their_own() -> None:
    """Made ahead, but not used twice: 24 equal ones of 1,000 ids are hardly ever the same."""
    torch.manual_seed(0)
    randomness, weights = TorchRandomness(), torch.ones(1, 1000)
    assert len({randomness.outcome(torch.ones(1), weights)[1] for _ in range(24)}) > 20
