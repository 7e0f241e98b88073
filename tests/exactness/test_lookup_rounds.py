"""The exact distribution of rounds whose last candidates were looked up: chains and trees, behind drawn ones or alone.

Mutants: the share of earlier places that had the candidate, taken for its q; the candidate left in what is drawn from
once it was rejected; a candidate that is looked up as it is needed, after the target's token was drawn."""

from typing import Any

import pytest
import torch
from support.exact_distribution import Tokens, exact_distribution, is_caught, worst_error
from support.toy_rounds import Models, ToyRound
from support.toy_trees import ToyTree
from torch import Tensor

from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.sampling.randomness import Randomness, TreeRandomness
from hf_specdecpp.sampling.verification import verify_sampled
from hf_specdecpp.trees.tree import DraftTree
from hf_specdecpp.trees.verification import follow_tree

TOLERANCE = 1e-12
VOCAB, FURTHER = 3, 2


def looked_up(models: Models, text: Tokens, count: int) -> list[int]:
    """What a lookup would find after a text: any function of it will do. First what the target likes best there."""
    found: list[int] = []
    for _ in range(count):
        row = models.at(("seen", *text, *found))[1] if found else models.at(text)[0]  # type: ignore[arg-type]
        found.append(int(row.argmax()))
    return found


class LookupRound(ToyRound):
    """A chain: drawn candidates, of which there may be none, then looked up ones, after the drawn ones' tokens."""

    draws = True

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        chain = super().draft(randomness, rule, prefix) if self.draws else DraftTree.chain()
        if set(chain.candidates) & self.models.eos:
            return chain
        return chain.followed_by(looked_up(self.models, (*prefix, *chain.candidates), FURTHER))

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        verification: Any = self.verifier
        drawn = len(q)
        accepted, token = verify_sampled(candidates[:drawn], p[: drawn + 1], q, randomness, verification)
        chain, path = DraftTree.chain(candidates, list(q)), list(range(1, accepted + 1))
        path, token = follow_tree(chain, path, token, lambda node: int(randomness.categorical(p[node])))
        return len(path), token


class Alone(LookupRound):
    draws = False


def chain(base: type[LookupRound], models: Models, rule: str, verification: str) -> Any:
    program = base(models, rule, (1, 2))
    program.verifier = verification  # type: ignore[assignment]
    return program


@pytest.mark.parametrize("scenario", ["plain", "top-k", "one-hot rows", "end of sequence", "nothing to propose"])
@pytest.mark.parametrize("verification", ["block", "token"])
@pytest.mark.parametrize("base", [LookupRound, Alone])
def test_a_chain_emits_exactly_p(base: type[LookupRound], verification: str, scenario: str) -> None:
    lengths, accepted = set(), set()
    for seed in range(3):
        models = Models(scenario, VOCAB, seed)
        program = chain(base, models, "threshold/draft probability", verification)
        assert worst_error(exact_distribution(program), models.p, VOCAB) < TOLERANCE
        lengths |= program.lengths
        accepted |= program.outcomes
    assert max(lengths) >= FURTHER
    assert max(accepted) > (1 if base is LookupRound else 0)


class LookupTree(ToyTree):
    """A tree with looked up branches: below its root, and below every node that was drawn."""

    def draft(self, randomness: TreeRandomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        for start in range(len(tree) + 1):
            node = start
            for token in looked_up(self.models, (*prefix, *tree.path(start)), FURTHER):
                if any(tree.tokens[child] == token for child in tree.children[node]):
                    break  # which depends on what was drawn
                node = tree.follow(node, token)
        return tree

    def verify(self, tree: DraftTree, randomness: TreeRandomness, prefix: Tokens) -> tuple[list[int], int]:
        path, token = super().verify(tree, randomness, prefix)
        return follow_tree(tree, path, token, lambda node: int(randomness.categorical(self.p(tree, node, prefix))))


@pytest.mark.every(3)
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "static", "throughput"])
@pytest.mark.parametrize("verifier", ["block", "token", "block, at once", "token, at once"])
def test_a_tree_emits_exactly_p(verifier: str, algorithm: str) -> None:
    further = 0
    for seed in range(2):
        models = Models("plain", VOCAB, seed)
        program = LookupTree(models, algorithm, "draft probability", 3, max_depth=2, seed=seed, verifier=verifier)

        def observed(randomness: Any, program: LookupTree = program) -> Tokens:
            nonlocal further
            emitted = program(randomness)
            tree, path = program.last
            further += len(path) - len(tree.drawn(path))
            return emitted

        assert worst_error(exact_distribution(observed), models.p, VOCAB) < TOLERANCE
    assert further > 0


# Mutants. -------------------------------------------------------------------------------------------------------------


class ShareForQ(Alone):
    """q is told to be the share of the earlier places that had the candidate, the rest spread over the others."""

    share = 0.6

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        rows = torch.full((len(candidates), VOCAB), (1.0 - self.share) / (VOCAB - 1), dtype=torch.float64)
        for row, token in zip(rows, candidates, strict=True):
            row[token] = self.share
        return super().verify(candidates, p, rows, randomness, prefix)


class KeepsTheMass(Alone):
    """After a rejection the candidate stays in what is drawn from."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        for place, token in enumerate(candidates):
            if int(randomness.categorical(p[place])) != token:
                return place, int(randomness.categorical(p[place]))
        return len(candidates), int(randomness.categorical(p[-1]))


class DrawsAgain(LookupTree):
    """A looked up candidate is accepted by a draw of its own, not by the token that verification has drawn."""

    def verify(self, tree: DraftTree, randomness: TreeRandomness, prefix: Tokens) -> tuple[list[int], int]:
        path, _ = ToyTree.verify(self, tree, randomness, prefix)
        node = path[-1] if path else 0
        token = int(randomness.categorical(self.p(tree, node, prefix)))
        return follow_tree(tree, path, token, lambda node: int(randomness.categorical(self.p(tree, node, prefix))))


def test_mutants_are_caught() -> None:
    mutants: list[Any] = [
        lambda models: chain(ShareForQ, models, "fixed", "block"),
        lambda models: chain(ShareForQ, models, "fixed", "token"),
        lambda models: chain(KeepsTheMass, models, "fixed", "token"),
        lambda models: DrawsAgain(models, "dyspec", "draft probability", 3, max_depth=2),
    ]
    for mutant in mutants:
        assert is_caught(mutant(Models("plain", VOCAB, seed)) for seed in range(3))
