"""The exact distribution of rounds of drafts that are not models a step: blocks and lookups, in chains and trees.

Their candidates come through the real interface (`Draft`, `Reading`), from tables in the place of models. Mutants: the
marginals of a block taken for those after a path, and a point mass that is taken for less than certain.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from support.exact_distribution import Tokens, exact_distribution, worst_error
from support.stand_ins import IMPOSSIBLE, TextReading, point_mass
from support.toy_rounds import VERIFIERS, Models, ToyRound, draft_chain
from support.toy_trees import ToyTree
from torch import Tensor

from hf_specdecpp.drafting.chain import next_step
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Randomness, TreeRandomness
from hf_specdecpp.trees.slots import Growth, Level
from hf_specdecpp.trees.tree import DraftTree

TOLERANCE, VISIBLE = 1e-12, 1e-3
VOCAB = 3
ROOT = (1,)  # the text before the round


class Table:
    """Proposes from the tables of `Models`, as the stand-ins do from a text.

    Args:
        kind: `"block"`: the marginal of each of three places, whatever the path; `"lookup"`: certain tokens.
    """

    def __init__(self, models: Models, kind: str) -> None:
        self.models, self.kind = models, kind

    def propose(self, text: list[int], vocab_size: int) -> tuple[list[Tensor], int]:
        rows = [self.models.at(("place", *text[len(ROOT) :], place))[1] for place in range(3)]  # type: ignore[arg-type]
        if self.kind == "block":
            return rows, 1
        return [point_mass(int(row.argmax()), vocab_size) for row in rows], 0


def begun(models: Models, kind: str, prefix: Tokens) -> TextReading:
    session = TextReading(Table(models, kind), VOCAB)
    session.begin_round(torch.tensor([[*ROOT, *prefix]]), 0)
    return session


class KindRound(ToyRound):
    """A chain."""

    kind = "block"

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        session = begun(self.models, self.kind, prefix)
        step = partial(next_step, session, Processing([]), torch.tensor([[*ROOT, *prefix]]), False)
        chain = draft_chain(step, rule, randomness, max_tokens=3, eos_token_ids=self.models.eos)
        assert session.passes <= 1
        return chain


class KindTree(ToyTree):
    """A tree: the same algorithms, q by depth."""

    kind = "block"

    def growth(self, randomness: TreeRandomness | None, prefix: Tokens = ()) -> Growth:
        session = begun(self.models, self.kind, prefix)

        def expand(tree: DraftTree, nodes: list[int]) -> Level:
            before = session.passes
            scores, hidden = session.expand(tree, nodes)
            return Level(scores, hidden, session.embed, session.passes - before)

        valuation = self.throughput if self.algorithm == "throughput" else None
        return Growth(expand, self.estimator, randomness, -1, self.max_depth, valuation=valuation)


def of_kind(base: Any, kind: str) -> Any:
    return type(f"{kind} {base.__name__}", (base,), {"kind": kind})


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "rule", ["fixed", "threshold/draft probability", "throughput/draft probability", "threshold/before"]
)
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kind", ["block", "lookup"])
def test_a_chain_emits_exactly_p(kind: str, verifier: str, rule: str) -> None:
    lengths = set()
    for seed in range(2):
        models = Models("plain", VOCAB, seed)
        program = of_kind(KindRound, kind)(models, rule, (1, 3), seed, verifier)
        assert worst_error(exact_distribution(program), models.p, VOCAB) < TOLERANCE
        lengths |= program.lengths
    assert max(lengths) > 1


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "static", "throughput"])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kind", ["block", "lookup"])
def test_a_tree_emits_exactly_p(kind: str, verifier: str, algorithm: str) -> None:
    accepted: set[int] = set()
    for seed in range(2):
        models = Models("plain", VOCAB, seed)
        program = of_kind(KindTree, kind)(models, algorithm, "draft probability", 4, seed=seed, verifier=verifier)
        assert worst_error(exact_distribution(program), models.p, VOCAB) < TOLERANCE
        accepted |= program.accepted
        tree = program.last[0]
        assert tree.passes == (1 if kind == "block" else 0)
        assert tree.levels >= tree.depth or algorithm == "dyspec-exact"
    assert 1 in accepted


def test_a_block_s_tree_branches_and_a_lookup_s_does_not() -> None:
    for kind, width in (("block", 2), ("lookup", 1)):
        program = of_kind(KindTree, kind)(Models("plain", VOCAB, 0), "dyspec", "draft probability", 4)
        exact_distribution(program)
        widest = max(max(list(parents).count(each) for each in set(parents)) for parents in program.trees)
        assert widest >= width if kind == "block" else widest == 1


# Mutants. -------------------------------------------------------------------------------------------------------------


class LessCertain(KindRound):
    """A looked up candidate's q is told as its share of what followed before, and not as 1."""

    kind = "lookup"

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        share = [torch.where(row.isinf(), -2.0, row) for row in chain.drawn_from]
        return DraftTree.chain(chain.candidates, share)


class AnotherPlace(KindRound):
    """The distribution of a place is told as that of the place after it."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        return DraftTree.chain(chain.candidates, [*chain.drawn_from[1:], chain.drawn_from[0]])


class KeepsTheMass(KindRound):
    """The point mass stays in what is drawn from after a rejection."""

    kind = "lookup"

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        for place, token in enumerate(candidates):
            if not randomness.bernoulli(float(p[place, token])):
                return place, int(randomness.categorical(p[place]))
        return len(candidates), int(randomness.categorical(p[-1]))


@pytest.mark.parametrize("mutant", [LessCertain, AnotherPlace, KeepsTheMass])
def test_mutants_are_caught(mutant: type[KindRound]) -> None:
    errors = []
    for seed in range(4):
        models = Models("plain", VOCAB, seed)
        errors.append(worst_error(exact_distribution(mutant(models, "fixed", (3, 3), seed)), models.p, VOCAB))
    assert max(errors) > VISIBLE


def test_a_lookup_that_finds_nothing_proposes_nothing() -> None:
    session = begun(Models("plain", VOCAB, 0), "lookup", ())
    session.rows = []
    assert session.step([]) is None
    logits, _ = session.expand(DraftTree(1), [0])
    assert bool((logits == IMPOSSIBLE).all())
