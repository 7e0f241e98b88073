"""Rounds of product code on toy models: a target and a draft that are tables, for `exact_distribution`."""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp import AcceptanceHead, SpeculationConfig
from hf_specdecpp.drafting.chain import Step, StoppingRule, draft_chains, drafting
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftProbability, DraftStep, Estimator
from hf_specdecpp.generation.setup import make_rule
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.trees.tree import Chain
from hf_specdecpp.trees.verification import Verification, outcomes, verify_sampled
from support.enumeration.exact_distribution import Tokens

HIDDEN_SIZE, EOS, IMPOSSIBLE = 4, 0, float("-inf")
BOUNDS = [(1, 3), (1, 1), (2, 3), (3, 3), (1, 2), (2, 2)]  # (min_tokens, max_tokens)

# Thresholds with which rounds of several lengths occur on these tables (a test asserts it).
RULES: dict[str, dict[str, Any]] = {
    "fixed": {},
    "threshold/draft probability": {"threshold": 0.6},
    "threshold/after, tied": {"threshold": 0.5},
    "threshold/after, untied": {"threshold": 0.5},
    "threshold/before": {"threshold": 0.6},
    "threshold/path": {"threshold": 0.7},
    "throughput/draft probability": {"costs": {"draft": 0.2, "verify": [1.0]}},
    "throughput/after, untied": {"costs": {"draft": 0.2, "verify": [1.0]}},
    "throughput/before": {"costs": {"draft": 0.2, "verify": [1.0]}},
    "throughput/path": {"costs": {"draft": 0.2, "verify": [1.0]}},
}


