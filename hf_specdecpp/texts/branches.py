"""Chains that the draft would propose at many places of one text, and the target's probabilities of their candidates.

The text and the chains that branch off it are one token tree (`trees/attention.py`): the draft reads one level of all
chains a pass, the target many chains a pass.

For example, with `ids` of 10 tokens, `starts` 4 and 7 and `length` 3, the draft reads the first 7 tokens once, and then
two candidates a pass, three times: those at depth 0 of both chains, at depth 1 and at depth 2. A candidate of the first
chain sees the tokens 0 to 3 and the candidates before it in its own chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.estimators import scalar_features
from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.reader import Reader
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.sampling.randomness import draw_rows
from hf_specdecpp.trees.attention import check_tree, tree_inputs

ROWS_AT_ONCE = 128  # candidates whose p or q [rows, vocab] are in memory together
NODES_AT_ONCE = 1024  # candidates in one target pass


@dataclass
class DraftedChains:
    """Chains on a text, c of them with k candidates each."""

    starts: Tensor  # `[c]`, how many tokens of the text come before each chain, ascending
    tokens: Tensor  # `[c, k]`, the candidates
    scalars: Tensor  # `[c, k, 6]`, `scalar_features` of each
    hidden: Tensor  # `[c, k + 1, hidden_size]`, the state that q of each candidate came from, and the one at the last


@dataclass(frozen=True)
class ReadText:
    """A text, and the target's states along it, `[1, n, width]`, where a draft reads them."""

    ids: list[int]
    states: Tensor | None = None

    @classmethod
    def by(cls, target: CausalLM, drafter: Draft, ids: list[int]) -> ReadText:
        return cls(ids, target_states(target, drafter, ids))


@dataclass(frozen=True)
class Drawing:
    """How candidates come from a draft's states."""

    to_q: Callable[[Tensor], Tensor]  # of logits `[n, vocab]`
    vocab_size: int  # of the target
    generator: torch.Generator | None = None  # draws the candidates; `None` takes the likeliest (greedy)

    def candidates(self, drafter: Any, states: Tensor) -> tuple[Tensor, Tensor]:
        """A candidate from each state `[n, hidden_size]`, and its scalars `[n, 6]`."""
        tokens, scalars, greedy = [], [], self.generator is None
        for rows in states.split(ROWS_AT_ONCE):
            q = self.to_q(drafter.logits(rows, self.vocab_size))
            tokens.append(q.argmax(-1) if greedy else draw_rows(q, self.generator))
            scalars.append(scalar_features(q, tokens[-1], greedy=greedy))
        return torch.cat(tokens), torch.cat(scalars)


def together(starts: Sequence[int] | Tensor, *models: CausalLM) -> Sequence[Tensor]:
    """The starts in groups that all of the models read together: all in one, unless a model cannot read a tree."""
    starts = torch.as_tensor(starts, dtype=torch.long)
    if not len(starts):
        return ()
    try:
        for model in models:
            check_tree(model)
    except ValueError:
        return starts.split(1)
    return (starts,)


@torch.no_grad()
def draft_chains(
    drafter: Any,
    text: ReadText,
    starts: Tensor,
    length: int,
    drawing: Drawing,
) -> DraftedChains:
    """Draft `length` candidates after `text.ids[:start]` for every start, whatever they are (an end of text, too).

    A block draft has as many as its block at most, and does not read the last: there `hidden` is the one before.

    Args:
        starts: `[c]` int64, ascending, each at least 1, for a block at least 2; one group of `together`.
    """
    if drafter.blocks_after is not None:
        return _draft_blocks(drafter, text, starts, length, drawing)
    count, device = len(starts), drafter.device
    starts = starts.to(device)
    branching = BranchingText(drafter, text.ids[: int(starts[-1])], text.states)
    hidden, tokens, scalars = [branching.states[starts - 1]], [], []
    one_level = torch.eye(count, dtype=torch.bool, device=device)
    for depth in range(length):
        token, row = drawing.candidates(drafter, hidden[-1])
        tokens.append(token)
        scalars.append(row)
        below = one_level.repeat(1, depth + 1)
        depths = (starts + torch.arange(depth + 1, device=device)[:, None]).flatten()
        hidden.append(branching.read(token, starts, below, depths, None if text.states is None else hidden[-1]))
    return DraftedChains(starts, torch.stack(tokens, 1), torch.stack(scalars, 1), torch.stack(hidden, 1))


