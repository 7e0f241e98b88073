"""A Gemma 4 assistant in captured rounds (`SharedSteps`), where its target's keys and values lie in rooms."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.captured.rooms import RoomCache
from hf_specdecpp.drafting.round_steps import RoundSteps, Unrolled, Window, at_last
from hf_specdecpp.models.reader import as_wide_as


class SharedSteps(RoundSteps):
    """As `SharedReading`: each node is read with the state before it, and sees the verified text but for its last
    token in the target's cache. Of the window the last token counts alone.

    Args:
        draft: a `Gemma4Draft`, whose model is captured.
        vocab_size: width of the target's logits.
    """

    shares_cache, num_layers = True, 0

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__(draft, vocab_size, id(draft.model), draft.reads.width)
        self.draft = draft

    def read(self, cache: RoomCache, window: Window) -> None:
        """The target has read it; the draft has no cache but a length."""
        cache.length.add_(window.last + 1)

    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:  # noqa: ARG002 - all stand alike
        if window.states is None:
            raise ValueError("A Gemma 4 assistant reads the target's states, and none were handed over.")
        tokens, states = window.tokens.gather(1, window.last[:, None]), at_last(window.states, window.last)[:, None]
        seen = self.draft.rows_in(cache)
        while True:
            logits, hidden, further = self.draft.run(tokens, states, seen)
            level = yield as_wide_as(self.vocab_size, logits)[None], hidden[None]
            tokens = level.tokens
            states = further[None].gather(1, level.parents[..., None].expand(-1, -1, further.shape[-1]))


def masks_in(cache: RoomCache, kinds: list[str], window: int) -> dict[str, Tensor]:
    """Which rows of a room a draft sees, by kind of layer: bool `[1, 1, 1, room]`.

    Args:
        window: of layers with a window, which see as much as the target's: the token itself, and `window - 1` before.
    """
    rows, length = torch.arange(cache.room, device=cache.length.device), cache.length[:, None]
    held = rows < length
    shown = held if cache.prompt is None else held & cache.prompt.shown
    masks = {}
    for kind in kinds:
        near = rows > length - window if kind == "sliding_attention" else held
        masks[kind] = (shown & near)[:, None, None]
    return masks
