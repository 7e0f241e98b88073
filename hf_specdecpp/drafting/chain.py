"""Draft a chain (SpecDec++, section 3): draw a candidate, submit it, and continue until a stopping rule ends the chain.

The output is exact: a rule may use everything known to the draft, including the last candidate, because every drawn
candidate is submitted. No rule can drop a candidate. (`docs/specdecpp.md`)"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.draft import DraftingSession
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftStep, Estimator, lag_of
from hf_specdecpp.models.causal_lm import until_end
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import NothingToDrawError, Randomness, widest
from hf_specdecpp.trees.tree import Chain, DraftTree

Drafting: TypeAlias = Generator[list[Tensor], bool | None, Chain]
Step: TypeAlias = Callable[[list[Tensor]], DraftStep | None]


def next_step(
    session: DraftingSession, processing: Processing, input_ids: Tensor, greedy: bool, candidates: list[Tensor]
) -> DraftStep | None:
    """Run the draft after `input_ids` `[1, length]` and `candidates`: a step with the logits after all processors, not
    drawn from yet. `None` if the draft has no proposal or processors forbid all tokens. `greedy`: of `DraftStep`."""
    if (found := session.propose_next(candidates)) is None:
        return None
    scores, hidden = found
    if not processing.does_nothing:
        scores = processing.one(input_ids, candidates, scores).to(scores)
    if processing.may_forbid_all and not bool(scores.amax() > -math.inf):  # no token is left, so the round ends
        return None
    return DraftStep(len(candidates), scores, hidden, session.embed, greedy)


def drafting(
    step: Step,
    rule: StoppingRule,
    randomness: Randomness | None,
    max_tokens: int,
    eos_token_ids: Collection[int] = (),
    unread: int = 1,
) -> Drafting:
    """Draft a chain until the rule stops, an end-of-sequence token is drawn, or `max_tokens` are drafted.

    A coroutine, so that the rows of a batch can share draft passes (`draft_chains`): yields the candidates so far
    before each step, ends the chain if `False` is sent, and returns the `Chain`.

    Each read by the host waits for the device. So a candidate is read together with the rule's signal, and if the rule
    has no signal, all candidates are read at the end (on a CPU one by one).

    Args:
        step: gets the candidates so far (0-d int64 tensors), runs the draft and returns its next distribution; `None`
            ends the chain, because no token can be proposed.
        rule: the stopping rule; its `min_tokens` and `max_tokens` apply too. The candidate after which it stops is
            part of the chain, even if its estimate is low.
        randomness: draws the candidates; `None` takes the likeliest token (greedy).
        unread: number of tokens that the draft reads in the first step, for `StoppingRule.should_draft`.

    A head with `inputs="after"` estimates a candidate in the step that draws the next one. So the last candidate of a
    chain has no estimate."""
    drawn, scores, q = list[Tensor](), list[Tensor](), list[Tensor]()
    tokens: list[int] = []
    rule.begin_round()
    limit = min(max_tokens, rule.max_tokens) if max_tokens and rule.should_draft(unread) else 0
    while len(drawn) < limit:
        if (yield drawn) is False or (draft := step(drawn)) is None:
            break
        if rule.asks_first and _read_token(rule, draft)[1] and len(drawn) >= rule.min_tokens:
            break  # nothing is dropped: the next candidate is not drawn
        try:
            draft.token = draft.scores.argmax() if randomness is None else randomness.categorical(draft.q)
        except NothingToDrawError:  # q is nan; on a device verification finds that
            break
        if randomness is not None:
            q.append(draft.q)
        drawn.append(draft.token)
        scores.append(draft.scores)
        if rule.looks_at_nothing and draft.token.device.type != "cpu":  # a read would wait for the device
            continue
        is_settled = rule.looks_at_nothing or rule.asks_first
        token, stops = (int(draft.token), False) if is_settled else _read_token(rule, draft)
        tokens.append(token)
        if token in eos_token_ids or (stops and len(tokens) >= rule.min_tokens):
            break
    if drawn and not tokens:
        # Tokens after an end-of-sequence token are dropped because of that token, not because of their own values.
        tokens = until_end(torch.stack(drawn).tolist(), eos_token_ids)
    return Chain(tokens, scores[: len(tokens)], q[: len(tokens)])


class ChainDrafting:
    """Drafts the chains of one sequence. `TreeDrafting` (`generation.candidate_generator`) has the same methods,
    but its `draft` is no coroutine.

    Args:
        session: the draft's side of the sequence.
        processing: logits processors that turn the draft's logits into those of q.
        randomness: draws the candidates; `None` takes the likeliest (greedy).
        eos_token_ids: nothing is drafted after these.
        rule: decides the length of each chain.

    Attributes:
        observers: objects whose `record_outcome(tree, path)` is called after each round: the rule, if it has a signal.
        for_trees: whether this is a `TreeDrafting`, so that the target must be able to read trees.
        branches: whether candidates may have siblings.
        makes_chains: whether drafted trees of one branch are converted to a `Chain` (`DraftTree.as_chain`)."""

    for_trees = branches = makes_chains = False

    def __init__(
        self, session: DraftingSession, processing: Processing, randomness: Randomness | None,
        eos_token_ids: frozenset[int], rule: StoppingRule,
    ) -> None:  # fmt: skip
        self.session, self.processing, self.randomness = session, processing, randomness
        self.eos_token_ids, self.rule = eos_token_ids, rule
        self.observers: list[StoppingRule] = [] if rule.looks_at_nothing else [rule]

    def refuse(self, reason: str) -> None:
        """Draft only chains from now on, because of `reason`: does nothing here, but `TreeDrafting` gives up trees."""

    def longest(self, room: int, most: int) -> int:
        """Maximum length of the next chain, given the output's `room` for candidates and the caller's limit `most`."""
        return min(room, most)

    def draft(self, input_ids: Tensor, longest: int) -> Drafting:
        """The coroutine (`drafting`) that drafts a chain of at most `longest` candidates after the sequence `input_ids`
        `[1, length]`; `draft_chains` runs it, alone or with those of the other rows of a batch."""
        step = partial(next_step, self.session, self.processing, input_ids, self.randomness is None)
        return drafting(step, self.rule, self.randomness, longest, self.eos_token_ids, self.session.unread)

    def survival(self, chain: DraftTree) -> float | None:
        """Estimated probability that `chain`, just drafted, is fully accepted. `None` if the rule has no estimate, or
        the chain has an end-of-sequence token: then no looked-up candidates are appended."""
        return None if self.eos_token_ids.intersection(chain.candidates) else self.rule.survival(len(chain))


def draft_chains(
    rows: Sequence[Drafting | Chain], prepare: Callable[[dict[int, list[Tensor]]], bool] | None = None
) -> list[Chain]:
    """Draft a chain with each coroutine among `rows` (`drafting`), all step by step together; other rows have their
    chain already. `prepare`, if any, is called before each step, to run the draft once for all unfinished rows: it gets
    their candidates so far, by index in `rows`. If it returns `False`, all chains end."""
    chains = {place: row for place, row in enumerate(rows) if isinstance(row, Chain)}
    going, goes_on = {place: row for place, row in enumerate(rows) if not isinstance(row, Chain)}, None
    while going:
        candidates = {}
        for place, row in list(going.items()):
            try:
                candidates[place] = row.send(goes_on)
            except StopIteration as end:
                chains[place] = end.value
                del going[place]
        goes_on = prepare is None or not going or prepare(candidates)
    return [chains[place] for place in range(len(rows))]


def _read_token(rule: StoppingRule, draft: DraftStep) -> tuple[int, bool]:
    """The step's token (-1 before the draw), and whether the rule stops. Reads both with one wait for the device."""
    signal = rule.signal(draft)
    token = torch.tensor(-1) if draft.token is None else draft.token
    if signal is None:
        return int(token), rule.stops(None)
    dtype = widest(token.device)
    # Moved first, then converted: PyTorch converts on the first device, and Apple's has no float64.
    drawn, judged = torch.stack((token.to(dtype), signal.to(token.device).to(dtype))).tolist()
    return int(drawn), rule.stops(0.0 if math.isnan(judged) else judged)  # nan would stay in the rule


