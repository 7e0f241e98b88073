"""The exact distribution of whole rounds with token trees (growth, verification), and mutants that must fail.

No sampling, so nothing here can fail by chance. Whatever the algorithm and the estimator
choose to draw, the next token must be distributed as p after every prefix."""

from typing import Any

import pytest
import torch
from support.enumeration import readable_verification
from support.enumeration.exact_distribution import Answering, Replay, Tokens, exact_distribution, is_caught, worst_error
from support.enumeration.plans import tree_plan
from support.enumeration.toy_rounds import SCENARIOS, Models, OneUniform
from support.enumeration.toy_trees import ToyTree

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.estimators import AcceptanceRates
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees.growth import Growth
from hf_specdecpp.trees.tree import Chain, DraftTree
from hf_specdecpp.trees.verification import verify_sampled, verify_tree

TOLERANCE, ALGORITHMS = 1e-12, ["dyspec", "dyspec-exact", "static"]
EVERY, ESTIMATORS = [*ALGORITHMS, "throughput"], ["draft probability", "before", "path"]


def error_of(program: ToyTree, vocab: int = 3) -> float:
    probs = exact_distribution(program)
    assert sum(probs.values()) == pytest.approx(1.0, abs=TOLERANCE)
    return worst_error(probs, program.models.p, vocab)


@pytest.mark.daily(
    "False-block-dyspec-draft probability-plain", "False-block-dyspec-before-disjoint supports",
    "False-block-dyspec-exact-draft probability-p almost q", "False-block-dyspec-exact-before-nothing to propose",
    "False-block-throughput-draft probability-top-k", "False-block-throughput-before-p equals q",
    "False-token-dyspec-draft probability-draft vocabulary", "False-token-dyspec-exact-draft probability-temperature",
    "False-token-dyspec-exact-before-one-hot rows", "False-token-static-draft probability-end of sequence",
    "False-token-throughput-before-plain", "False-block-throughput-path-plain", "False-token-dyspec-path-temperature",
)  # fmt: skip
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize(
    ("algorithm", "estimator"), [(a, e) for a in EVERY for e in ESTIMATORS if a != "static" or e == ESTIMATORS[0]]
)
@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("thorough", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_round_emits_exactly_p(verifier: Any, algorithm: str, estimator: str, scenario: str, thorough: bool) -> None:
    """Budgets up to 4; the thorough run has up to 6, and more seeds."""
    vocab = 4 if scenario == "disjoint supports" else 3
    for seed in range(2 if thorough and estimator == ESTIMATORS[0] else 1):
        for budget in range(1, 7 if thorough and vocab == 3 else 5):
            models = Models(scenario, vocab, 10 * seed + budget)
            error = error_of(ToyTree(models, algorithm, estimator, budget, seed=seed, verifier=verifier), vocab)
            assert error < TOLERANCE, f"seed {seed}, budget {budget}: off by {error}"


@pytest.mark.daily("dyspec", "throughput")
@pytest.mark.parametrize("algorithm", EVERY)
def test_many_kinds_of_trees_and_outcomes_occur(algorithm: str) -> None:
    """Otherwise the test above would say little. What was drawn decides how much more the throughput rule draws."""
    sizes, shapes, accepted, budget = set(), set(), set(), 6 if algorithm == "throughput" else 5
    for seed in range(2):
        program = ToyTree(Models("plain", 3, seed), algorithm, ESTIMATORS[0], budget, seed=seed)
        exact_distribution(program)
        sizes |= {len(parents) - 1 for parents in program.trees}
        shapes |= program.trees
        accepted |= program.outcomes
    assert len(sizes) >= 3 if algorithm == "throughput" else sizes == {5}, "the budget is used up"
    assert len(shapes) == 1 if algorithm == "static" else len(shapes) > 5
    assert accepted >= {1, 2}


def test_a_head_may_judge_siblings_ahead() -> None:
    for seed in range(2):
        program = ToyTree(Models("plain", 3, seed), "dyspec", "before", budget=3, max_depth=2, ahead=2, seed=seed)
        assert error_of(program) < TOLERANCE


@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "throughput"])
def test_a_threshold_leaves_the_distribution_alone(algorithm: str) -> None:
    """The paper's form: slots of a lower value stay undrawn, whatever the budget."""
    sizes = set()
    for seed in range(3):
        program = ToyTree(Models("plain", 3, seed), algorithm, ESTIMATORS[0], budget=5, seed=seed)
        program.options = {"threshold": 0.4}
        assert error_of(program) < TOLERANCE
        sizes |= {len(parents) - 1 for parents in program.trees}
    assert min(sizes) < 5, "the threshold had nothing to do"


