"""A DFlash draft in captured rounds (`BlockSteps`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.captured.rooms import RoomCache
from hf_specdecpp.drafting.round_steps import RoundSteps, Unrolled, Window


class BlockSteps(RoundSteps):
    """As `BlockReading`: one pass over the block after the text's last token, which all levels of a round are drawn
    from. The cache holds the verified tokens; the block's rows lie behind the window's and are not kept.
    """

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__(draft, vocab_size, id(draft.model), draft.reads.width)
        self.draft, self.model = draft, draft.model
        self.num_layers, self.most = len(self.model.layers), draft.settings.places

    def unroll(self, cache: RoomCache, window: Window, depths: Tensor) -> Unrolled:  # noqa: ARG002 - one for all
        draft, states = self.draft, window.states
        if states is None:
            raise ValueError("A DFlash draft reads the target's states, and none were handed over.")
        block = draft.block_after(window.tokens.gather(1, window.last[:, None])).to(self.dtype)
        count, size = states.shape[1], block.shape[1]
        places = self._places(count, size, window.last)
        rows = _Rows(cache, places, count, size)
        cache.begin_pass(count + size)
        positions = cache.length[:, None] + places
        if cache.prompt is not None:
            positions = positions + cache.prompt.offset
        hidden = self.model.through(block, self.model.reader(states), positions, rows.mask, rows.extended)
        hidden = hidden[:, -draft.settings.places :]
        logits, width = draft.logits(hidden, self.vocab_size), 1
        for place in range(hidden.shape[1]):
            own = slice(place, place + 1)
            level = yield logits[:, own].expand(-1, width, -1), hidden[:, own].expand(-1, width, -1)
            width = level.tokens.shape[1]

    def _places(self, count: int, size: int, last: Tensor) -> Tensor:
        """`[texts, count + size]`, where the rows of the window and of the block stand after the cache: the block's
        first row after `last`, whatever dummies lie between."""
        span = torch.arange(count + size, device=last.device)
        return torch.where(span < count, span, span - count + last[:, None] + 1)


class _Rows:
    """All rows of a cache in a pass over a window of `count` and a block of `size` rows, at these `places`."""

    def __init__(self, cache: RoomCache, places: Tensor, count: int, size: int) -> None:
        self.cache, self.size = cache, size
        begin = cache.length[:, None]
        rows = torch.arange(cache.room, device=places.device) - begin  # negative: what was held
        own = rows - count
        self.is_block = (own >= 0) & (own < size)
        first = places[:, count, None]  # of the block: as many tokens of the window are no dummies
        self.is_text = rows < first
        if cache.prompt is not None:
            self.is_text = self.is_text & cache.prompt.shown
        self.keys = torch.where(own >= 0, own + first, rows)
        self.queries = places[:, count:]

    def mask(self, view: tuple[int | None, bool], _keys: Tensor) -> Tensor:
        reach, is_causal = view
        back = self.queries[..., None] - self.keys[:, None]
        seen = (self.is_text | self.is_block)[:, None].expand_as(back)
        if is_causal:
            seen = seen & (back >= 0)
        return (seen if reach is None else seen & (back.abs() <= reach))[:, None]

    def extended(self, place: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        layer: Any = self.cache.layers[place]
        both: tuple[Tensor, Tensor] = layer.update(keys, values)
        return both
