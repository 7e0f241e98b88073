"""A text as a model has read it, in a cache of transformers (`CachedText`): what is read next is kept, or taken back.

Keys and values are taken back by dropping rows, recurrent states by a copy of them. Of a token tree the rows of one
path are kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer

from hf_specdecpp.caches.states import Mark, is_recurrent


class PathRows(NamedTuple):
    """The rows of a path in a pass over a tree: ascending, the root's (0) first."""

    rows: list[int]  # on the host, which knows with them where to crop
    on_device: Tensor  # `[n]`, the same on a device, which copies them


Count = TypeVar("Count", int, Tensor)


class CachedText(ABC, Generic[Count]):
    """A text that a model has read. Candidates are read after it, in one pass or several, and kept in part.

    Example: 10 tokens are held. After `begin()` and a pass over 5 more, of which 3 stand, `keep(3, of=5)` leaves 13.
    Of the rows of a batch all counts are tensors `[rows]`.
    """

    cache: Any
    held: Count  # tokens that are kept
    # The last ones of the text, which have to be read again before others: states cannot drop candidates, so they went
    # back to where they were before these tokens, which is the mark.
    pending: int = 0
    mark: Mark | None = None

    def begin(self) -> None:  # rows are dropped without a note of where they begin
        """What is read from here on may be taken back."""

    @abstractmethod
    def keep(self, count: Count, of: Count, path: PathRows | None = None) -> None:
        """Keep the first `count` of the `of` tokens that were read since `begin`, or those of a path among them."""

    @abstractmethod
    def back(self) -> None:
        """Take back all that was read since `begin` or `keep`, wherever a pass was interrupted."""


class GrowingText(CachedText[int]):
    """In a cache that grows, with windows and recurrent states or without; `None` where the first pass makes one."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.held = cache, 0 if cache is None else num_rows(cache)
        self._is_recurrent: bool | None = None
        self._shrinks = True

    def begin(self) -> None:
        layers: list[Any] = self.cache.layers
        if self._is_recurrent is None:  # once, after the prompt; of ordinary layers alone nothing else is asked
            self._shrinks = any(type(layer) is not DynamicLayer for layer in layers)
            self._is_recurrent = self._shrinks and is_recurrent(self.cache)
        # States cannot be cropped, nor can windows and convolutions in the prompt of a later turn: none records.
        records = all(getattr(layer, "record_past", True) for layer in layers) if self._shrinks else True
        if (self._is_recurrent or not records) and not self.pending:
            self.mark = Mark(self.cache)

    def keep(self, count: int, of: int, path: PathRows | None = None) -> None:
        if self.mark is not None:
            if count == of:
                self.pending, self.mark = 0, None
            else:
                self.mark.back()
                self.pending += count
        elif path is None or count == of:  # of a tree all rows: it was a path, in order
            if count < of or self._shrinks:  # windows and convolutions, with nothing to remove, too
                self.cache.crop(count - of)
        else:
            keep_path(self.cache, self.cache.get_seq_length() - of, path.rows[:count], path.on_device[:count])
        self.held = self.cache.get_seq_length() if self._is_recurrent is False else num_rows(self.cache)

    def back(self) -> None:
        if self.mark is not None:
            self.mark.back()
        elif self.cache is not None:
            roll_back(self.cache, self.held)


def text_in(cache: Any) -> CachedText:
    """The text that a cache holds already, with which a pass can be tried."""
    text = GrowingText(cache)
    text.begin()
    return text


# Arguments of a forward that grow with a text. ------------------------------------------------------------------------


GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def without_last(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` without the last `count` columns of what grows with the text: views, nothing is copied."""
    shorter = dict(model_kwargs)
    for name in GROWING:
        if (each := model_kwargs.get(name)) is not None:
            shorter[name] = each[..., : each.shape[-1] - count]
    return shorter


