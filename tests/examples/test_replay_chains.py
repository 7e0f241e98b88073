"""Chains that are replayed: text and rounds are distributed as live ones are, by enumeration on toy models; greedy ones
are the live rounds; and no rule is faster than the oracle."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from chains import BASELINES, ChainReplay, Seen, oracle, recorded_estimator
from record import KNOWN, Record, coupling, known_of, record
from support.enumeration.exact_distribution import Probs, Tokens, exact_distribution
from support.enumeration.plans import tell
from support.enumeration.toy_rounds import RULES, Models, ToyRound, draft_chain
from support.targets.models import VOCAB_SIZE, Rounds, assistant_for, configured, prompt, tiny
from sweep import PAPER, sweep
from texts import Text
from torch import Tensor

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.chain import StoppingRule
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead, Calibration
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftProbability, scalar_features
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.trees.tree import Chain

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

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
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
            rule = generation.new_rule()
            if isinstance(rule.estimator, DraftProbability):  # which reads q, where a record has numbers
                rule.estimator = recorded_estimator("q", None, greedy=False)
            rounds = replay.rounds(rule)
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
    return known_of(tokens, scalar_features(q, tokens), zeros, zeros).tolist()


def largest_difference(a: Probs, b: Probs) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


CASES = [
    *(("plain", 2, rule) for rule in ("fixed", *BASELINES, "threshold/draft probability")),
    *((scenario, 3, "confidence") for scenario in ("plain", "end of sequence", "one-hot rows")),
    ("disjoint supports", 4, "fixed"),
]


@pytest.mark.daily("plain-2-fixed", "plain-2-adaedl", "end of sequence-3-confidence")
@pytest.mark.parametrize(("scenario", "vocab", "rule"), CASES)
def test_law_of_text_and_rounds(scenario: str, vocab: int, rule: str) -> None:
    models = Models(scenario, vocab, seed=3)
    generation = Generation(models, rule)
    live = exact_distribution(generation)
    assert sum(live.values()) == pytest.approx(1.0)
    assert largest_difference(live, replayed_distribution(models, generation, coupling)) < 1e-6
    if rule != "fixed" and scenario == "plain":
        assert len(generation.lengths) > 1


def candidates_drawn_from_q(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    accept, label, _ = coupling(p, q, x)
    return accept, label, q


def accepted_as_if_drawn(p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, label, rejected = coupling(p, q, x)
    return label, label, rejected


@pytest.mark.parametrize("mutant", [candidates_drawn_from_q, accepted_as_if_drawn])
def test_other_laws_are_found_out(mutant: Coupling) -> None:
    models = Models("plain", vocab=2, seed=3)
    generation = Generation(models, "confidence")
    live = exact_distribution(generation)
    assert largest_difference(live, replayed_distribution(models, generation, coupling)) < 1e-6
    assert largest_difference(live, replayed_distribution(models, generation, mutant)) > 1e-3


NEW_TOKENS, PROMPT_LENGTH = 48, 12
GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
LABEL, Q_OF_TOKEN = KNOWN.index("label"), KNOWN.index("q_of_token")
COSTS = {"draft": 0.02, "verify": [0.1, 0.1, 0.1, 0.16], "read": 0.001}
LIVE_RULES: list[dict[str, Any]] = [
    {"rule": "fixed", "num_tokens": 3},
    {"rule": "threshold", "threshold": 0.7, "min_tokens": 2, "max_tokens": 5},
    {"rule": "throughput", "costs": COSTS},
]


def head(inputs: str, hidden_size: int = 32) -> AcceptanceHead:
    """With weights and a calibration that matter."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        made = AcceptanceHead(hidden_size, num_blocks=1, inputs=inputs, rank=8)
        for parameter in made.parameters():
            parameter.normal_(std=0.2)
    made.calibration = {mode: Calibration(0.3, [0.8, 1.5, 2.0]) for mode in ("sampled", "greedy")}
    return made


