"""A round's steps as functions of tensors (`RoundSteps`), as captured rounds take them: a model's are `ModelSteps`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_specdecpp.captured.copies import for_groups
from hf_specdecpp.captured.rooms import RoomCache, num_room_layers
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.trees.attention import inputs_in_place


class Window(NamedTuple):
    """What a draft reads at the beginning of a round: the last tokens of each text, then dummies, `[texts, n]`;
    `states` `[texts, n, size]` of the target before each, for a draft that reads any; and the place of each text's
    `last` token."""

    tokens: Tensor
    states: Tensor | None
    last: Tensor


class Level(NamedTuple):
    """Nodes that were drawn after a step, and are read in the next: `tokens` `[texts, width]`, their parents' places in
    the level above, and which of the n nodes of a round each of them sees, `[texts, width, n]` bool."""

    tokens: Tensor
    parents: Tensor
    seen: Tensor


# After the window and after each level: logits `[texts, m, vocab]` and hidden states `[texts, m, size]` of its m nodes.
Unrolled = Generator[tuple[Tensor, Tensor], Level, None]


class RoundSteps(ABC):
    """What drafts in captured rounds. It keeps nothing of a text: its caches are given to it.

    Args:
        drafter: whose model is captured; `key` says what is, for those who keep graphs.
        size: of the target's states, for a draft that reads any.

    Attributes:
        again: tokens of the text that are read a second time in the next round.
        least, most: steps that each round has to take, so that all caches hold the window, and of the deepest one.
        draws_trees: whether levels may have several nodes.
        shares_cache: whether it reads its target's cache in the place of one of its own.
    """

    again, least, most = 0, 1, float("inf")
    draws_trees, shares_cache = True, False
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    embed: Callable[[Tensor], Tensor]

    def __init__(self, drafter: Any, vocab_size: int, key: Hashable, size: int | None) -> None:
        self.vocab_size, self.key, self.size = vocab_size, key, size
        self.dtype, self.device, self.embed = drafter.dtype, drafter.device, drafter.embed

    @abstractmethod
    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:
        """Read the window, then each level that is sent; `depths` `[n]`, from 0 on, are levels of nodes that there may
        be. The cache holds the text before the window. What its length is afterwards does not matter."""

    def read(self, cache: RoomCache, window: Window) -> None:
        """Read a window alone, after which the cache holds all of it but the last `again` tokens."""
        before = cache.length.clone()
        steps = self.unroll(cache, window, window.last.new_zeros(1))
        logits, _ = next(steps)
        nothing = torch.zeros((len(logits), 1), dtype=torch.long, device=logits.device)
        for _ in range(self.least - 1):
            steps.send(Level(nothing, nothing, nothing[..., None] > 0))
        cache.length.copy_(before + (window.last + 1 - self.again).clamp_min(0))


class ModelSteps(RoundSteps):
    """Of a draft model, or an early exit of the target, whose states it may read."""

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        self.drafter = drafter
        fusion = drafter.fusion
        super().__init__(drafter, vocab_size, drafter, None if fusion is None else fusion.width)
        self.num_layers = num_room_layers(drafter.text_config) or 0

    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:
        drafter, begin = self.drafter, 0
        window = window._replace(tokens=drafter.known(window.tokens))
        logits, hidden = (each[:, None] for each in read(drafter, cache, window, self.vocab_size))
        num_prefix = cache.length.clone()
        while True:
            level = yield logits, hidden
            end = begin + level.tokens.shape[1]
            own = None
            if self.size is not None:
                own = hidden.gather(1, level.parents[..., None].expand(-1, -1, hidden.shape[-1]))
            inputs = inputs_in_place(drafter.model, cache, level.seen, depths, depths[begin:end], num_prefix)
            hidden = hidden_states(drafter, cache, drafter.known(level.tokens), own, inputs)
            logits = drafter.logits(hidden, self.vocab_size)
            cache.length.add_(end - begin)
            begin = end


def read(drafter: DraftModel, cache: RoomCache, window: Window, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Logits `[texts, vocab_size]` and hidden states `[texts, hidden_size]` after a window without its dummies."""
    hidden = at_last(read_chain(drafter, cache, window.tokens, window.states), window.last)
    cache.length.add_(window.last + 1)
    return drafter.logits(hidden, vocab_size), hidden


def at_last(hidden: Tensor, last: Tensor) -> Tensor:
    """`[texts, size]`, those of `hidden` `[texts, n, size]` at the places `last` `[texts]`."""
    return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


def read_chain(drafter: DraftModel, cache: RoomCache, tokens: Tensor, states: Tensor | None) -> Tensor:
    """Hidden states `[texts, n, hidden_size]` of a pass over tokens one after another, of which nothing is kept yet."""
    span = torch.arange(tokens.shape[1], device=tokens.device)
    seen = span <= span[:, None]
    if cache.prompt is not None:  # padding sees itself, and nobody else sees it
        own = cache.prompt.shown.gather(1, (cache.length[:, None] + span).clamp_max(cache.room - 1))
        seen = seen & (own[:, None] | (span == span[:, None]))
    inputs = inputs_in_place(drafter.model, cache, seen, span, span, cache.length)
    return hidden_states(drafter, cache, tokens, states, inputs)


def hidden_states(
    drafter: DraftModel, cache: RoomCache, tokens: Tensor, states: Tensor | None, inputs: dict[str, Any]
) -> Tensor:
    """`[texts, n, hidden_size]` of a captured pass over `tokens` `[texts, n]` with these masks and positions."""
    cache.begin_pass(tokens.shape[1])
    inputs["attention_mask"] = for_groups(inputs["attention_mask"], drafter.model)
    if drafter.max_length < float("inf"):  # of dummies, which may stand behind the last position that there is
        inputs["position_ids"] = inputs["position_ids"].clamp_max(int(drafter.max_length) - 1)
    return drafter.hidden_states(tokens, cache, states, are_known=True, **inputs)
