"""The sequences of a batch in one key-value cache, in which rows advance by different numbers of tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_specdecpp.caches.cached_context import roll_back
from hf_specdecpp.caches.masks import row_masks
from hf_specdecpp.models.causal_lm import CausalLM, input_device

# A `DummyLayer` uses the keys of another layer (transformers 5.18 has no such class).
ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
KeysValues = tuple[Tensor, Tensor]
MOST_HOLES = 0.2  # as a share of the longest row's tokens


def other_layers(layers: Iterable[object]) -> str:
    """Class names of a cache's layers that are not attention layers, for messages; an empty string if all are."""
    return ", ".join(sorted({type(layer).__name__ for layer in layers if type(layer) not in ATTENTION_LAYERS}))


class BatchContext:
    """The sequences of a batch as rows of one cache with holes. `ValueError` if a layer is not an attention layer.

    Each pass appends an equal number of columns to every row. Dummies, in rows with fewer tokens, and rejected
    candidates stay in the cache as holes: `valid` is false there, and the attention mask hides them like padding.
    Positions count only a row's own tokens, which are in order. Trailing columns that are holes in every row are
    cropped. If the holes exceed a fifth of the longest row's tokens, `close_up` removes them.

    Example: two rows have 4 tokens each, and a pass appends 3 columns: for the first row the last token and two
    candidates, for the second the last token, one candidate and a dummy. The first row rejects both candidates, the
    second none. Two columns remain: `valid` is extended by 1 0 in the first row, and by 1 1 in the second.

    Args:
        cache: an empty cache for `model`. Its sliding-window layers are replaced by layers that keep all columns.
        rows: number of sequences.

    Attributes:
        valid: `[rows, columns]` bool on the host: which columns are tokens of a row.
        layers: the original layers of `cache`.
    """

    def __init__(self, model: CausalLM, cache: Any, rows: int) -> None:
        if others := other_layers(cache.layers):
            raise ValueError(
                f"A batch of sequences cannot be assisted here: {type(model).__name__} keeps {others} in its cache, "
                "which rows of different length cannot share. Call generate() once a sequence."
            )
        self.layers: list[Any] = cache.layers
        if DynamicSlidingWindowLayer in map(type, self.layers):  # else the first pass may append to it
            cache.layers = [
                DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in self.layers
            ]
        self.model, self.cache = model, cache
        self._set(torch.zeros(rows, 0, dtype=torch.bool, device="cpu"))

    def _set(self, valid: Tensor) -> None:
        self.valid, self.num_tokens = valid, valid.sum(dim=1)

    def mask(self, fed: Tensor) -> Any:
        """The attention mask for a pass that appends n columns. `fed`: `[rows, n]` bool, which of them are tokens."""
        valid = torch.cat((self.valid, fed), dim=1).to(input_device(self.model))
        return row_masks(self.model, valid, fed.shape[1])

    def record_pass(self, fed: Tensor) -> None:
        """Called after a pass that appended the columns `fed` (as in `mask`): counts their tokens as cached."""
        self._set(torch.cat((self.valid, fed), dim=1))

    def commit(self, count: Tensor, of: Tensor) -> None:
        """Of each row's last `of` `[rows]` tokens keep the first `count` `[rows]`, and make the others holes."""
        from_the_end = self.valid.flip(1).cumsum(dim=1).flip(1)
        valid = self.valid & (from_the_end > (of - count)[:, None])
        used = valid.any(dim=0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 0
        self.cache.crop(width - valid.shape[1])
        self._set(valid[:, :width])

    def roll_back(self) -> None:
        """Drop the columns of passes after which `record_pass` was not called."""
        roll_back(self.cache, self.valid.shape[1])

    def select(self, places: Sequence[int]) -> None:
        """Keep only the rows at the indices `places`."""
        self._set(self.valid[list(places)])
        if places and self.valid.shape[1]:
            self.cache.batch_select_indices(torch.tensor(places, device="cpu"))

    def row(self, place: int) -> list[KeysValues]:
        """Keys and values `[heads, n, size]` of the n tokens in row `place`, for each layer that has any."""
        both = [(layer.keys[place], layer.values[place]) for layer in self.cache.layers if layer.keys is not None]
        valid = self.valid[place]
        return [(keys[:, valid.to(keys.device)], values[:, valid.to(values.device)]) for keys, values in both]

    def restore(self, rows: list[list[KeysValues]], shown: Tensor) -> None:
        """Called after all rows have ended: give `cache` its original layers, with the contents of plain `generate()`.

        `rows`: the result of `row` for each row; `shown`: `[rows, columns]` bool, the columns that contain tokens.

        Example: for rows of 3 and 5 tokens and `shown` 0 1 1 1 and 1 1 1 1 the cache gets four columns. The first row's
        tokens are in the last three, the second row's first four tokens in all four."""
        self.set_rows(rows, shown)
        for layer, ours in zip(self.layers, self.cache.layers, strict=True):
            if layer is not ours and ours.keys is not None:  # a sliding-window layer, which keeps its window only
                layer.update(ours.keys, ours.values)
        self.cache.layers = self.layers

    def set_rows(self, rows: list[list[KeysValues]], valid: Tensor) -> None:
        """Replace the contents of all rows, for instance by those of captured passes; arguments as in `restore`."""
        for number, layer in enumerate(layer for layer in self.cache.layers if layer.keys is not None):
            layer.keys, layer.values = (_stacked([row[number][part] for row in rows], valid) for part in (0, 1))
        self._set(valid)

    def close_up(self) -> None:
        """Called before a round: remove all holes if they exceed a fifth of the longest row's tokens (`MOST_HOLES`)."""
        needed = int(self.num_tokens.max()) if len(self.valid) else 0
        if self.valid.shape[1] > (1.0 + MOST_HOLES) * needed > 0.0:
            rows = [self.row(place) for place in range(len(self.valid))]
            self.set_rows(rows, torch.arange(needed, device="cpu") >= needed - self.num_tokens[:, None])


def _stacked(rows: list[Tensor], shown: Tensor) -> Tensor:
    """`[rows, heads, columns, size]`: the first keys, or values, of each row `[heads, n, size]` in those columns where
    `shown` `[rows, columns]` is true, and zeros in the others."""
    heads, _, size = rows[0].shape
    stacked = rows[0].new_zeros(len(rows), heads, shown.shape[1], size)
    for row, own, its in zip(stacked, rows, shown, strict=True):
        row[:, its.to(row.device)] = own[:, : int(its.sum())]
    return stacked
