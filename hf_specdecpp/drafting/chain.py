"""Draft a chain (SpecDec++, Algorithm of section 3): draw, submit, ask a stopping rule whether to go on.

Losslessness: a rule may look at anything the draft knows, the last candidate included, because that candidate is
submitted whatever the rule says. No rule can take a candidate back. (`docs/specdecpp.md`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.estimation.estimators import AcceptanceRates, DraftStep, Estimator
from hf_specdecpp.models.causal_lm import until_end
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import NothingToDrawError, Randomness, widest
from hf_specdecpp.trees.tree import Chain, DraftTree

Drafting: TypeAlias = Generator[list[Tensor], bool | None, Chain]
Step: TypeAlias = Callable[[list[Tensor]], DraftStep | None]


def at_once(chain: Chain) -> Drafting:
    """A chain that is known, as a coroutine that asks for no step."""
    return chain
    yield  # makes it one


def point_mass(token: int, size: int, device: torch.device) -> Tensor:
    """Logits `[size]` whose softmax has all of its mass on a token."""
    scores = torch.full((size,), float("-inf"), device=device)
    scores[token] = 0.0
    return scores


def next_step(
    session: Reading, processing: Processing, input_ids: Tensor, greedy: bool, candidates: list[Tensor]
) -> DraftStep | None:
    """`step` of `drafting` after the text `input_ids` `[1, length]`."""
    if (found := session.step(candidates)) is None:
        return None
    scores, hidden = found
    if not processing.does_nothing:
        scores = processing.one(input_ids, candidates, scores).to(scores)
    if processing.may_forbid_all and processing.forbids_all(scores):  # the target decides alone
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

    A coroutine, so that the rows of a batch can draft together (`draft_chains`): it yields the candidates so far before
    each step, and ends where it is sent `False`.

    The candidates stay on the device that they are drawn on. The host reads each as it is drawn, together with what the
    rule looks at; under a rule that looks at nothing, those of a device all at the end, since each read waits.

    Args:
        step: runs the draft on the prefix and the candidates so far (0-d int64 each) and returns what it predicts next,
            `None` where it can propose no token: then the round ends, which is known before anything is drawn.
        rule: the stopping rule; its own bounds apply too.
        randomness: draws the candidates; `None` takes the likeliest token (greedy).
        max_tokens: how many candidates there is room for.
        unread: how many tokens the draft reads before the first candidate.

    The candidate that makes the rule stop has been drawn, so it is submitted: leaving it out because of what it is
    would bias the output. (The forward that judges it "after" has drawn its successor, too: one token un-judged.)
    """
    drawn: list[Tensor] = []
    tokens: list[int] = []
    scores: list[Tensor] = []
    q: list[Tensor] = []
    rule.begin_round()
    limit = min(max_tokens, rule.max_tokens) if max_tokens and rule.starts(unread) else 0
    while len(drawn) < limit:
        if (yield drawn) is False or (draft := step(drawn)) is None:
            break
        try:
            draft.token = draft.scores.argmax() if randomness is None else randomness.categorical(draft.q)
        except NothingToDrawError:  # q is nan; on a device verification finds that
            break
        if randomness is not None:
            q.append(draft.q)
        drawn.append(draft.token)
        scores.append(draft.scores)
        if rule.looks_at_nothing and draft.token.device.type != "cpu":  # from which each read waits
            continue
        token, stops = (int(draft.token), False) if rule.looks_at_nothing else _ask(rule, draft)
        tokens.append(token)
        if token in eos_token_ids or (stops and len(tokens) >= rule.min_tokens):
            break
    if not drawn:
        return Chain()
    ids = torch.stack(drawn)
    if tokens:
        return Chain(tokens, scores, q, ids)
    # What follows a token that ends the text goes because of that token, not of its own value.
    tokens = until_end(ids.tolist(), eos_token_ids)
    count = len(tokens)
    return Chain(tokens, scores[:count], q[:count], ids[:count])


class ChainDrafting:
    """Drafts the chains of one text, or none, where it has no draft or no room. `TreeDrafting` has the same answers.

    Args:
        session: what the draft has read of the text.
        processing: makes q of the draft's logits.
        randomness: draws the candidates; `None` takes the likeliest (greedy).
        eos_token_ids: nothing is drafted after these.
        rule: says how far chains go.

    Attributes:
        observers: learn what becomes of each round.
        for_trees: whether rounds may be trees.
        branches: whether candidates may have siblings.
        makes_chains: whether a tree of one branch is a chain.
    """

    for_trees = branches = makes_chains = False

    def __init__(
        self, session: Reading, processing: Processing, randomness: Randomness | None, eos_token_ids: frozenset[int],
        rule: StoppingRule,
    ) -> None:  # fmt: skip
        self.session, self.processing, self.randomness = session, processing, randomness
        self.eos_token_ids, self.rule = eos_token_ids, rule
        self.observers: list[StoppingRule] = [] if rule.looks_at_nothing else [rule]

    def refuse(self, reason: str) -> None:
        """No trees from here on, for a reason: chains need none."""

    def longest(self, room: int, most: int) -> int:
        """The longest path of the next round, which has so much room, and shall have `most` candidates."""
        return min(room, most)

    def draft(self, input_ids: Tensor, longest: int) -> Chain:
        """The candidates after the text `input_ids` `[1, length]`, none deeper than `longest`."""
        row = self.step_by_step(input_ids, longest)
        try:
            while True:
                next(row)
        except StopIteration as end:
            chain: Chain = end.value
        chain.passes = self.session.passes
        return chain

    def step_by_step(self, input_ids: Tensor, longest: int) -> Drafting:
        """The same as a coroutine, so that the rows of a batch draft together."""
        step = partial(next_step, self.session, self.processing, input_ids, self.randomness is None)
        return drafting(step, self.rule, self.randomness, longest, self.eos_token_ids, self.session.unread)

    def survival(self, chain: DraftTree) -> float | None:
        """The chance that all of its candidates stand; `None` where nothing may follow them."""
        return None if self.eos_token_ids.intersection(chain.candidates) else self.rule.survival


