"""The exact distribution of rounds of drafts that are not models a step: blocks and lookups, in chains and trees.

Their candidates come through the real interface (`Draft`, `DraftingSession`): from tables instead of models, and from
a real DFlash block beside a real target, both tiny. Its processors depend on the path, so that q of a place is another
one after each path. Mutants: the marginals of a place told as those of another, q without the processors that it was
drawn with or with those of another path, and a point mass that is taken for less than certain.

Chains and trees whose last candidates were looked up, behind drawn ones or alone. Mutants: the share of earlier places
that had the candidate, taken for its q; the candidate left in what is drawn from once it was rejected; a candidate that
is looked up as it is needed, after the target's token was drawn."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from support.enumeration.exact_distribution import Tokens, exact_distribution, is_caught, worst_error
from support.enumeration.toy_rounds import VERIFIERS, Models, ToyRound, draft_chain
from support.enumeration.toy_trees import ToyTree
from support.files.checkpoints import HIDDEN, Numbers
from support.files.dflash_files import DEPTH, Checkpoint
from support.files.stand_ins import TextReading
from support.targets.models import tiny
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdecpp.draft_kinds.known import DFLASH, DSPARK
from hf_specdecpp.drafting.chain import StoppingRule, next_step
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.texts.sampling import point_mass
from hf_specdecpp.trees.growth import Expand
from hf_specdecpp.trees.tree import Chain, DraftTree
from hf_specdecpp.trees.verification import follow_tree, verify_sampled

# The block's logits are float32: that is what q is drawn from and told as.
TOLERANCE = {"block": 1e-12, "lookup": 1e-12, "dflash": 1e-6, "dspark": 1e-6}
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
        return [point_mass(row.argmax(), row).double().log() for row in rows], 0

    def begun(self, prefix: Tokens) -> tuple[Any, Tensor]:
        """A session in the round after `prefix`, and its text."""
        session, text = TextReading(self, VOCAB), torch.tensor([[*ROOT, *prefix]])
        session.read_verified(text, 0)
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

    `session`: in the round after the text. `dspark`: with a bias by the token before, of an rnn, and of two tokens in
    every second seed."""

    def __init__(self, seed: int, dspark: bool = False) -> None:
        super().__init__("plain", VOCAB, seed)
        self.target = tiny("llama", seed, vocab_size=VOCAB, num_hidden_layers=DEPTH, head_dim=8)
        checkpoint = Checkpoint(block_size=4, reads=(0, 1, 2) if dspark else (1, 0, 2), seed=seed)
        raw = {**checkpoint.config(), "dflash_config": {"mask_token_id": MASK, "target_layer_ids": checkpoint.reads}}
        kind, tensors = (DSPARK if dspark else DFLASH), checkpoint.tensors()
        if dspark:
            raw |= {"vocab_size": VOCAB, "architectures": ["DSparkDraftModel"], "sample_from_anchor": False}
            tensors |= markov(seed)
        raw["dflash_config"]["target_layer_ids"] = list(checkpoint.reads)
        model = kind.read(raw, tensors, "The draft")
        kind.bind(model, self.target, "The draft")
        self.processing = Processing([NotTheSameAgain()])
        self.p = cache(self._p)  # type: ignore[method-assign]
        self.session: Any = kind.drafter(model, self.target).session(VOCAB)
        with torch.no_grad(), TargetStates(self.target, model.reader) as caught:
            self.target(torch.tensor([TEXT[:-1]]))
            self.session.read_verified(torch.tensor([TEXT]), 0, caught.states_of())
            self.session.propose_next([])

    @torch.no_grad()
    def _p(self, prefix: Tokens) -> Tensor:
        ids = torch.tensor([[*TEXT, *prefix]])
        return self.processing.one(ids, [], self.target(ids).logits[0, -1]).double().softmax(dim=-1)

    def begun(self, prefix: Tokens) -> tuple[Any, Tensor]:
        return self.session, torch.tensor([TEXT])