def at_once(
    candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """As `verify_sampled` does on a device."""
    return randomness.outcome(*outcomes(candidates, None, p, q, verification))


VERIFIERS: dict[str, Callable[..., tuple[int, int]]] = {
    "block": partial(verify_sampled, verification="block"),
    "token": partial(verify_sampled, verification="token"),
    "block, at once": partial(at_once, verification="block"),
    "token, at once": partial(at_once, verification="token"),
}


def draft_chain(
    step: Step,
    rule: StoppingRule,
    randomness: Randomness | None,
    max_tokens: int,
    eos_token_ids: Collection[int] = (),
    unread: int = 1,
) -> Chain:
    """Draft one chain, alone: the arguments are those of `drafting`."""
    rows = [drafting(step, rule, randomness, max_tokens, eos_token_ids, unread)]
    return draft_chains(rows)[0]


def top_2(scores: Tensor) -> Tensor:
    return scores.where(scores >= scores.topk(2).values[-1], IMPOSSIBLE)


def only(scores: Tensor, tokens: list[int]) -> Tensor:
    kept = torch.full_like(scores, IMPOSSIBLE)
    kept[tokens] = scores[tokens]
    return kept


def one_hot_or_not(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """One row in three has a certain target, one a certain draft, one both (not always of the same token)."""
    kind = int(p.abs().sum() * 1000) % 3
    return (only(p, [int(p.argmax())]) if kind != 0 else p, only(q, [int(q.argmax())]) if kind != 1 else q)


# What becomes of a pair of random rows (the target's scores, the draft's).
SCENARIOS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "plain": lambda p, q: (p, q),
    "temperature": lambda p, q: (p / 0.6, q / 0.6),
    "top-k": lambda p, q: (top_2(p), top_2(q)),
    "disjoint supports": lambda p, q: (only(p, [0, 1]), only(q, [2, 3])),
    "one-hot rows": one_hot_or_not,
    "p equals q": lambda p, q: (p, p),
    "p almost q": lambda p, q: (p, p + 1e-15 * q),
    "end of sequence": lambda p, q: (p, q),
    "draft vocabulary": lambda p, q: (p, only(q, [1, 2])),
    "nothing to propose": lambda p, q: (p, only(q, [1, 2] if int(p.abs().sum() * 1000) % 3 else [])),
}


class Models:
    """Target and draft: a random row for every prefix, made when it is first asked for."""

    def __init__(self, scenario: str, vocab: int, seed: int) -> None:
        self.shape_rows, self.vocab = SCENARIOS[scenario], vocab
        self.eos = {EOS} if scenario == "end of sequence" else set()
        self.generator = torch.Generator().manual_seed(seed)
        self.embeddings = torch.randn(vocab, HIDDEN_SIZE, generator=self.generator)
        self.rows: dict[Tokens, tuple[Tensor, Tensor, Tensor]] = {}
        self.softmaxes: dict[tuple[Tokens, int], Tensor] = {}

    def at(self, prefix: Tokens) -> tuple[Tensor, Tensor, Tensor]:
        """Scores of the target, scores of the draft, hidden state of the draft."""
        if prefix not in self.rows:
            scores = 1.5 * torch.randn(2, self.vocab, generator=self.generator, dtype=torch.float64)
            hidden = 2.0 * torch.randn(HIDDEN_SIZE, generator=self.generator)
            self.rows[prefix] = (*self.shape_rows(scores[0], scores[1]), hidden)
        return self.rows[prefix]

    def p(self, prefix: Tokens) -> Tensor:
        return self.probs(prefix, 0)

    def q(self, prefix: Tokens) -> Tensor:
        return self.probs(prefix, 1)

    def probs(self, prefix: Tokens, whose: int) -> Tensor:
        if (prefix, whose) not in self.softmaxes:
            self.softmaxes[prefix, whose] = self.at(prefix)[whose].softmax(dim=-1)
        return self.softmaxes[prefix, whose]


def make_estimator(name: str, seed: int) -> Estimator:
    """The estimator of an entry of `RULES`; heads have random weights that matter to their verdict."""
    if name in ("q", "fixed") or "draft probability" in name:
        return DraftProbability()
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        if "path" in name:
            head = AcceptanceHead(HIDDEN_SIZE, inputs="path")
            head.output.weight.normal_()
        elif "before" in name:
            head = AcceptanceHead(HIDDEN_SIZE, num_blocks=1, inputs="before", rank=4)
            for layer in (head.output, head.from_scalars[-1]):  # an untrained head only repeats q(y)
                assert isinstance(layer, nn.Linear)
                layer.weight.normal_()
        else:
            head = AcceptanceHead(HIDDEN_SIZE, num_blocks=2, tied="untied" not in name)
            head.output.weight.mul_(3.0)
    return head


class ToyRound:
    """One or more rounds of product code. Call it with a randomness for the tokens that one round emits.

    `drafted`, `accepted`: of the latest round. `lengths`, `outcomes`: numbers of candidates, and of accepted ones, of
    all rounds so far."""

    def __init__(
        self, models: Models, rule: str, bounds: tuple[int, int] = (1, 3), seed: int = 0, verifier: str = "block"
    ) -> None:
        self.models, self.estimator, self.verifier = models, make_estimator(rule, seed), VERIFIERS[verifier]
        kind: Any = rule.split("/")[0]
        self.config = SpeculationConfig(rule=kind, num_tokens=bounds[1], max_tokens=bounds[1], **RULES[rule])
        self.min_tokens = bounds[0]
        self.drafted, self.accepted = 0, 0
        self.lengths, self.outcomes = set[int](), set[int]()

    def __call__(self, randomness: Randomness) -> Tokens:
        return self.run(randomness, self.new_rule())

    def new_rule(self) -> StoppingRule:
        return make_rule(self.config, self.estimator, rates=AcceptanceRates(), min_tokens=self.min_tokens)

    @torch.inference_mode()
    def run(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens = ()) -> Tokens:
        """A round after `prefix`, which is returned together with what was emitted."""
        chain = self.draft(randomness, rule, prefix)
        self.drafted = len(chain)
        self.lengths.add(self.drafted)
        after = [(*prefix, *chain.candidates[:count]) for count in range(self.drafted + 1)]
        p = torch.stack([self.models.p(text) for text in after])
        q = torch.stack(chain.drawn_from).softmax(dim=-1) if chain.scores else p[:0]
        self.accepted, token = self.verify(chain.candidates, p, q, randomness, prefix)
        self.outcomes.add(self.accepted)
        emitted = [*chain.candidates[: self.accepted], token]
        ends = [place + 1 for place, each in enumerate(emitted) if each in self.models.eos]
        return (*prefix, *emitted[: min(ends, default=len(emitted))])

    # Mutants override these two.

    def draft(self, randomness: Randomness, rule: StoppingRule, prefix: Tokens) -> Chain:
        return draft_chain(self.stepper(prefix), rule, randomness, max_tokens=3, eos_token_ids=self.models.eos)

    def verify(
        self, candidates: list[int], p: Tensor, q: Tensor, randomness: Randomness, prefix: Tokens
    ) -> tuple[int, int]:
        return self.verifier(candidates, p, q, randomness)

    def stepper(self, prefix: Tokens) -> Step:
        def step(candidates: list[Tensor]) -> DraftStep | None:
            _, scores, hidden = self.models.at((*prefix, *map(int, candidates)))
            if not bool(scores.isfinite().any()):
                return None
            return DraftStep(len(candidates), scores, hidden, embed=lambda token: self.models.embeddings[token])

        return step


class OneUniform:
    """Answers every question of a round with the same random number u: keeps the interval in which u must still lie."""

    def __init__(self, randomness: Randomness) -> None:
        self.categorical, self.randomness = randomness.categorical, randomness
        self.low, self.high = 0.0, 1.0

    def bernoulli(self, probability: float) -> bool:
        bound = min(max(probability, self.low), self.high)
        answer = self.randomness.bernoulli((bound - self.low) / (self.high - self.low))
        self.low, self.high = (self.low, bound) if answer else (bound, self.high)
        return answer