def draft_chains(rows: Sequence[Drafting], prepare: Callable[[dict[int, list[Tensor]]], bool]) -> list[Chain]:
    """Draft the chains of several rows, each a coroutine, step by step together. `prepare` is called before each step
    with the candidates of those that go on, by their places in `rows`; says whether they do."""
    chains: dict[int, Chain] = {}
    going, goes_on = list(range(len(rows))), None
    while going:
        asking = {}
        for place in going:
            try:
                asking[place] = rows[place].send(goes_on)
            except StopIteration as end:
                chains[place] = end.value
        going = list(asking)
        goes_on = bool(going) and prepare(asking)
    return [chains[place] for place in range(len(rows))]


def _ask(rule: StoppingRule, draft: DraftStep) -> tuple[int, bool]:
    """The token that was drawn, and whether the rule stops there. Both are read with one wait for the device."""
    token, signal = draft.token, rule.signal(draft)
    if signal is None:
        return int(token), rule.stops(None)
    if token.device.type == "cpu":
        values = [int(token), float(signal)]
    else:
        dtype = widest(token.device)
        values = torch.stack((token.to(dtype), signal.to(token.device, dtype))).tolist()
    return int(values[0]), rule.stops(0.0 if math.isnan(values[1]) else values[1])  # nan would stay with the rule


# Stopping rules. -----------------------------------------------------------------------------------------------------


class StoppingRule:
    """Base: never stops before `max_tokens`. One instance serves one generation, so it may keep state.

    A rule reads one number a candidate, `signal` (a 0-d tensor, so that the host waits once for token and signal), and
    decides in `stops`.

    Attributes:
        looks_at_nothing: whether `signal` and `stops` never say anything.
        survival: chance that all candidates so far stand; `None` where that is not known, or nothing may follow them.
        worth: of a further candidate in a row of a batch, as a multiple of its price (`pays_to_go_on`).
    """

    min_tokens = 1
    looks_at_nothing = False

    @property
    def survival(self) -> float | None:
        return None

    @property
    def worth(self) -> float:
        return math.inf

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def begin_round(self) -> None:
        """Forget the previous round."""

    def starts(self, unread: int) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the round drafts at all. `unread`: how many tokens the draft would have to read first."""
        return True

    def signal(self, step: DraftStep) -> Tensor | None:  # noqa: ARG002 - for subclasses
        """What `stops` looks at, or `None` if nothing."""
        return None

    def stops(self, signal: float | None) -> bool:  # noqa: ARG002 - for subclasses
        """Whether the round ends after the candidate that `signal` belongs to."""
        return False

    def saw(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn which candidates of a round stand."""


def pays_to_go_on(rules: Sequence[StoppingRule], rows: int) -> bool:
    """Whether another candidate for each row that goes on pays for the batch: a further column of a pass has the price
    of one for every row, whoever fills it.

    Example: two of four rows go on, for which a candidate is worth 3 and 1.7 times its price. 4.7 > 4: they do.

    Args:
        rules: of the rows that go on.
        rows: in the batch.
    """
    return sum(rule.worth for rule in rules) > rows


class FixedLength(StoppingRule):
    """Classic speculative decoding: `max_tokens` candidates every round."""

    looks_at_nothing = True


class Threshold(StoppingRule):
    """SpecDec++ (section 3): stop when the chance that at least one candidate was rejected passes h.

    Args:
        rates: calibrates the estimates by what earlier rounds said, and learns from each round; `None` takes them as
            they are, as the paper does.
        min_tokens (candidates): the fewest in a round.
    """

    def __init__(
        self, config: SpeculationConfig, estimator: Estimator, rates: AcceptanceRates | None = None, min_tokens: int = 1
    ) -> None:
        super().__init__(config.max_tokens)
        self.min_tokens, self.h, self.estimator, self.rates = min_tokens, config.threshold, estimator, rates
        self.begin_round()

    def begin_round(self) -> None:
        self.chance = 1.0
        self.estimates: list[float] = []

    def signal(self, step: DraftStep) -> Tensor | None:
        return self.estimator.estimate(step)

    def stops(self, signal: float | None) -> bool:
        # A head that judges "after" has nothing to say on the first candidate: its estimate counts as 1.
        if signal is not None:
            self.estimates.append(signal)
            self.chance *= signal if self.rates is None else self.rates.calibrated(signal)
        return 1.0 - self.chance > self.h

    def saw(self, tree: DraftTree, path: Sequence[int]) -> None:
        if self.rates is not None:  # what was looked up comes after what was drawn
            self.rates.observe(self.estimates, drawn := tree.num_drawn, min(len(path), drawn))
