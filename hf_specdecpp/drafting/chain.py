"""Draft a chain (SpecDec++, Algorithm of section 3): draw, submit, ask whether to go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.models.causal_lm import until_end
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import NothingToDrawError, Randomness, widest
from hf_specdecpp.trees.tree import DraftTree

Drafting: TypeAlias = Generator[list[Tensor], bool | None, DraftTree]
Step: TypeAlias = Callable[[list[Tensor]], DraftStep | None]


def at_once(chain: DraftTree) -> Drafting:
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
    limit = min(max_tokens, rule.max_tokens) if rule.starts(unread) else 0
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
        return DraftTree.chain()
    ids = torch.stack(drawn)
    if tokens:
        return DraftTree.chain(tokens, scores, q, ids)
    # What follows a token that ends the text goes because of that token, not of its own value.
    tokens = until_end(ids.tolist(), eos_token_ids)
    count = len(tokens)
    return DraftTree.chain(tokens, scores[:count], q[:count], ids[:count])


def drafted_alone(row: Drafting) -> DraftTree:
    """The chain of one coroutine, for which nothing is prepared."""
    try:
        while True:
            next(row)
    except StopIteration as end:
        chain: DraftTree = end.value
        return chain


def draft_chains(rows: Sequence[Drafting], prepare: Callable[[dict[int, list[Tensor]]], bool]) -> list[DraftTree]:
    """Draft the chains of several rows, each a coroutine, step by step together. `prepare` is called before each step
    with the candidates of those that go on, by their places in `rows`; says whether they do."""
    chains: dict[int, DraftTree] = {}
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