@pytest.mark.daily("llama-q")
@pytest.mark.parametrize("judged_by", ["q", "before", "after"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_greedy_replays_are_the_live_runs(family: str, judged_by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny(family)
    assistant = assistant_for(target)
    assistant.head = None if judged_by == "q" else head(judged_by)
    ids = target.generate(prompt(PROMPT_LENGTH), **GREEDY)[0].tolist()
    answer = ids[PROMPT_LENGTH:]
    end = next((token for token in answer if answer.index(token) > NEW_TOKENS // 2), None)
    target.generation_config.eos_token_id = end  # candidates may end a text, too
    ids = target.generate(prompt(PROMPT_LENGTH), **GREEDY)[0].tolist()
    text = Text(ids, PROMPT_LENGTH, PROMPT_LENGTH + NEW_TOKENS, frozenset() if end is None else frozenset([end]))
    replay, lengths = ChainReplay(text, record(text, assistant, target, Sampling(0.0, 0), seed=0)), set()
    for knobs in LIVE_RULES:
        configured(assistant, tree=False, **knobs)
        assistant.memory.clear()
        with monkeypatch.context() as patch:
            rounds = Rounds(patch)
            live = target.generate(prompt(PROMPT_LENGTH), assistant_model=assistant, **GREEDY)
        estimator = recorded_estimator("q" if judged_by == "q" else "head", assistant.head, greedy=True)
        replayed = replay.rounds(
            make_rule(
                assistant.speculation, estimator, rates=AcceptanceRates(), min_tokens=assistant.decisions.min_tokens
            )
        )
        assert live[0].tolist() == ids
        assert [(drafted, accepted) for drafted, accepted, _ in replayed] == rounds.outcomes, knobs
        lengths |= {drafted for drafted, _ in rounds.outcomes}
    assert len(lengths) > 2


def test_labels_are_those_of_the_verifier() -> None:
    """And q that of the warped draft, as a generation draws from it."""
    target = tiny("llama")
    assistant = assistant_for(target)
    torch.manual_seed(1)
    ids = target.generate(prompt(PROMPT_LENGTH), max_new_tokens=20, do_sample=True, top_k=0, temperature=0.8)[
        0
    ].tolist()
    recorded = record(Text(ids, PROMPT_LENGTH, PROMPT_LENGTH + 20), assistant, target, Sampling(0.8, 0), 0, length=3)
    draft = assistant.drafter.model
    chains = iter(recorded["off_text"])
    for number, place in enumerate(range(PROMPT_LENGTH + 1, len(ids))):
        p, q = (law_after(model, ids[:place]) for model in (target, draft))
        label = min(1.0, float(p[ids[place]] / q[ids[place]]))
        seen = recorded["on_text"][number]
        assert [seen[LABEL], seen[Q_OF_TOKEN]] == pytest.approx([label, float(q[ids[place]])], rel=1e-4)
        if not recorded["stands"][number]:
            found = next(chains)
            chain = [int(seen[0]) for seen in found]
            for i, token in enumerate(chain):
                p, q = (law_after(model, ids[:place] + chain[:i]) for model in (target, draft))
                expected = [min(1.0, float(p[token] / q[token])), float(q[token])]
                assert [found[i][LABEL], found[i][Q_OF_TOKEN]] == pytest.approx(expected, rel=1e-4)
    assert next(chains, None) is None
    assert len(recorded["off_text"]) > 1


def law_after(model: Any, ids: list[int]) -> Tensor:
    with torch.no_grad():
        return (model(torch.tensor([ids])).logits[0, -1].float() / 0.8).softmax(-1)


def made_up(seed: int, length: int = 40, chain: int = 20) -> ChainReplay:
    """A text whose candidates stand by chance."""
    draw, replay = random.Random(seed), ChainReplay.__new__(ChainReplay)
    replay.text = Text(list(range(1, length + 2)), 1, length + 1)

    def seen(token: int, label: float) -> Seen:
        return Seen(token, min(1.0, label * draw.uniform(0.8, 1.2)), draw.random(), label, 0.0)

    labels = [draw.betavariate(3, 1) for _ in range(length)]
    replay.on_text = [seen(place, label) for place, label in enumerate(labels[:-1])]
    replay.off_text = {
        place: [seen(VOCAB_SIZE, draw.random() * 0.8) for _ in range(chain)]
        for place, label in enumerate(labels[:-1])
        if draw.random() > label
    }
    return replay


@pytest.mark.daily("costs1")
@pytest.mark.parametrize("costs", [PAPER, Costs(0.05, (0.1, 0.1, 0.1, 0.18)), Costs(0.2, (0.1,), 0.01)])
def test_no_rule_is_faster_than_the_oracle(costs: Costs) -> None:
    replays = [made_up(seed) for seed in range(12)]
    bound, found = oracle(replays, costs).speed(costs), sweep(replays, None, False, {"these": costs})
    assert {row["family"] for row in found["best"]["these"]} >= {"oracle", "informed bound", "throughput (q)", "fixed"}
    for row in found["best"]["these"]:
        assert row["tokens_per_second"] <= bound * (1.0 + 1e-9), row
        assert row["of_oracle"] == pytest.approx(row["tokens_per_second"] / bound)


def test_oracle_drafts_exactly_what_stands_where_passes_cost_the_same() -> None:
    replay = made_up(3)
    outcomes = oracle([replay], PAPER)
    start, rounds, end = replay.text.first, 0, len(replay.text.ids)
    while start < end:
        start, rounds = start + replay.run_of(start) + 1, rounds + 1
    assert (outcomes.rounds, outcomes.rates["discard_rate"]) == (rounds, 0.0)
    assert outcomes.drafted == outcomes.accepted == outcomes.generated - rounds
