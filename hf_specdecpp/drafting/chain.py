"""Draft a chain (SpecDec++, section 3): draw a candidate, submit it, and continue until a stopping rule ends the chain.

The output is exact: a rule may use everything known to the draft, including the last candidate, because every drawn
candidate is submitted. No rule can drop a candidate. (`docs/specdecpp.md`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import TypeAlias

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


def at_once(chain: Chain) -> Drafting:
    """A finished chain as a coroutine that requests no draft step."""
    return chain
    yield  # makes this a coroutine


def next_step(
    session: DraftingSession, processing: Processing, input_ids: Tensor, greedy: bool, candidates: list[Tensor]
) -> DraftStep | None:
    """The draft's next step after `input_ids` `[1, length]` and `candidates`, with logits after all processors; `None`
    if nothing can be proposed. It is the `step` of `drafting`."""
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
    """Draft until the rule stops, an end-of-sequence token is drawn, or `max_tokens` are drafted.

    A coroutine, so that the rows of a batch can draft together (`draft_chains`): yields the candidates so far before
    each step, and ends if `False` is sent.

    Each read by the host waits for the device. So a candidate is read together with the signal that judges it, and if
    the rule has no signal, all candidates are read at the end (on a CPU one by one).

    Args:
        step: gets the candidates so far (0-d int64 each), runs the draft and returns its next distribution; `None` if
            no token can be proposed: then the round ends without a further draw.
        rule: the stopping rule; its own bounds apply too. The candidate at which it stops is submitted.
        randomness: draws the candidates; `None` takes the likeliest token (greedy).
        max_tokens: the most candidates.
        unread: number of tokens that the draft reads before the first candidate.

    With a head that judges "after", the step that judges a candidate also draws the next one, which stays unjudged.
    """
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
    """Drafts the chains of one sequence. `TreeDrafting` has the same interface.

    Args:
        session: the draft's side of the sequence.
        processing: logits processors that turn the draft's logits into those of q.
        randomness: draws the candidates; `None` takes the likeliest (greedy).
        eos_token_ids: nothing is drafted after these.
        rule: decides the length of each chain.

    Attributes:
        observers: rules whose `record_outcome` is called after each round.
        for_trees: whether rounds may be trees.
        branches: whether candidates may have siblings.
        makes_chains: whether `generation` turns a drafted tree of one branch into a `Chain`.
    """

    for_trees = branches = makes_chains = False

    def __init__(
        self, session: DraftingSession, processing: Processing, randomness: Randomness | None,
        eos_token_ids: frozenset[int], rule: StoppingRule,
    ) -> None:  # fmt: skip
        self.session, self.processing, self.randomness = session, processing, randomness
        self.eos_token_ids, self.rule = eos_token_ids, rule
        self.observers: list[StoppingRule] = [] if rule.looks_at_nothing else [rule]

    def refuse(self, reason: str) -> None:
        """Does nothing. `TreeDrafting` drafts no more trees after this call."""

    def longest(self, room: int, most: int) -> int:
        """Most candidates of the next round in a path. `room`: as the output may have; `most`: as the caller allows."""
        return min(room, most)

    def draft(self, input_ids: Tensor, longest: int) -> Chain:
        """Draft at most `longest` candidates after the sequence `input_ids` `[1, length]`."""
        (chain,) = draft_chains([self.step_by_step(input_ids, longest)])
        chain.passes = self.session.passes
        return chain

    def step_by_step(self, input_ids: Tensor, longest: int) -> Drafting:
        """`draft` as a coroutine, for the rows of a batch."""
        step = partial(next_step, self.session, self.processing, input_ids, self.randomness is None)
        return drafting(step, self.rule, self.randomness, longest, self.eos_token_ids, self.session.unread)

    def survival(self, chain: DraftTree) -> float | None:
        """Estimated probability that all of `chain` is accepted; `None` if unknown, or if nothing may follow it."""
        return None if self.eos_token_ids.intersection(chain.candidates) else self.rule.survival(len(chain))


def draft_chains(
    rows: Sequence[Drafting], prepare: Callable[[dict[int, list[Tensor]]], bool] | None = None
) -> list[Chain]:
    """Draft the chains of several rows (coroutines, `drafting`) step by step together. `prepare`, if any, is called
    before each step with the candidates of the unfinished rows, by index in `rows`; if it returns `False`, all end."""
    chains: dict[int, Chain] = {}
    going, goes_on = list(range(len(rows))), None
    while going:
        candidates = {}
        for place in going:
            try:
                candidates[place] = rows[place].send(goes_on)
            except StopIteration as end:
                chains[place] = end.value
        going = list(candidates)
        goes_on = prepare is None or not going or prepare(candidates)
    return [chains[place] for place in range(len(rows))]


def _read_token(rule: StoppingRule, draft: DraftStep) -> tuple[int, bool]:
    """The drawn token (-1 before the draw), and whether the rule stops there. Both are read with one wait for the
    device."""
    signal = rule.signal(draft)
    token = torch.tensor(-1) if draft.token is None else draft.token
    if signal is None:
        return int(token), rule.stops(None)
    dtype = widest(token.device)
    drawn, judged = torch.stack((token.to(dtype), signal.to(token.device, dtype))).tolist()
    return int(drawn), rule.stops(0.0 if math.isnan(judged) else judged)  # nan would stay in the rule


# Stopping rules. -----------------------------------------------------------------------------------------------------


class StoppingRule:
    """Base class: never stops before `max_tokens`. One instance serves one generation, so it may keep state.

    A rule gets one number for each candidate from `signal` (a 0-d tensor, so that the host waits once for token and
    signal), and decides in `stops`.

    Attributes:
        looks_at_nothing: whether `signal` is always `None` and `stops` always `False`.
        asks_first: whether `stops` is asked before each draw, with an estimate that is known then.
        estimator: estimates the acceptance of candidates, for a rule that uses it.
        worth: value of a further candidate in a row of a batch, as a multiple of its cost (`should_continue`).
    """

    min_tokens = 1
    looks_at_nothing = asks_first = False
    estimator: Estimator | None = None

    def survival(self, count: int) -> float | None:
        """Probability that the round's first `count` candidates are accepted; `None` if unknown, or if nothing may
        follow them."""
        return None

    @property
    def worth(self) -> float:
        return math.inf

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def begin_round(self) -> None:
        """Forget the previous round."""

    def should_draft(self, unread: int) -> bool:
        """Whether the round drafts at all. `unread`: number of tokens that the draft would have to read first."""
        return True

    def signal(self, step: DraftStep) -> Tensor | None:
        """The number that `stops` gets for this step, or `None`."""
        return None if self.estimator is None else self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        """Whether the round ends after the candidate of the step that gave `signal`; with `asks_first` before it."""
        return False

    def record_outcome(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Called after verification with the accepted nodes (`path`)."""


def should_continue(rules: Sequence[StoppingRule], rows: int) -> bool:
    """Whether the unfinished rows of a batch, which have these `rules`, should all draft another candidate. The target
    then reads one more token per row of the batch (`rows`), although some rows have stopped.

    Example: two of four rows are unfinished, and a candidate is worth 3 and 1.7 times its cost. 4.7 > 4: draft.
    """
    return sum(rule.worth for rule in rules) > rows


class FixedLength(StoppingRule):
    """Classic speculative decoding: `max_tokens` candidates every round."""

    looks_at_nothing = True


class Threshold(StoppingRule):
    """SpecDec++ (section 3): stop when the probability that at least one candidate is rejected exceeds h.

    Args:
        rates: calibrates the estimates with the outcomes of earlier rounds, and is updated by each round; `None` uses
            raw estimates, as in the paper.
        min_tokens: the fewest candidates in a round.
    """

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