def _draft_blocks(drafter: Any, text: ReadText, starts: Tensor, length: int, drawing: Drawing) -> DraftedChains:
    starts, ids = starts.to(drafter.device), torch.tensor([text.ids], device=drafter.device)
    states: Any = text.states
    hidden = drafter.blocks_after(ids, states.to(drafter.device), starts[None] - 1)[0, :, :length]
    drawn = [drawing.candidates(drafter, rows) for rows in hidden.unbind(1)]
    tokens, scalars = (torch.stack(parts, 1) for parts in zip(*drawn, strict=True))
    return DraftedChains(starts, tokens, scalars, torch.cat((hidden, hidden[:, -1:]), 1))


@torch.no_grad()
def target_states(target: CausalLM, drafter: Draft, ids: list[int]) -> Tensor | None:
    """What a draft reads of the target along a text, `[1, n, width]`; `None` where that is nothing."""
    if drafter.reads is None:
        return None
    reader = Reader(target)  # not below: it begins by reading a token, which would be caught, too
    with TargetStates(target, drafter.reads) as caught:
        reader.hidden_states(torch.tensor([ids], device=input_device(target)))
        return caught.take()


@torch.no_grad()
def target_probabilities(
    reader: Reader, ids: list[int], starts: Tensor, tokens: Tensor, to_p: Callable[[Tensor], Tensor], vocab_size: int
) -> Tensor:
    """p of every candidate `[c, k]` given those before it in its chain; `reader` wraps the target as if it were a
    draft. `ids` and `starts` are as in `draft_chains`; `to_p` makes p of logits `[n, vocab]`."""
    device = reader.device
    starts, tokens = starts.to(device), tokens.to(device)
    text = BranchingText(reader, ids[: int(starts[-1])])
    length = tokens.shape[1]
    found = []
    for chains in torch.arange(len(starts), device=device).split(max(NODES_AT_ONCE // length, 1)):
        own, begin = tokens[chains], starts[chains]
        count, inner = len(chains), length - 1
        before = text.states[begin - 1][:, None]
        if inner:
            below = torch.ones((inner, inner), dtype=torch.bool, device=device).tril()
            below = torch.block_diag(*[below] * count).bool()
            depths = (begin[:, None] + torch.arange(inner, device=device)).flatten()
            states = text.read(own[:, :-1].flatten(), begin.repeat_interleave(inner), below, depths)
            before = torch.cat((before, states.view(count, inner, -1)), dim=1)
            text.forget(count * inner)
        rows = zip(before.flatten(0, 1).split(ROWS_AT_ONCE), own.flatten().split(ROWS_AT_ONCE), strict=True)
        p = [to_p(reader.logits(states, vocab_size)).gather(-1, token[:, None])[:, 0] for states, token in rows]
        found.append(torch.cat(p).view(count, length))
    return torch.cat(found)


class BranchingText:
    """A text in a model's cache, and passes over nodes that branch off it; `states` are its last ones `[length,
    hidden_size]`.

    A conditioned draft is given the target's, `[1, length or more, width]`, and leaves the first token out.
    """

    def __init__(self, reader: Reader, ids: list[int], states: Tensor | None = None) -> None:
        self.reader, self.length, self.first = reader, len(ids), int(states is not None)
        self.cache = DynamicCache(config=reader.text_config)
        self.cache.activate_past_recording()  # sliding windows must not drop what earlier branches see
        conditions: dict[str, Any] = {} if states is None else {"states": states[:, : len(ids) - 1].to(reader.device)}
        tokens = torch.tensor([ids[self.first :]], device=reader.device)
        hidden = reader.hidden_states(tokens, self.cache, **conditions)[0]
        self.states = functional.pad(hidden, (0, 0, self.first, 0))

    def read(
        self, tokens: Tensor, starts: Tensor, below: Tensor, depths: Tensor, states: Tensor | None = None
    ) -> Tensor:
        """States `[n, hidden_size]` at n more nodes.

        Args:
            tokens: `[n]`.
            starts: `[n]`, how many tokens of the text each sees.
            below: bool `[n, fed + n]`, which branching nodes each sees: of those fed so far, then of these.
            depths: `[fed + n]`, the place of each branching node.
            states: `[n, hidden_size]`, a conditioned draft's own before each node.
        """
        inputs: dict[str, Any] = {} if states is None else {"states": states[None]}
        text = torch.arange(self.first, self.length, device=tokens.device)
        if int(starts[0]) < self.length or len(starts.unique()) > 1:  # else it is plain text, for any model
            ancestors = torch.cat((text < starts[:, None], below), dim=1)
            places = torch.cat((text, depths)) - self.first
            inputs |= tree_inputs(self.reader.model, self.cache, ancestors, places, num_prefix=0)
        return self.reader.hidden_states(tokens[None], self.cache, **inputs)[0]

    def forget(self, count: int) -> None:
        """Drop the last `count` nodes."""
        self.cache.crop(-count)
