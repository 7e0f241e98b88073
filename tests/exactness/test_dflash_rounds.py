"""The exact distribution of rounds with a real DFlash block and a real target, both tiny: chains and trees.

The processors depend on the path, so q of a place is another one after each path. Mutants: a place's q told as that of
the next one, and q without the processors that it was drawn with.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import pytest
import torch
from support.dflash_files import DEPTH, HIDDEN, Checkpoint
from support.exact_distribution import Tokens, exact_distribution, worst_error
from support.models import tiny
from support.toy_rounds import VERIFIERS, Models, ToyRound, draft_chain
from support.toy_trees import ToyTree
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdecpp.drafting.chain import next_step
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.drafts.dflash.kind import meet, read_model
from hf_specdecpp.drafts.dflash.model import DFlashDraft
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Randomness, TreeRandomness
from hf_specdecpp.trees.slots import Growth, Level
from hf_specdecpp.trees.tree import DraftTree

# Logits are float32: that is what q is drawn from and told as.
TOLERANCE, VISIBLE = 1e-6, 1e-3
VOCAB, MASK = 3, 2
TEXT = (1, 0, 2, 1)  # before the round


class NotTheSameAgain(LogitsProcessor):
    """Looks at the path: the last token is less likely, the one before it more."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        changed[:, input_ids[0, -1]] -= 1.0
        changed[:, input_ids[0, -2]] += 0.5
        return changed


class Pair(Models):
    """A target, its processed distribution after a path, and a block draft that has read the text.

    Attributes:
        session: in the round after the text.
    """

    def __init__(self, seed: int) -> None:
        super().__init__("plain", VOCAB, seed)
        self.target = tiny("llama", seed, vocab_size=VOCAB, num_hidden_layers=DEPTH, head_dim=8)
        checkpoint = Checkpoint(block_size=4, seed=seed)
        raw = {**checkpoint.config(), "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 0, 2]}}
        model = read_model(raw, checkpoint.tensors(), "The draft")
        meet(model, self.target, "The draft")
        self.processing = Processing([NotTheSameAgain()])
        self.p = cache(self._p)  # type: ignore[method-assign]
        self.session: Reading = DFlashDraft(model, self.target).session(VOCAB)
        with torch.no_grad(), TargetStates(self.target, model.reader) as caught:
            self.target(torch.tensor([TEXT[:-1]]))
            self.session.begin_round(torch.tensor([TEXT]), 0, caught.take())
            self.session.step([])

    @torch.no_grad()
    def _p(self, prefix: Tokens) -> Tensor:
        ids = torch.tensor([[*TEXT, *prefix]])
        logits = self.target(ids).logits[0, -1]
        return self.processing.one(ids, [], logits).double().softmax(dim=-1)


@cache
def pair(seed: int) -> Pair:
    return Pair(seed)


class BlockRound(ToyRound):
    """A chain."""

    models: Pair

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        step = partial(next_step, self.models.session, self.models.processing, torch.tensor([TEXT]), False)
        chain = draft_chain(step, rule, randomness, max_tokens=3)
        assert self.models.session.passes == 1
        return DraftTree.chain(chain.candidates, [each.double() for each in chain.drawn_from])


class BlockTree(ToyTree):
    """A tree: the marginals by depth, processed on each path."""

    models: Pair

    def growth(self, randomness: TreeRandomness | None, prefix: Tokens = ()) -> Growth:
        pair = self.models

        def expand(tree: DraftTree, nodes: list[int]) -> Level:
            logits, hidden = pair.session.expand(tree, nodes)
            scores = pair.processing.after_each(torch.tensor([TEXT]), [tree.path(node) for node in nodes], logits)
            return Level(self.told(scores).double(), hidden, pair.session.embed, 0)

        valuation = self.throughput if self.algorithm == "throughput" else None
        return Growth(expand, self.estimator, randomness, -1, self.max_depth, valuation=valuation)

    def told(self, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize("rule", ["fixed", "threshold/draft probability", "throughput/draft probability"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_chain_emits_exactly_p(verifier: str, rule: str) -> None:
    for seed in range(2):
        program = BlockRound(pair(seed), rule, (1, 3), seed, verifier)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE
    assert max(program.lengths) > 1


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "static", "throughput"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_tree_emits_exactly_p(verifier: str, algorithm: str) -> None:
    accepted: set[int] = set()
    for seed in range(2):
        program = BlockTree(pair(seed), algorithm, "draft probability", 4, seed=seed, verifier=verifier)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE
        accepted |= program.accepted
    assert {0, 1, 2} <= accepted


def test_places_and_paths_differ() -> None:
    """The control: a place is another distribution than the next, and the same place after another path, too."""
    process, differences = pair(0).processing, []
    for seed in range(3):
        session: Any = pair(seed).session
        logits = [session.step([torch.tensor(0)] * place)[0] for place in range(3)]
        differences.append(float((logits[0].softmax(-1) - logits[1].softmax(-1)).abs().max()))
    assert max(differences) > 1e-2
    after = process.after_each(torch.tensor([TEXT]), [[0], [2]], torch.stack([logits[1], logits[1]]))
    assert float((after[0].softmax(-1) - after[1].softmax(-1)).abs().max()) > 1e-2
    assert tuple(session.step([])[1].shape) == (HIDDEN,)


# Mutants. -------------------------------------------------------------------------------------------------------------


class AnotherPlace(BlockRound):
    """The distribution of a place is told as that of the place after it."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        return DraftTree.chain(chain.candidates, [*chain.drawn_from[1:], chain.drawn_from[0]])


class NotProcessed(BlockRound):
    """The bare marginals are told."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        session: Any = self.models.session
        rows = [session.step([torch.tensor(0)] * place)[0].double() for place in range(len(chain.candidates))]
        return DraftTree.chain(chain.candidates, rows)


class OnePathForAll(BlockTree):
    """Of a tree's nodes all are told what was processed on the first one's path."""

    def draft(self, randomness: TreeRandomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        seen: dict[int, Tensor] = {}
        for node, row in list(tree.scores.items()):
            tree.scores[node] = seen.setdefault(tree.depths[node], row)
        return tree


@pytest.mark.parametrize("mutant", [AnotherPlace, NotProcessed])
def test_mutants_are_caught(mutant: type[BlockRound]) -> None:
    errors = []
    for seed in range(3):
        program = mutant(pair(seed), "fixed", (3, 3), seed)
        errors.append(worst_error(exact_distribution(program), program.models.p, VOCAB))
    assert max(errors) > VISIBLE


def test_a_mutant_of_trees_is_caught() -> None:
    errors = []
    for seed in range(3):
        program = OnePathForAll(pair(seed), "static", "draft probability", 4, seed=seed)
        errors.append(worst_error(exact_distribution(program), program.models.p, VOCAB))
    assert max(errors) > VISIBLE