def markov(seed: int) -> dict[str, Tensor]:
    """Tensors of a Markov head of rank 2, vanilla for every third seed; for odd seeds the draft has two tokens."""
    numbers, ids = Numbers(seed + 9), torch.tensor([0, 2])
    size = len(ids) if seed % 2 else VOCAB
    found = {"markov_head.markov_w1.weight": 5 * numbers.random(VOCAB, 2),
             "markov_head.markov_w2.weight": 5 * numbers.random(size, 2)}  # fmt: skip
    if seed % 3:
        found |= {"markov_head.joint_proj.weight": numbers.random(6, 4 + HIDDEN),
                  "markov_head.joint_proj.bias": numbers.random(6)}  # fmt: skip
    if seed % 2:
        found |= {"lm_head.weight": numbers.random(size, HIDDEN), "d2t": ids - torch.arange(size)}
    return found


@cache
def block(seed: int, dspark: bool) -> Block:
    return Block(seed, dspark)


def models_of(kind: str, seed: int) -> Any:
    return block(seed, kind == "dspark") if kind in ("dflash", "dspark") else Tables(kind, seed)


class KindRound(ToyRound):
    """A chain."""

    models: Any

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        session, text = self.models.begun(prefix)
        step = partial(next_step, session, self.models.processing, text, False)
        chain = draft_chain(step, rule, randomness, max_tokens=3, eos_token_ids=self.models.eos)
        assert session.passes <= 1
        return Chain(chain.candidates, [row.double() for row in chain.drawn_from])


class KindTree(ToyTree):
    """A tree: the same algorithms, q by depth, processed on each path."""

    models: Any

    def expander(self, prefix: Tokens) -> Expand:
        session, text = self.models.begun(prefix)
        before = session.passes

        def expand(tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
            scores, hidden = session.expand(tree, nodes)
            if isinstance(self.models, Block):
                scores = self.models.processing.after_each(text, [tree.path(node) for node in nodes], scores).double()
            tree.passes = session.passes - before - 1  # `Growth` counts this one
            return scores, hidden

        return expand


RULES = ["fixed", "threshold/draft probability", "throughput/draft probability"]
CASES = [(kind, rule) for kind in TOLERANCE for rule in RULES]
CASES += [("block", "threshold/before"), ("lookup", "threshold/before")]  # the heads are of the size of tables


@pytest.mark.daily(
    "block-block-fixed", "block-dflash-threshold/draft probability", "block-dspark-threshold/draft probability",
    "token-dspark-fixed", "token-lookup-fixed",
    "token-lookup-threshold/before", "block, at once-dflash-fixed",
    "token, at once-block-throughput/draft probability", "token, at once-block-threshold/before",
)  # fmt: skip
@pytest.mark.parametrize(("kind", "rule"), CASES)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_chain_emits_exactly_p(verifier: str, kind: str, rule: str) -> None:
    lengths = set()
    for seed in range(2):
        program = KindRound(models_of(kind, seed), rule, (1, 3), seed, verifier)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE[kind]
        lengths |= program.lengths
    assert max(lengths) > 1


@pytest.mark.daily("block-block-dyspec", "block-token-throughput", "lookup-token-static", "dflash-token-dyspec-exact",
                   "dspark-block-dyspec", "dspark-token-dyspec-exact")  # fmt: skip
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "static", "throughput"])
@pytest.mark.parametrize("verifier", ["block", "token"])
@pytest.mark.parametrize("kind", TOLERANCE)
def test_a_tree_emits_exactly_p(kind: str, verifier: Any, algorithm: str) -> None:
    accepted: set[int] = set()
    for seed in range(2):
        program = KindTree(models_of(kind, seed), algorithm, "draft probability", 4, seed=seed, verifier=verifier)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE[kind]
        accepted |= program.outcomes
        tree = program.last[0]
        assert tree.passes == (1 if kind == "block" else 0)
        assert tree.levels >= tree.depth or algorithm == "dyspec-exact"
    assert accepted >= ({0, 1, 2} if kind == "dflash" else {1})


class LessCertain(KindRound):
    """A looked up candidate's q is told as its share of what followed before, and not as 1."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix)
        return Chain(chain.candidates, [torch.where(row.isinf(), -2.0, row) for row in chain.drawn_from])


class AnotherPlace(KindRound):
    """The distribution of a place is told as that of the place after it."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix)
        return Chain(chain.candidates, [*chain.drawn_from[1:], chain.drawn_from[0]])


