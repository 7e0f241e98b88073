"""Texts of a batch as a model has read them, in one key-value cache and each at its own pace (`BatchContext`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdecpp.caches.cached_context import CachedContext, PathRows, roll_back
from hf_specdecpp.caches.masks import row_masks
from hf_specdecpp.models.causal_lm import CausalLM, input_device

# Layers of models that share keys between layers hold nothing of their own (transformers 5.18 has no class for them).
ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
KeysValues = tuple[Tensor, Tensor]
MOST_HOLES = 0.2  # of the columns that the longest row needs


def other_layers(layers: Iterable[object]) -> str:
    """The kinds of layer in a cache that are not attention, by name; empty where there are none."""
    return ", ".join(sorted({type(layer).__name__ for layer in layers if type(layer) not in ATTENTION_LAYERS}))


class BatchContext(CachedContext[Tensor]):
    """The texts of a batch, whose rows each go at their own pace: the cache is appended to with holes; `ValueError`
    where layers are not attention.

    Each pass feeds every row the same number of columns; a row with fewer tokens gets dummies, and what it forgets
    stays in its place. `valid` says which columns are tokens of a row. They are in the order of the text, so that the
    mask hides holes as it hides padding, and positions count a row's own tokens. Columns that are holes in every row
    are cropped at the end, and once a fifth of the longest row's columns are holes, all are moved together.

    Example: two rows hold 4 tokens each, and are fed 3 columns: the first its last token and two candidates, the second
    its last token, one candidate and a dummy. The first then forgets both candidates, the second none. Both keep two
    columns: `valid` gets 1 0 for the first, and 1 1 for the second.

    Args:
        cache: the model's own, still empty. Layers with a window keep every column from now on.

    Attributes:
        valid: `[rows, columns]` bool, on the host as all bookkeeping is.
        layers: of `cache`, as they were made.
    """

    def __init__(self, model: CausalLM, cache: DynamicCache, rows: int) -> None:
        if others := other_layers(cache.layers):
            raise ValueError(
                f"A batch of sequences cannot be assisted here: {type(model).__name__} keeps {others} in its cache, "
                "which rows of different length cannot share. Call generate() once a sequence."
            )
        self.layers: list[Any] = cache.layers
        windows = [type(layer) is DynamicSlidingWindowLayer for layer in self.layers]
        if any(windows):  # else the list may still be empty, and the first pass appends to the cache's own
            pairs = zip(windows, self.layers, strict=True)
            cache.layers = [DynamicLayer() if slides else layer for slides, layer in pairs]
        self.model, self.cache = model, cache
        self._set(torch.zeros(rows, 0, dtype=torch.bool))

    def _set(self, valid: Tensor) -> None:
        self.valid, self.num_tokens = valid, valid.sum(dim=1)

    def mask(self, fed: Tensor) -> Any:
        """The attention mask of a pass over n further columns, of which `fed` `[rows, n]` are tokens."""
        valid = torch.cat((self.valid, fed), dim=1).to(input_device(self.model))
        return row_masks(self.model, valid, fed.shape[1])

    def record_pass(self, fed: Tensor) -> None:
        """Such a pass has been made."""
        self._set(torch.cat((self.valid, fed), dim=1))

    def commit(self, count: Tensor, of: Tensor, path: PathRows | None = None) -> None:  # noqa: ARG002 - no trees
        from_the_end = self.valid.flip(1).cumsum(dim=1).flip(1)
        valid = self.valid & (from_the_end > (of - count)[:, None])
        used = valid.any(dim=0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 0
        self.cache.crop(width - valid.shape[1])
        self._set(valid[:, :width])

    def roll_back(self) -> None:
        """As in `CachedContext`: takes back passes without `record_pass`."""
        roll_back(self.cache, self.valid.shape[1])

    def select(self, places: Sequence[int]) -> None:
        """Keep these rows only."""
        self._set(self.valid[list(places)])
        if places and self.valid.shape[1]:
            self.cache.batch_select_indices(torch.tensor(places))

    def row(self, place: int) -> list[KeysValues]:
        """A row's keys and values in each layer that holds any, `[heads, n, size]`."""
        layers: list[Any] = self.cache.layers
        both = [(layer.keys[place], layer.values[place]) for layer in layers if layer.keys is not None]
        valid = self.valid[place]
        return [(keys[:, valid.to(keys.device)], values[:, valid.to(values.device)]) for keys, values in both]

    def restore(self, rows: list[list[KeysValues]], shown: Tensor) -> None:
        """Once all rows have left: make `cache` an ordinary one again that holds the first columns of all of them.

        Example: rows of 3 and 5 tokens, and `shown` is 0 1 1 1 and 1 1 1 1. The cache gets four columns, of which the
        first row fills the last three, and the second row all with its first four tokens. `rows`: from `row`.
        """
        layers: list[Any] = self.cache.layers
        holding = [layer for layer, ours in zip(self.layers, layers, strict=True) if ours.keys is not None]
        for number, layer in enumerate(holding):
            keys, values = _stack_rows(rows, number, shown)
            if layer in layers:
                layer.keys, layer.values = keys, values
            else:  # cuts it to its window
                layer.update(keys, values)
        self.cache.layers = self.layers

    def set_rows(self, rows: list[list[KeysValues]], valid: Tensor) -> None:
        """Hold these texts, which were read elsewhere, in the columns that are `valid` `[rows, columns]`."""
        layers: list[Any] = self.cache.layers
        for number, layer in enumerate(layer for layer in layers if layer.keys is not None):
            layer.keys, layer.values = _stack_rows(rows, number, valid)
        self._set(valid)

    def close_up(self) -> None:
        """Move the columns together where there are many holes."""
        needed = int(self.num_tokens.max()) if len(self.valid) else 0
        if self.valid.shape[1] > (1.0 + MOST_HOLES) * needed > 0.0:
            self._set(compact(self.cache, self.valid, needed))


def _stack_rows(rows: list[list[KeysValues]], layer: int, shown: Tensor) -> KeysValues:
    """The keys and values of all rows in a layer, each row's in its columns that are `shown` `[rows, columns]`."""
    keys, values = zip(*(_place(row[layer], its) for row, its in zip(rows, shown, strict=True)), strict=True)
    return torch.stack(keys), torch.stack(values)


def _place(pair: KeysValues, shown: Tensor) -> KeysValues:
    """The first keys and values of `[heads, n, size]` in the columns that are `shown` `[columns]`, zeros elsewhere."""
    columns, count = len(shown), int(shown.sum())
    keys, values = (each.new_zeros(each.shape[0], columns, each.shape[2]) for each in pair)
    for place, each in ((keys, pair[0]), (values, pair[1])):
        place[:, shown.to(each.device)] = each[:, :count]
    return keys, values


def compact(cache: Cache, valid: Tensor, width: int) -> Tensor:
    """Move each row's tokens to the right end of `width` columns, in place; `valid` `[rows, width]` then.

    Example: rows 1 0 1 and 1 1 1 of `valid` become 0 1 1 and 1 1 1 where the width is 3, their tokens in the old order.
    """
    order = valid.long().argsort(dim=1, stable=True)[:, -width:]
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:  # it shares another layer's
            continue
        for name in ("keys", "values"):
            states = getattr(layer, name)
            index = order[:, None, :, None].to(states.device).expand(-1, states.shape[1], -1, states.shape[3])
            setattr(layer, name, states.gather(2, index))
    return valid.gather(1, order)
