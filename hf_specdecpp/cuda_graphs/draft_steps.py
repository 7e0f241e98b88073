"""A draft's steps in captured rounds, as functions of tensors (`RoundSteps`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache


class Window(NamedTuple):
    """What a draft reads at the beginning of a round: the last tokens of each text, then dummies, `[texts, n]`;
    `states` `[texts, n, size]` of the target before each, for a draft that reads any; and the place of each text's
    `last` token."""

    tokens: Tensor
    states: Tensor | None
    last: Tensor


class DrawnLevel(NamedTuple):
    """Nodes that were drawn after a step, and are read in the next: `tokens` `[texts, width]`, their parents' places in
    the level above, and which of the n nodes of a round each of them sees, `[texts, width, n]` bool."""

    tokens: Tensor
    parents: Tensor
    seen: Tensor


# After the window and after each level: logits `[texts, m, vocab]` and hidden states `[texts, m, size]` of its m nodes.
Unrolled = Generator[tuple[Tensor, Tensor], DrawnLevel, None]


class RoundSteps(ABC):
    """What drafts in captured rounds. It keeps nothing of a text: its caches are given to it.

    Args:
        drafter: whose model is captured; `key` says what is, for those who keep graphs.
        size: of the target's states, for a draft that reads any.

    Attributes:
        again: tokens of the text that are read a second time in the next round.
        least, most: steps that each round has to take, so that all caches hold the window, and of the deepest one.
        draws_trees: whether levels may have several nodes.
        shares_cache: whether the draft reads its target's KV cache and has none of its own.
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
    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        """Read the window, then each level that is sent; `depths` `[n]`, from 0 on, are levels of nodes that there may
        be. The cache holds the text before the window. What its length is afterwards does not matter."""

    def read(self, cache: FixedCache, window: Window) -> None:
        """Read a window alone, after which the cache holds all of it but the last `again` tokens."""
        before = cache.length.clone()
        steps = self.unroll(cache, window, window.last.new_zeros(1))
        logits, _ = next(steps)
        nothing = torch.zeros((len(logits), 1), dtype=torch.long, device=logits.device)
        for _ in range(self.least - 1):
            steps.send(DrawnLevel(nothing, nothing, nothing[..., None] > 0))
        cache.length.copy_(before + (window.last + 1 - self.again).clamp_min(0))


def at_last(hidden: Tensor, last: Tensor) -> Tensor:
    """`[texts, size]`, those of `hidden` `[texts, n, size]` at the places `last` `[texts]`."""
    return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