class KeepsTheMass(KindRound):
    """The point mass stays in what is drawn from after a rejection."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        for place, token in enumerate(candidates):
            if not randomness.bernoulli(float(p[place, token])):
                return place, int(randomness.categorical(p[place]))
        return len(candidates), int(randomness.categorical(p[-1]))


class NotProcessed(KindRound):
    """The bare marginals are told."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix)
        session: Any = self.models.session
        rows = [session.propose_next([torch.tensor(0)] * place)[0].double() for place in range(len(chain.candidates))]
        return Chain(chain.candidates, rows)


class OnePathForAll(KindTree):
    """Of a tree's nodes all are told what was processed on the first one's path."""

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        seen: dict[int, Tensor] = {}
        for node, row in list(tree.scores.items()):
            tree.scores[node] = seen.setdefault(tree.depths[node], row)
        return tree


class AnotherBias(KindRound):
    """q is returned with the bias of a wrong token or row: of the sequence's last token at each place, of a draft's id
    where the target's belongs, of the token before that, or of the next row."""

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix)
        wrong = [self.wrong(chain.candidates[:place]) for place in range(len(chain.candidates))]
        return Chain(chain.candidates, wrong)

    def wrong(self, path: list[int]) -> Tensor:
        session, place = self.models.session, len(path)
        logits, hidden = session._block()
        memory, before = session._nothing, [TEXT[-1], *path]
        for row, previous in enumerate(self.previous(before)):
            given, _, memory = session.draft.after(torch.tensor(previous), logits[row], hidden[row], memory)
        scores = session.draft.of_target(self.shifted(given, logits, place), VOCAB)
        return self.models.processing.one(torch.tensor([TEXT]), [torch.tensor(each) for each in path], scores).double()

    def previous(self, before: list[int]) -> list[int]:
        return before

    def shifted(self, given: Tensor, logits: Tensor, place: int) -> Tensor:
        return given


class FirstTokenOnly(AnotherBias):
    def previous(self, before: list[int]) -> list[int]:
        return [before[0]] * len(before)


class DraftIds(AnotherBias):
    """For drafts of the tokens 0 and 2: token 2 is the draft's 1."""

    def previous(self, before: list[int]) -> list[int]:
        return [min(each, 1) for each in before]


class OneStepLate(AnotherBias):
    def previous(self, before: list[int]) -> list[int]:
        return [before[0], *before[:-1]]


class AnotherRow(AnotherBias):
    def shifted(self, given: Tensor, logits: Tensor, place: int) -> Tensor:
        return given - logits[place] + logits[(place + 1) % len(logits)]


class AnotherParent(KindTree):
    """A node's q is returned with the bias of the node before it at the same depth."""

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        session, scores = self.models.session, dict(tree.scores)
        known = session._memory.copy()
        for node in sorted(scores):
            other = [each for each in scores if tree.depths[each] == tree.depths[node] and each < node]
            if other:
                own, session._memory = (tree.tokens[node], tree.parents[node]), known.copy()
                tree.tokens[node], tree.parents[node] = tree.tokens[other[0]], tree.parents[other[0]]
                wrong = session.expand(tree, [node])[0]
                tree.tokens[node], tree.parents[node] = own
                text = torch.tensor([TEXT])
                tree.scores[node] = self.models.processing.after_each(text, [tree.path(node)], wrong)[0].double()
        return tree


def test_without_a_mutation_q_is_right() -> None:
    """The control: what the mutants return without their mutation is what was drawn from."""
    for seed in range(2):
        program = AnotherBias(models_of("dspark", seed), "fixed", (3, 3), seed)
        assert worst_error(exact_distribution(program), program.models.p, VOCAB) < TOLERANCE["dspark"]


@pytest.mark.parametrize(("kind", "mutant"), [
    ("lookup", LessCertain),
    ("lookup", KeepsTheMass),
    ("block", AnotherPlace),
    ("dflash", AnotherPlace),
    ("dflash", NotProcessed),
    ("dflash", OnePathForAll),
    ("dspark", FirstTokenOnly),
    ("dspark", DraftIds),
    ("dspark", OneStepLate),
    ("dspark", AnotherRow),
    ("dspark", AnotherParent),
])  # fmt: skip
def test_mutants_are_caught(kind: str, mutant: Any) -> None:
    is_chain = issubclass(mutant, KindRound)
    assert is_caught(
        mutant(models, "fixed", (3, 3), seed) if is_chain else mutant(models, "static", "draft probability", 4)
        for seed, models in ((seed, models_of(kind, seed)) for seed in range(4))
    )