def extended(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` for `count` more tokens: the mask, positions and token types that grow with the text."""
    longer = dict(model_kwargs)
    for name in GROWING if count else ():
        if (each := model_kwargs.get(name)) is not None:
            further = each[..., -1:].expand(*each.shape[:-1], count)
            if name == "position_ids":
                further = further + torch.arange(1, count + 1, device=each.device, dtype=each.dtype)
            elif name != "token_type_ids":  # what follows is shown, and no image
                further = torch.full_like(further, name == "attention_mask")
            longer[name] = torch.cat((each, further), dim=-1)
    return longer


# Rows that are dropped or moved. --------------------------------------------------------------------------------------


def roll_back(cache: Cache, num_tokens: int) -> None:
    """Drop every row after the first `num_tokens` tokens, in place, wherever a pass was interrupted.

    Example: a cache of 10 tokens whose pass over 3 more failed in layer 1 holds 13, 10, 10 rows; afterwards 10, 10, 10.
    Where a layer cannot go back (its window has moved on and it did not record), nothing is changed.
    """
    layers: list[Any] = cache.layers
    surplus = [_surplus(layer, num_tokens) for layer in layers]
    if all(_can_crop(layer) for layer, count in zip(layers, surplus, strict=True) if count > 0):
        for layer, count in zip(layers, surplus, strict=True):
            if count > 0:
                layer.crop(-count)
    if num_tokens == 0:
        for layer in layers:
            if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
                layer.reset()


def _surplus(layer: Any, num_tokens: int) -> int:
    """Rows of a layer beyond `num_tokens`; of a convolution's states those since it was last cropped."""
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        states: dict[int, Any] = layer.conv_states
        sizes: dict[int, Any] = layer.conv_kernel_size
        return max((states[i].shape[-1] - sizes[i] for i in states if states[i] is not None), default=0)
    return layer.get_seq_length() - num_tokens if layer.keys is not None else 0


def _can_crop(layer: Any) -> bool:
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        return layer.record_past
    return (
        type(layer) is not cache_utils.DynamicSlidingWindowLayer
        or layer.record_past
        or (layer.get_seq_length() < layer.sliding_window)
    )


def num_rows(cache: Cache) -> int:
    """Tokens that a cache holds. A cache of states alone does not count them: 1 once it has read something."""
    for layer in cache.layers:
        if isinstance(layer, cache_utils.CacheLayerMixin):
            return int(cache.get_seq_length())  # of static caches it is a tensor
    return int(is_recurrent(cache))


def keep_path(cache: Cache, num_prefix: int, path: list[int], on_device: Tensor | None = None) -> None:
    """Reduce a tree in the cache to one path, in place: ascending indices, the root (0) among them, also `on_device`.

    The rows of the path move up to the text, then the cache is cropped to them, which costs O(path): the text is
    neither copied nor read. What the crop leaves is a view of the old storage; the next pass replaces the storage, so
    that discarded rows never pile up. Sliding-window layers must have recorded their past (`activate_past_recording`)
    since before the nodes were fed.

    Example: 5 tokens of text and the nodes 0 to 4 lie in rows 0 to 9. For the path [0, 2, 4] node 0 stays in row 5,
    nodes 2 and 4 move from rows 7 and 9 to rows 6 and 7, and the crop leaves rows 0 to 7.
    """
    in_place, every_layer = num_in_place(path), list[Any](cache.layers)
    layers = [layer for layer in every_layer if layer.keys is not None]  # others share keys, or were never fed
    counts = [layer.get_seq_length() - num_prefix for layer in layers]
    if in_place < len(path):
        known = (torch.tensor(path) if on_device is None else on_device)[in_place:]
        moving: dict[torch.device, list[Tensor]] = {}
        for layer, count in zip(layers, counts, strict=True):
            nodes = [rows[..., rows.shape[-2] - count :, :] for rows in (layer.keys, layer.values)]
            moving.setdefault(layer.keys.device, []).extend(nodes)
        for device, nodes in moving.items():
            move(nodes, known.to(device), in_place)
    for layer, count in zip(layers, counts, strict=True):
        layer.crop(len(path) - count)  # also with nothing to remove: windows shrink back here


def num_in_place(path: list[int]) -> int:
    """How many of the first rows of a path lie where they belong."""
    return len([node for place, node in enumerate(path) if place == node])


@torch.inference_mode()  # a draft's rows are inference tensors, which cannot be written to outside of it
def move(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    """Copy the rows `indices` of each tensor `[..., n, head]` to its rows from `to` on."""
    for each in rows:
        each[..., to : to + indices.shape[0], :] = each.index_select(-2, indices)


def width_of(num_tokens: int) -> int:
    """The width of a pass over so many tokens: 1 for 1, 2 for 2, 4 for 3 and 4, 8 for 5 to 8."""
    return 1 << (num_tokens - 1).bit_length()
