"""Traversal verification of trees: mutants of its formulas that must fail; it accepts no fewer than Algorithm 3.

That whole rounds with it emit exactly p for every growth and budget is in `test_tree_rounds.py`. Everything here is
enumerated, so nothing can fail by chance."""

from collections.abc import Callable, Iterator

import pytest
import torch
from support.enumeration import readable_verification as readable
from support.enumeration.exact_distribution import (
    Probs,
    Replay,
    Tokens,
    accepted_in,
    exact_distribution,
    is_caught,
    largest_error,
)
from support.enumeration.toy_rounds import SCENARIOS, Models
from support.enumeration.toy_trees import ToyTree

from hf_specdecpp.sampling.randomness import Randomness, TorchRandomness
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import Verification, verify_tree

VERIFICATIONS: tuple[Verification, ...] = ("block", "token")
TOLERANCE, ALGORITHMS = 1e-12, ["dyspec", "dyspec-exact", "static", "throughput"]


class Traversal(ToyTree):
    """Written anew, recursively, with parts that a mutant gets wrong."""

    carries = True  # a child is owed min(1, a left(y) / D(y)), otherwise min(1, left(y) / D(y))
    shrinks = True  # a rejected child leaves a <- s / (s + 1 - a), otherwise a as it is
    renormalises = True  # D loses its drawn tokens
    owes_the_rest = True  # the token after a node is drawn from what its children left, otherwise from p

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        found = self.below(tree, 0, 1.0, [], randomness, prefix)
        assert found is not None
        return found

    def below(
        self, tree: DraftTree, node: int, a: float, path: list[int], randomness: Randomness, prefix: Tokens
    ) -> tuple[list[int], int] | None:
        p = left = self.p(tree, node, prefix)
        q = tree.q(node) if tree.children[node] else p
        for child in tree.children[node]:
            y = tree.tokens[child]
            owed = min(1.0, (a if self.carries else 1.0) * float(left[y] / q[y]))
            found = self.below(tree, child, owed, [*path, child], randomness, prefix)
            if found is not None:
                return found
            rest = (a * left - q).clamp_min(0.0)
            s = float(rest.sum())
            left = rest / s if s > 0.0 else p
            if self.shrinks and s + 1.0 - a > 0.0:
                a = s / (s + 1.0 - a)
            if self.renormalises:
                q = q.index_fill(0, torch.tensor(y), 0.0)
                q = q / q.sum()
        if node == 0 or randomness.bernoulli(a):
            return path, int(randomness.categorical(left if self.owes_the_rest else p))
        return None


class ForgetsToCarry(Traversal):
    carries = False


class KeepsItsChance(Traversal):
    shrinks = False


class StaleQ(Traversal):
    renormalises = False


class DrawsFromP(Traversal):
    owes_the_rest = False


def rounds_of(program: type[ToyTree], algorithm: str, count: int = 6) -> Iterator[ToyTree]:
    return (program(Models("plain", 3, s), algorithm, "draft probability", budget=5, seed=s) for s in range(count))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_formulas_are_right_with_all_parts(algorithm: str) -> None:
    """So that what catches a mutant is the part that it lacks."""
    assert largest_error(rounds_of(Traversal, algorithm, 2)) < TOLERANCE


@pytest.mark.daily("ForgetsToCarry-dyspec", "KeepsItsChance-dyspec-exact", "StaleQ-static", "DrawsFromP-throughput")
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("mutant", [ForgetsToCarry, KeepsItsChance, StaleQ, DrawsFromP])
def test_mutants_are_caught(mutant: type[ToyTree], algorithm: str) -> None:
    assert is_caught(rounds_of(mutant, algorithm))


@pytest.mark.daily("dyspec", takes=3)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_round_accepts_no_fewer_than_with_algorithm_3(algorithm: str) -> None:
    more = 0.0
    for scenario in SCENARIOS:
        vocab = 4 if scenario == "disjoint supports" else 3
        for budget in (2, 3) if vocab == 4 else (3, 4):
            models = Models(scenario, vocab, budget)
            block, token = (
                accepted_in(ToyTree(models, algorithm, "draft probability", budget, verifier=verifier))
                for verifier in VERIFICATIONS
            )
            assert block > token - TOLERANCE
            more += block - token
    assert more > 0.01


def some_tree(models: Models, parents: list[int], tokens: list[int]) -> DraftTree:
    tree = DraftTree(-1)
    for parent, token in zip(parents, tokens, strict=True):
        tree.add(parent, token)
    for node in range(len(tree) + 1):
        tree.scores[node] = models.at(tuple(tree.path(node)))[1]
    return tree


TREES = [([], []), ([0], [1]), ([0, 0, 1, 1, 3], [1, 0, 2, 0, 1]), ([0, 1, 0, 0, 2, 3], [0, 1, 2, 1, 2, 0])]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("scenario", ["plain", "p equals q"])
@pytest.mark.parametrize(("parents", "tokens"), TREES)
def test_it_decides_as_the_readable_loops_do(parents: list[int], tokens: list[int], scenario: str, seed: int) -> None:
    models = Models(scenario, 3, seed)
    tree = some_tree(models, parents, tokens)
    p = torch.stack([models.p(tuple(tree.path(node))) for node in range(len(tree) + 1)])

    def outcomes(verify: Callable[[Replay], tuple[list[int], int]]) -> Probs:
        def program(replay: Replay) -> Tokens:
            path, token = verify(replay)
            return (*path, -1, token)

        return {each: weight for each, weight in exact_distribution(program).items() if weight > TOLERANCE}

    found = outcomes(lambda replay: verify_tree(tree, p.__getitem__, replay, "block"))
    expected = outcomes(lambda replay: readable.verify_tree_block(tree, p.__getitem__, replay))
    assert found == pytest.approx(expected, abs=TOLERANCE)
    found = outcomes(lambda replay: verify_tree(tree, p.__getitem__, replay, "token"))
    expected = outcomes(lambda replay: readable.verify_tree(tree, p.__getitem__, replay))
    assert found == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(4))
def test_a_chain_is_verified_as_a_block(seed: int) -> None:
    models, tokens = Models("plain", 3, seed), [1, 0, 2]
    tree = some_tree(models, [0, 1, 2], tokens)
    p = torch.stack([models.p(tuple(tokens[:i])) for i in range(4)])
    q = torch.stack([models.q(tuple(tokens[:i])) for i in range(3)])

    def as_tree(replay: Replay) -> Tokens:
        path, token = verify_tree(tree, p.__getitem__, replay, "block")
        return len(path), token

    expected = exact_distribution(lambda replay: readable.verify_block(tokens, p, q, replay))
    assert exact_distribution(as_tree) == pytest.approx(expected, abs=TOLERANCE)


def test_a_deep_tree_needs_no_recursion() -> None:
    tree, q = DraftTree(0), torch.tensor([0.4, 0.6])
    for node in range(1024):
        tree.scores[node] = q.log()
        tree.add(node, 1)
    path, _ = verify_tree(tree, lambda node: q.flip(0), TorchRandomness(), "block")
    assert len(path) <= 1024