# Candidates that were looked up behind drawn ones, or alone. ----------------------------------------------------------


FURTHER = 2


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

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        chain = super().draft(randomness, rule, prefix) if self.draws else Chain()
        if set(chain.candidates) & self.models.eos:
            return chain
        return chain.followed_by(looked_up(self.models, (*prefix, *chain.candidates), FURTHER))

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        verification: Any = self.verifier
        drawn = len(q)
        accepted, token = verify_sampled(candidates[:drawn], p[: drawn + 1], q, randomness, verification)
        chain, path = Chain(candidates, list(q)), list(range(1, accepted + 1))
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
def test_a_looked_up_chain_emits_exactly_p(base: type[LookupRound], verification: str, scenario: str) -> None:
    lengths, accepted = set(), set()
    for seed in range(3):
        models = Models(scenario, VOCAB, seed)
        program = chain(base, models, "threshold/draft probability", verification)
        assert worst_error(exact_distribution(program), models.p, VOCAB) < 1e-12
        lengths |= program.lengths
        accepted |= program.outcomes
    assert max(lengths) >= FURTHER
    assert max(accepted) > (1 if base is LookupRound else 0)


class LookupTree(ToyTree):
    """A tree with looked up branches: below its root, and below every node that was drawn."""

    def draft(self, randomness: Randomness, prefix: Tokens) -> DraftTree:
        tree = super().draft(randomness, prefix)
        for start in range(len(tree) + 1):
            node = start
            for token in looked_up(self.models, (*prefix, *tree.path(start)), FURTHER):
                if any(tree.tokens[child] == token for child in tree.children[node]):
                    break  # which depends on what was drawn
                node = tree.add(node, token, looked_up=True)
        return tree

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        path, token = super().verify(tree, randomness, prefix)
        return follow_tree(tree, path, token, lambda node: int(randomness.categorical(self.p(tree, node, prefix))))


@pytest.mark.daily("block-dyspec", "block-throughput", "token-static")
@pytest.mark.parametrize("algorithm", ["dyspec", "dyspec-exact", "static", "throughput"])
@pytest.mark.parametrize("verifier", ["block", "token"])
def test_a_tree_with_looked_up_branches_emits_exactly_p(verifier: Any, algorithm: str) -> None:
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

        assert worst_error(exact_distribution(observed), models.p, VOCAB) < 1e-12
    assert further > 0


class ShareForQ(Alone):
    """q is told to be the share of the earlier places that had the candidate, the rest spread over the others."""

    share = 0.6

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        rows = torch.full((len(candidates), VOCAB), (1.0 - self.share) / (VOCAB - 1), dtype=torch.float64)
        for row, token in zip(rows, candidates, strict=True):
            row[token] = self.share
        return super().verify(candidates, p, rows, randomness, prefix)


class KeepsTheCandidate(Alone):
    """After a rejection the candidate stays in what is drawn from."""

    def verify(self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens) -> Any:
        for place, token in enumerate(candidates):
            if int(randomness.categorical(p[place])) != token:
                return place, int(randomness.categorical(p[place]))
        return len(candidates), int(randomness.categorical(p[-1]))


class DrawsAgain(LookupTree):
    """A looked up candidate is accepted by a draw of its own, not by the token that verification has drawn."""

    def verify(self, tree: DraftTree, randomness: Randomness, prefix: Tokens) -> tuple[list[int], int]:
        path, _ = ToyTree.verify(self, tree, randomness, prefix)
        node = path[-1] if path else 0
        token = int(randomness.categorical(self.p(tree, node, prefix)))
        return follow_tree(tree, path, token, lambda node: int(randomness.categorical(self.p(tree, node, prefix))))


def test_mutants_of_lookups_are_caught() -> None:
    mutants: list[Any] = [
        lambda models: chain(ShareForQ, models, "fixed", "block"),
        lambda models: chain(ShareForQ, models, "fixed", "token"),
        lambda models: chain(KeepsTheCandidate, models, "fixed", "token"),
        lambda models: DrawsAgain(models, "dyspec", "draft probability", 3, max_depth=2),
    ]
    for mutant in mutants:
        assert is_caught(mutant(Models("plain", VOCAB, seed)) for seed in range(3))