# Stopping rules. -----------------------------------------------------------------------------------------------------


class StoppingRule:
    """Base class: never stops before `max_tokens`. One instance serves one generation, so it may keep state.

    After each draft step `signal` computes a number on the device, such as an estimate of acceptance, and `stops` gets
    its value on the host and decides. So the host waits once for token and signal.

    Attributes:
        min_tokens, max_tokens: the fewest and the most candidates in a round. Other limits may end a round earlier.
        looks_at_nothing: whether `signal` is always `None` and `stops` always `False`.
        asks_first: whether `stops` is called before each draw and not after it (estimators with `inputs="path"`).
        estimator: estimates the acceptance of candidates, for a rule that uses it.
        worth: estimated value of another candidate in this row of a batch, divided by its cost (`should_continue`)."""

    min_tokens = 1
    looks_at_nothing = asks_first = False
    estimator: Estimator | None = None

    def survival(self, count: int) -> float | None:
        """Estimated probability that the round's first `count` candidates are all accepted; `None` if unknown."""
        return None

    @property
    def worth(self) -> float:
        return math.inf

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def begin_round(self) -> None:
        """Called before a round's first draft step: forget the previous round."""

    def should_draft(self, unread: int) -> bool:
        """Whether the round drafts at all. `unread`: number of tokens that the draft would read in its first step."""
        return True

    def signal(self, step: DraftStep) -> Tensor | None:
        """The 0-d tensor whose value `stops` gets for this step, or `None`."""
        return None if self.estimator is None else self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        """Whether the round ends after the candidate of the latest step, whose `signal` this is; with `asks_first`
        before that candidate, which is then not drawn."""
        return False

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Called after each verification with the drafted `tree` and its accepted nodes (`path`)."""


def should_continue(rules: Sequence[StoppingRule], rows: int) -> bool:
    """Whether the rows of a batch that still draft in this round should all draft another candidate. `rules`: the rules
    of these rows. `rows`: number of all rows; the target then reads one more token for each of them.

    Example: two of four rows still draft, and their `worth` is 3 and 1.7. They go on, because 3 + 1.7 > 4."""
    return sum(rule.worth for rule in rules) > rows


def run_shared(rules: Sequence[StoppingRule], batch: Any, asking: dict[int, list[Tensor]]) -> bool:
    """For `draft_chains`: run the draft of a `batch` (`Draft.batch`) once for the rows `asking`, unless another
    candidate of each is not worth its cost: then return `False`. `rules`: of all rows."""
    goes_on = not any(asking.values()) or should_continue([rules[place] for place in asking], len(rules))
    if goes_on and batch is not None:
        batch.run_draft(asking)
    return goes_on


class FixedLength(StoppingRule):
    """Classic speculative decoding: `max_tokens` candidates every round."""

    looks_at_nothing = True


class Threshold(StoppingRule):
    """SpecDec++ (section 3): stop when the estimated probability that at least one of the round's candidates is
    rejected exceeds h, which is `config.threshold`.

    Args:
        rates: calibrates the estimates with the outcomes of earlier rounds, and is updated by each round; `None` uses
            raw estimates, as in the paper.
        min_tokens: the fewest candidates in a round."""

    def __init__(
        self, config: SpeculationConfig, estimator: Estimator, rates: AcceptanceRates | None = None, min_tokens: int = 1
    ) -> None:
        super().__init__(config.max_tokens)
        self.min_tokens, self.h, self.estimator, self.rates = min_tokens, config.threshold, estimator, rates
        self.asks_first = lag_of(estimator) < 0
        self.begin_round()

    def begin_round(self) -> None:
        self.chance = 1.0
        self.estimates: list[float] = []

    def stops(self, signal: float | None) -> bool:
        # A head that judges "after" has no estimate for the first candidate, which counts as 1.
        if signal is not None:
            self.estimates.append(signal)
            self.chance *= signal if self.rates is None else self.rates.calibrated(signal)
        return 1.0 - self.chance > self.h

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        if self.rates is not None:  # looked-up candidates come after drawn ones
            self.rates.record_chain(self.estimates, drawn := tree.num_drawn, min(len(path), drawn))
