"""Sampled replays: text and rounds are distributed as in live generation, by enumeration on toy models."""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from support.exact_distribution import Probs, Replay, Tokens, exact_distribution
from support.plans import tell
from support.toy_rounds import RULES, Models, ToyRound, draft_chain
from torch import Tensor

from hf_specdecpp.benchmark.replay import record
from hf_specdecpp.benchmark.replay.chains import BASELINES, ChainReplay
from hf_specdecpp.benchmark.replay.record import Record, Text
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.estimators import scalar_features
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees.tree import DraftTree

LENGTH, MOST = 4, 2  # tokens of a text, candidates of a round
BOUNDS = {"confidence": 0.3, "svip": 0.35, "adaedl": 0.6}  # with which rounds of several lengths occur
Coupling = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
Branch = tuple[float, list[int] | None]  # probability, and the chain that leaves the text, if the text does not stand


class Generation(ToyRound):
    """A whole live generation: a text, and how many candidates its rounds drafted and accepted."""

    def __init__(self, models: Models, rule: str) -> None:
        super().__init__(models, rule if rule in RULES else "fixed", bounds=(1, MOST), verifier="token")
        self.baseline = BASELINES.get(rule)
        self.bound = BOUNDS.get(rule, 0.0)

    def new_rule(self) -> StoppingRule:
        return super().new_rule() if self.baseline is None else self.baseline(self.bound, MOST)

    def __call__(self, randomness: Randomness) -> Tokens:
        text: Tokens = (int(randomness.categorical(self.models.p(()))),)
        rule, rounds = self.new_rule(), []
        while len(text) < LENGTH and text[-1] not in self.models.eos:
            text = self.run(randomness, rule, text)[:LENGTH]
            tell(rule, self.drafted, self.accepted)
            rounds += [self.drafted, self.accepted]
        return (*text, -1, *rounds)

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> DraftTree:
        room = LENGTH - len(prefix) - 1
        return draft_chain(self.stepper(prefix), rule, randomness, max_tokens=room, eos_token_ids=self.models.eos)


def replayed_distribution(models: Models, generation: Generation, coupling: Coupling) -> Probs:
    """p(text) times the distribution of the replay's rounds given the text."""
    found: Probs = defaultdict(float)
    for text, weight in texts(models, ()):
        places = range(1, len(text))
        for branches in product(*(list(branches_at(models, text, place, coupling)) for place in places)):
            chance = weight
            for probability, _ in branches:
                chance *= probability
            where = Text(list(text), 0, LENGTH, frozenset(models.eos))
            replay = ChainReplay(where, as_record(models, text, [chain for _, chain in branches]))
            rounds = replay.rounds(generation.new_rule())
            counts = [number for drafted, accepted, _ in rounds for number in (drafted, accepted)]
            found[(*text, -1, *counts)] += chance
    return found


def texts(models: Models, text: Tokens) -> Iterator[tuple[Tokens, float]]:
    if len(text) == LENGTH or (text and text[-1] in models.eos):
        yield text, 1.0
        return
    for token, probability in enumerate(models.p(text).tolist()):
        if probability > 0.0:
            yield from ((whole, probability * rest) for whole, rest in texts(models, (*text, token)))


def branches_at(models: Models, text: Tokens, place: int, coupling: Coupling) -> Iterator[Branch]:
    prefix = text[:place]
    p, q, x = models.p(prefix)[None], models.q(prefix)[None], torch.tensor([text[place]])
    accept, _, rejected = coupling(p, q, x)
    yield float(accept), None
    if float(accept) < 1.0:
        for token, probability in enumerate(rejected[0].tolist()):
            for further, after in enumerate(models.q((*prefix, token)).tolist()):
                if probability * after > 0.0:
                    yield (1.0 - float(accept)) * probability * after, [token, further]


def as_record(models: Models, text: Tokens, chains: list[list[int] | None]) -> Record:
    on = [(text[:place], text[place]) for place in range(1, len(text))]
    leaving = [((*text[:place],), chain) for place, chain in enumerate(chains, 1) if chain is not None]
    off = [((*prefix, *chain[:i]), chain[i]) for prefix, chain in leaving for i in range(MOST)]
    off_text = candidates(models, off)
    left = [off_text[i * MOST : (i + 1) * MOST] for i in range(len(leaving))]
    return Record(stands=[chain is None for chain in chains], on_text=candidates(models, on), off_text=left)


def candidates(models: Models, where: list[tuple[Tokens, int]]) -> list[list[float]]:
    tokens = torch.tensor([token for _, token in where], dtype=torch.long)
    q = torch.stack([models.q(prefix) for prefix, _ in where]) if where else torch.zeros(0, models.vocab)
    zeros = torch.zeros(len(where))
    return record.known_of(tokens, scalar_features(q, tokens), zeros, zeros).tolist()


def largest_difference(a: Probs, b: Probs) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


CASES = [
    *(("plain", 2, rule) for rule in ("fixed", *BASELINES, "threshold/draft probability")),
    *((scenario, 3, "confidence") for scenario in ("plain", "end of sequence", "one-hot rows")),
    ("disjoint supports", 4, "fixed"),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(("scenario", "vocab", "rule"), CASES)
def test_law_of_text_and_rounds(scenario: str, vocab: int, rule: str) -> None:
    models = Models(scenario, vocab, seed=3)
    generation = Generation(models, rule)
    live = exact_distribution(generation)
    assert sum(live.values()) == pytest.approx(1.0)
    assert largest_difference(live, replayed_distribution(models, generation, record.coupling)) < 1e-6
    if rule != "fixed" and scenario == "plain":
        assert len(generation.lengths) > 1


def candidates_drawn_from_q(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    accept, label, _ = record.coupling(p, q, x)
    return accept, label, q


def accepted_as_if_drawn(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, label, rejected = record.coupling(p, q, x)
    return label, label, rejected


@pytest.mark.parametrize("mutant", [candidates_drawn_from_q, accepted_as_if_drawn])
def test_other_laws_are_found_out(mutant: Coupling) -> None:
    models = Models("plain", vocab=2, seed=3)
    generation = Generation(models, "confidence")
    live = exact_distribution(generation)
    assert largest_difference(live, replayed_distribution(models, generation, record.coupling)) < 1e-6
    assert largest_difference(live, replayed_distribution(models, generation, mutant)) > 1e-3


def test_coupling_is_the_verifiers_rule() -> None:
    """Against the joint distribution of candidate, coin and emitted token, summed up directly."""
    p, q = torch.rand(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).softmax(-1)
    exact = exact_distribution(lambda randomness: one_place(randomness, p, q))
    for x in range(5):
        emitted = sum(weight for (_, _, token), weight in exact.items() if token == x)
        accept, label, rejected = record.coupling(p[None], q[None], torch.tensor([x]))
        assert emitted == pytest.approx(float(p[x]))
        assert exact[x, 1, x] / emitted == pytest.approx(float(accept))
        assert exact[x, 1, x] / float(q[x]) == pytest.approx(float(label))
        for y in range(5):
            share = exact.get((y, 0, x), 0.0) / emitted
            assert share == pytest.approx(float((1.0 - accept) * rejected[0, y]), abs=1e-12)


def one_place(randomness: Replay, p: Tensor, q: Tensor) -> Tokens:
    candidate = int(randomness.categorical(q))
    if randomness.bernoulli(min(1.0, float(p[candidate] / q[candidate]))):
        return candidate, 1, candidate
    return candidate, 0, int(randomness.categorical((p - q).clamp_min(0.0)))
