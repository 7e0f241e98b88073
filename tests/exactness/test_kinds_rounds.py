"""The exact distribution of rounds of drafts that are not models a step: blocks and lookups, in chains and trees.

Their candidates come through the real interface (`Draft`, `Reading`): from tables in the place of models, and from a
real DFlash block beside a real target, both tiny. Its processors depend on the path, so that q of a place is another
one after each path. Mutants: the marginals of a place told as those of another, q without the processors that it was
drawn with or with those of another path, and a point mass that is taken for less than certain."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.dflash_files import DEPTH, Checkpoint
from support.exact_distribution import Tokens, exact_distribution, is_caught, worst_error
from support.models import tiny
from support.stand_ins import TextReading, point_mass
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
from hf_specdecpp.trees.slots import Level
from hf_specdecpp.trees.tree import DraftTree

# The block's logits are float32: that is what q is drawn from and told as.
TOLERANCE = {"block": 1e-12, "lookup": 1e-12, "dflash": 1e-6}
VOCAB, MASK = 3, 2
ROOT = (1,)  # the text before a round of tables
TEXT = (1, 0, 2, 1)  # and of the block


class Tables(Models):
    """Tables that drafts propose from, as the stand-ins do from a text.

    `kind`: `"block"`: the marginal of each of three places, whatever the path; `"lookup"`: certain tokens."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__("plain", VOCAB, seed)
        self.kind, self.processing = kind, Processing([])

    def propose(self, text: list[int], vocab_size: int) -> tuple[list[Tensor], int]:
        rows = [self.at(("place", *text[len(ROOT) :], place))[1] for place in range(3)]  # type: ignore[arg-type]
        if self.kind == "block":
            return rows, 1
        return [point_mass(int(row.argmax()), vocab_size) for row in rows], 0

    def begun(self, prefix: Tokens) -> tuple[Any, Tensor]:
        """A session in the round after `prefix`, and its text."""
        session, text = TextReading(self, VOCAB), torch.tensor([[*ROOT, *prefix]])
        session.begin_round(text, 0)
        return session, text


class NotTheSameAgain(LogitsProcessor):
    """Looks at the path: the last token is less likely, the one before it more."""

    reads_prefix_only = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        changed = scores.clone()
        changed[:, input_ids[0, -1]] -= 1.0
        changed[:, input_ids[0, -2]] += 0.5
        return changed


class Block(Models):
    """A target, its processed distribution after a path, and a block draft that has read the text.

    `session`: in the round after the text."""

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
        return self.processing.one(ids, [], self.target(ids).logits[0, -1]).double().softmax(dim=-1)

    def begun(self, prefix: Tokens) -> tuple[Any, Tensor]:
        return self.session, torch.tensor([TEXT])


@cache
def block(seed: int) -> Block:
    return Block(seed)


def models_of(kind: str, seed: int) -> Any:
    return block(seed) if kind == "dflash" else Tables(kind, seed)


class KindRound(ToyRound):
    """A chain."""

    models: Any

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        session, text = self.models.begun(prefix)
        step = partial(next_step, session, self.models.processing, text, False)
        chain = draft_chain(step, rule, randomness, max_tokens=3, eos_token_ids=self.models.eos)
        assert session.passes <= 1
        return DraftTree.chain(chain.candidates, [row.double() for row in chain.drawn_from])


class KindTree(ToyTree):
    """A tree: the same algorithms, q by depth, processed on each path."""

    models: Any

    def expander(self, prefix: Tokens) -> Callable[[DraftTree, list[int]], Level]:
        session, text = self.models.begun(prefix)

        def expand(tree: DraftTree, nodes: list[int]) -> Level:
            before = session.passes
            scores, hidden = session.expand(tree, nodes)
            if isinstance(self.models, Block):
                scores = self.models.processing.after_each(text, [tree.path(node) for node in nodes], scores).double()
            return Level(scores, hidden, session.embed, session.passes - before)

        return expand


RULES = ["fixed", "threshold/draft probability", "throughput/draft probability"]
CASES = [(kind, rule) for kind in TOLERANCE for rule in RULES]
CASES += [("block", "threshold/before"), ("lookup", "threshold/before")]  # the heads are of the size of tables


@pytest.mark.every(7)
@pytest.mark.parametrize(("kind", "rule"), CASES)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_chain_emits_exactly_p(verifier: str, kind: str, rule: str) -> None:
    lengths = set()
    for seed in range(2):
        program = KindRound(models_of(kind, seed), rule, (1, 3), seed, verifier)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE[kind]
        lengths |= program.lengths
    assert max(lengths) > 1


@pytest.mark.every(7)
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "static", "throughput"])
@pytest.mark.parametrize("verifier", VERIFIERS)
@pytest.mark.parametrize("kind", TOLERANCE)
def test_a_tree_emits_exactly_p(kind: str, verifier: str, algorithm: str) -> None:
    accepted: set[int] = set()
    for seed in range(2):
        program = KindTree(models_of(kind, seed), algorithm, "draft probability", 4, seed=seed, verifier=verifier)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE[kind]
        accepted |= program.outcomes
        tree = program.last[0]
        assert tree.passes == (1 if kind == "block" else 0)
        assert tree.levels >= tree.depth or algorithm == "dyspec-exact"
    assert accepted >= ({0, 1, 2} if kind == "dflash" else {1})


# Mutants. -------------------------------------------------------------------------------------------------------------


class LessCertain(KindRound):
    """A looked up candidate's q is told as its share of what followed before, and not as 1."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        return DraftTree.chain(chain.candidates, [torch.where(row.isinf(), -2.0, row) for row in chain.drawn_from])


class AnotherPlace(KindRound):
    """The distribution of a place is told as that of the place after it."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        return DraftTree.chain(chain.candidates, [*chain.drawn_from[1:], chain.drawn_from[0]])


class KeepsTheMass(KindRound):
    """The point mass stays in what is drawn from after a rejection."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        for place, token in enumerate(candidates):
            if not randomness.bernoulli(float(p[place, token])):
                return place, int(randomness.categorical(p[place]))
        return len(candidates), int(randomness.categorical(p[-1]))


class NotProcessed(KindRound):
    """The bare marginals are told."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix)
        session: Any = self.models.session
        rows = [session.step([torch.tensor(0)] * place)[0].double() for place in range(len(chain.candidates))]
        return DraftTree.chain(chain.candidates, rows)


class OnePathForAll(KindTree):
    """Of a tree's nodes all are told what was processed on the first one's path."""

    def draft(self, randomness: TreeRandomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        seen: dict[int, Tensor] = {}
        for node, row in list(tree.scores.items()):
            tree.scores[node] = seen.setdefault(tree.depths[node], row)
        return tree


@pytest.mark.parametrize(("kind", "mutant"), [
    ("lookup", LessCertain),
    ("lookup", KeepsTheMass),
    ("block", AnotherPlace),
    ("dflash", AnotherPlace),
    ("dflash", NotProcessed),
    ("dflash", OnePathForAll),
])  # fmt: skip
def test_mutants_are_caught(kind: str, mutant: Any) -> None:
    is_chain = issubclass(mutant, KindRound)
    assert is_caught(
        mutant(models, "fixed", (3, 3), seed) if is_chain else mutant(models, "static", "draft probability", 4)
        for seed, models in ((seed, models_of(kind, seed)) for seed in range(4))
    )
