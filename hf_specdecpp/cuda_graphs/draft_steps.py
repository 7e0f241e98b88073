"""The interface of a draft's steps in captured rounds, as functions of tensors (`RoundSteps`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_specdecpp.cuda_graphs.fixed_cache import FixedCache
from hf_specdecpp.cuda_graphs.on_device import rows_at


class Window(NamedTuple):
    """What a draft reads at the beginning of a round: `tokens` `[texts, n]`, the last ones of each sequence, then
    dummies; `states` `[texts, n, size]`, for each token the target's state at the token before, or `None` if the draft
    reads none; `last` `[texts]`, the index in `tokens` of each sequence's last token."""

    tokens: Tensor
    states: Tensor | None
    last: Tensor


class DrawnLevel(NamedTuple):
    """The candidates of a level, for the next step of the draft: `tokens` `[texts, width]`, and in trees `parents`
    `[texts, width]`, indices in the level above, and `seen` `[texts, width, n]` bool: which of the round's n nodes each
    of them attends to."""

    tokens: Tensor
    parents: Tensor | None = None
    seen: Tensor | None = None

    def of_parents(self, states: Tensor) -> Tensor:
        """`[texts, width, size]`, the parents' states among the `states` `[texts, m, size]` of the level above."""
        return states if self.parents is None else rows_at(states, self.parents)


# Yields logits `[texts, m, vocab]` and states `[texts, m, size]`, after the window (m = 1), then after each sent level.
Unrolled = Generator[tuple[Tensor, Tensor], DrawnLevel, None]


class RoundSteps(ABC):
    """Steps (forward passes) of a draft in captured rounds. They have no state of a sequence: caches are arguments.

    Args:
        drafter: the copy of the draft whose model is captured.

    Attributes:
        key: the identity of the captured steps, to reuse graphs.
        size: size of the states in `Window`; `None` if the draft reads none.
        again: number of tokens at the end of a window that the next round's window contains again.
        least, most: fewest and most steps of a round; the first `least` read the window, one for each model or layer.
        behind: number of rows after the window that a block takes in the cache; 0 for drafts without blocks.
        embed: the draft's token embeddings, for acceptance heads.
    """

    again, behind, least, most = 0, 0, 1, float("inf")
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    embed: Callable[[Tensor], Tensor]

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        self.drafter, self.vocab_size = drafter, vocab_size
        self.key: Hashable = drafter
        self.size: int | None = None if drafter.reads is None else drafter.reads.width
        self.dtype, self.device, self.embed = drafter.dtype, drafter.device, drafter.embed

    @abstractmethod
    def unroll(self, cache: FixedCache, window: Window, depths: Tensor) -> Unrolled:
        """A generator (`Unrolled`) that reads the window, then each level that is sent. `cache`: contains the sequence
        before the window; the caller restores its length. `depths`: `[n]`, the level of each candidate, from 0."""

    def read(self, cache: FixedCache, window: Window) -> None:
        """Read a window of the prompt without drafting, and commit all but its last `again` tokens to the cache."""
        before = cache.length.clone()
        steps = self.unroll(cache, window, window.last.new_zeros(1))
        logits, _ = next(steps)
        nothing = torch.zeros((len(logits), 1), dtype=torch.long, device=logits.device)
        for _ in range(self.least - 1):
            steps.send(DrawnLevel(nothing))
        cache.length.copy_(before + (window.last + 1 - self.again).clamp_min(0))


def last_rows(hidden: Tensor, last: Tensor) -> Tensor:
    """`[texts, size]`: the rows of `hidden` `[texts, n, size]` at the indices `last` `[texts]`."""
    return rows_at(hidden, last[:, None])[:, 0]
