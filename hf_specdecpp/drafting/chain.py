"""Draft a chain (SpecDec++, Algorithm of section 3): draw, submit, ask whether to go on."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hf_specdecpp.drafting.session import Reading
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Randomness


@dataclass
class Chain:
    """What a round submits.

    Attributes:
        tokens: the candidates.
        scores: for each candidate, `[vocab]` float32 logits whose softmax q it was drawn from.
    """

    tokens: list[int]
    scores: list[Tensor]


Drafting: TypeAlias = Generator[list[int], bool | None, Chain]


def stepper(
    session: Reading, processing: Processing, input_ids: Tensor, greedy: bool
) -> Callable[[list[int]], DraftStep | None]:
    """`step` of `draft_chain` after the text `input_ids` `[1, length]`."""

    def step(candidates: list[int]) -> DraftStep | None:
        logits, hidden = session.step(candidates)
        scores = processing.one(input_ids, candidates, logits)
        if processing.forbids_all(scores):  # of what the draft can say: the target decides alone
            return None
        return session.draft_step(len(candidates), scores, hidden, greedy)

    return step


def drafting(
    step: Callable[[list[int]], DraftStep | None],
    rule: StoppingRule,
    randomness: Randomness | None,
    max_tokens: int,
    eos_token_ids: Collection[int] = (),
    unread: int = 1,
) -> Drafting:
    """Draft until the rule stops, an end-of-sequence token is drawn, or `max_tokens` are drafted.

    A coroutine, so that the rows of a batch can draft together (`draft_chains`): it yields the candidates so far before
    each step, and ends where it is sent `False`.

    Args:
        step: runs the draft on the prefix and the candidates so far and returns what it predicts next, `None` where it
            can propose no token: then the round ends, which is known before anything is drawn.
        rule: the stopping rule; its own bounds apply too.
        randomness: draws the candidates; `None` takes the likeliest token (greedy).
        max_tokens: how many candidates there is room for.
        unread: how many tokens the draft reads before the first candidate.

    The candidate that makes the rule stop has been drawn, so it is submitted: leaving it out because of what it is
    would bias the output. (The forward that judges it "after" has also drawn its successor: the paper's one un-judged
    token of a round.)
    """
    tokens: list[int] = []
    scores: list[Tensor] = []
    rule.begin_round()
    limit = min(max_tokens, rule.max_tokens) if rule.starts(unread) else 0
    while len(tokens) < limit:
        if (yield tokens) is False or (draft := step(tokens)) is None:
            break
        draft.token = draft.scores.argmax() if randomness is None else randomness.categorical(draft.q)
        token, signal = _to_host(draft.token, rule.signal(draft))
        tokens.append(token)
        scores.append(draft.scores)
        stops = rule.stops(signal)
        if token in eos_token_ids or (stops and len(tokens) >= rule.min_tokens):
            break
    return Chain(tokens, scores)


def draft_chain(
    step: Callable[[list[int]], DraftStep | None],
    rule: StoppingRule,
    randomness: Randomness | None,
    max_tokens: int,
    eos_token_ids: Collection[int] = (),
    unread: int = 1,
) -> Chain:
    """Draft one chain, alone: the arguments are those of `drafting`."""
    return drafted_alone(drafting(step, rule, randomness, max_tokens, eos_token_ids, unread))


def drafted_alone(row: Drafting) -> Chain:
    """The chain of one coroutine, for which nothing is prepared."""
    return draft_chains([row], lambda _: True)[0]


def draft_chains(rows: Sequence[Drafting], prepare: Callable[[dict[int, list[int]]], bool]) -> list[Chain]:
    """Draft the chains of several rows, step by step together.

    Args:
        rows: one coroutine each.
        prepare: called before each step with the candidates of those rows that go on, by their places in `rows`; says
            whether they do.
    """
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


def _to_host(token: Tensor, signal: Tensor | None) -> tuple[int, float | None]:
    """Both numbers with one wait for the device."""
    if signal is None:
        return int(token), None
    values = torch.stack((token.double(), signal.double())).tolist()
    return int(values[0]), values[1]