@pytest.mark.parametrize("algorithm", ["dyspec", "static"])
def test_two_rounds_emit_exactly_p(algorithm: str) -> None:
    models = Models("plain", 3, seed=0)
    program = ToyTree(models, algorithm, ESTIMATORS[0], budget=2, max_depth=2)
    probs = exact_distribution(lambda randomness: program(randomness, program(randomness)))
    assert worst_error(probs, models.p, 3) < TOLERANCE


@pytest.mark.daily("dyspec")
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact"])
def test_two_rounds_emit_exactly_p_when_one_calibrates_another(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_specdecpp.estimation.estimators.FIRST_FITS", (1,))
    models, lines = Models("plain", 3, seed=0), set()
    program = ToyTree(models, algorithm, ESTIMATORS[0], budget=2, max_depth=2)

    def two_rounds(randomness: Replay) -> Tokens:
        program.rates = AcceptanceRates()
        emitted = program(randomness)
        tree, path = program.last
        program.rates.observe_tree(tree.judged(path))
        lines.add(tuple(program.rates.line))
        return program(randomness, emitted)

    assert worst_error(exact_distribution(two_rounds), models.p, 3) < TOLERANCE
    assert len(lines) > 1, "the outcome of the first round must matter"


def test_two_rounds_of_the_throughput_rule_emit_exactly_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first round decides how far the tree of the second one grows, or whether there is one."""
    monkeypatch.setattr("hf_specdecpp.estimation.estimators.FIRST_FITS", (1,))
    monkeypatch.setattr("hf_specdecpp.throughput.plan.MOST_CREDIT", 0.1)
    models, second = Models("plain", 3, seed=0), set()
    program = ToyTree(models, "throughput", ESTIMATORS[0], budget=2, max_depth=2)

    def two_rounds(randomness: Replay) -> Tokens:
        program.throughput = tree_plan(Costs(0.3, (1.0, 1.1, 1.3)), 2)
        emitted = program(randomness)
        program.throughput.record_outcome(*program.last)
        if program.throughput.should_draft(unread=1):
            emitted = program(randomness, emitted)
            second.add(len(program.last[0]))
        else:
            emitted = (*emitted, int(randomness.categorical(models.p(emitted))))
            second.add(0)
        return emitted

    assert worst_error(exact_distribution(two_rounds), models.p, 3) < TOLERANCE
    assert second == {0, 1, 2}, "the outcome of the first round must matter"


class ByTheRule(ToyTree):
    """Rounds of `tree="auto"`: where what was drawn has led to one branch, a chain is verified.

    Attributes:
        branches: whether nodes may have siblings.
    """

    branches = True

    def growth(self, randomness: Randomness | None, prefix: Tokens = ()) -> Growth:
        growth = super().growth(randomness, prefix)
        growth._how.branches = self.branches
        return growth

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        if not isinstance(tree.as_chain(), Chain) or not len(tree):
            return super().verify(tree, randomness, prefix)
        p = torch.stack([self.p(tree, node, prefix) for node in range(len(tree) + 1)])
        q = torch.stack([tree.q(node) for node in range(len(tree))])
        accepted, token = verify_sampled(tree.candidates, p, q, randomness, self.verifier)
        return list(range(1, accepted + 1)), token


@pytest.mark.daily("False-*", "True-*-p equals q")
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("branches", [True, False])
def test_trees_of_one_branch_are_verified_as_chains(
    branches: bool, verifier: Any, estimator: str, scenario: str
) -> None:
    vocab, shapes = 4 if scenario == "disjoint supports" else 3, set()
    for budget in range(1, 5):
        program = ByTheRule(Models(scenario, vocab, budget), "throughput", estimator, budget, verifier=verifier)
        program.branches, program.throughput = branches, tree_plan(Costs(0.1, (1.0, 1.05, 1.15, 1.3, 1.5)), budget)
        assert error_of(program, vocab) < TOLERANCE
        shapes |= {parents == tuple(range(-1, len(parents) - 1)) for parents in program.trees}
    assert shapes == ({True, False} if branches else {True})


# Mutants. Each has one mistake that real implementations have made. ---------------------------------------------------


class PrunesAfterDrawing(ToyTree):
    """Leaves out the last candidate because the draft is not confident of it."""

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        if tree.estimates[-1] < 0.4:
            tree.children[tree.parents[-1]].pop()
        return tree


class CutsSiblings(ByTheRule):
    """Makes a chain of a tree whose last candidate is a sibling that the draft is not confident of."""

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        if tree.ranks[-1] and tree.estimates[-1] < 0.5:
            for each in (tree.tokens, tree.parents, tree.depths, tree.ranks, tree.values, tree.estimates):
                each.pop()
            tree.children = [[child for child in of if child < len(tree.tokens)] for of in tree.children[:-1]]
        return tree


class KeepsTheBetterOfTwo(ToyTree):
    """Draws two siblings and lets the likelier one go first."""

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        tree.children[0].sort(key=lambda node: -float(tree.q(0)[tree.tokens[node]]))
        return tree


class StaleQ(ToyTree):
    """Verifies every sibling with the q of the first one, not renormalised."""

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        return readable_verification.verify_tree(
            tree, lambda node: self.p(tree, node, prefix), randomness, renormalise=False
        )


class ForgetsTheRejected(ToyTree):
    """Tests every sibling against p instead of what earlier rejections left of it."""

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        return readable_verification.verify_tree(
            tree, lambda node: self.p(tree, node, prefix), randomness, update=False
        )


class BonusFromQ(ToyTree):
    def p(self, tree: DraftTree, node: int, prefix: Tokens) -> torch.Tensor:
        after = (*prefix, *tree.path(node))
        return self.models.p(after) if tree.children[node] else self.models.q(after)


class ReusesTheUniform(ToyTree):
    """Compares all siblings with the same random number."""

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        return super().verify(tree, OneUniform(randomness), prefix)  # type: ignore[arg-type]


class LetsTheDrawDecide(ToyTree):
    """Draws first, and takes what it drew only if its own estimate is worth it: as is right for a greedy target."""

    def growth(self, randomness: Randomness | None, prefix: Tokens = ()) -> Growth:
        growth = super().growth(randomness, prefix)
        growth.greedy = True
        return growth


MUTANTS = [PrunesAfterDrawing, KeepsTheBetterOfTwo, StaleQ, ForgetsTheRejected, BonusFromQ, ReusesTheUniform]


WALKS = [StaleQ, ForgetsTheRejected]  # of Algorithm 3; `test_tree_blocks.py` has those of the other


@pytest.mark.daily(
    "PrunesAfterDrawing-token-dyspec", "KeepsTheBetterOfTwo-token-dyspec-exact", "StaleQ-token-static",
    "ForgetsTheRejected-token-throughput", "ReusesTheUniform-token-dyspec", "PrunesAfterDrawing-block-dyspec-exact",
    "KeepsTheBetterOfTwo-block-static", "BonusFromQ-block-throughput",
)  # fmt: skip
@pytest.mark.parametrize("algorithm", EVERY)
@pytest.mark.parametrize(
    ("mutant", "verifier"), [(m, "token") for m in MUTANTS] + [(m, "block") for m in MUTANTS if m not in WALKS]
)
def test_mutants_are_caught(mutant: type[ToyTree], verifier: Any, algorithm: str) -> None:
    models = {seed: Models("plain", 3, seed) for seed in range(6)}
    rounds = (mutant(models[s], algorithm, ESTIMATORS[0], budget=4, seed=s, verifier=verifier) for s in models)
    assert is_caught(rounds)


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_siblings_that_were_drawn_are_not_cut(verifier: Any) -> None:
    models = {seed: Models("plain", 3, seed) for seed in range(6)}
    assert is_caught(CutsSiblings(models[s], "throughput", ESTIMATORS[0], 4, seed=s, verifier=verifier) for s in models)


@pytest.mark.daily("dyspec")
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "throughput"])
def test_what_is_drawn_must_not_decide(algorithm: str) -> None:
    models = {seed: Models("plain", 3, seed) for seed in range(6)}
    assert is_caught(LetsTheDrawDecide(models[s], algorithm, ESTIMATORS[0], budget=4, seed=s) for s in models)


def test_the_mutants_walk_is_right_with_all_its_parts() -> None:
    """So that what catches a mutant is the part that it lacks."""

    class Whole(ToyTree):
        def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
            return readable_verification.verify_tree(tree, lambda node: self.p(tree, node, prefix), randomness)

    assert error_of(Whole(Models("plain", 3, 0), "dyspec", ESTIMATORS[0], budget=4)) < TOLERANCE


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_a_zero_residual_falls_back_to_p(verifier: Any) -> None:
    """Rounding can reject a candidate although p equals q, which leaves nothing to draw from."""
    tree, rejecting = DraftTree(0), Answering([False])
    tree.scores[0] = torch.tensor([0.2, 0.3, 0.5]).log()
    tree.add(0, 2)
    verify_tree(tree, lambda node: tree.q(0), rejecting, verifier)
    assert torch.equal(rejecting.drawn_from[0], tree.q(0))


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_a_tree_without_candidates_emits_from_p(verifier: Any) -> None:
    p = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    probs = exact_distribution(lambda replay: (verify_tree(DraftTree(0), lambda node: p, replay, verifier)[1],))
    assert probs == pytest.approx({(0,): 0.2, (1,): 0.3, (2,): 0.5})
