"""A sequence in a cache of transformers (`CachedContext`): tokens that are read next are committed or rolled back.

Keys and values are rolled back by dropping rows, recurrent states by a copy. Of a token tree the rows of one path are
kept.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer

from hf_specdecpp.caches.states import RollbackPoint, is_recurrent


class PathRows(NamedTuple):
    """The rows of a path in a pass over a tree: ascending, the root's (0) first."""

    rows: list[int]  # on the host
    on_device: Tensor  # `[n]`, the same numbers on a device


Count = TypeVar("Count", int, Tensor)


class CachedContext(ABC, Generic[Count]):
    """A sequence that a model has read. Candidates are read after it, in one pass or several, and kept in part.

    Example: 10 tokens are held. After `begin_round()` and a pass over 5 more, 3 of them accepted, `commit(3, of=5)`
    leaves 13. For a batch all counts are tensors `[rows]`.
    """

    cache: Any
    num_tokens: Count  # committed tokens in the cache, without `pending` ones
    # Number of trailing tokens to read again. Recurrent states cannot drop rejected candidates, so they are reset to
    # `rollback_point`, which is before these tokens.
    pending: int = 0
    rollback_point: RollbackPoint | None = None

    def begin_round(self) -> None:  # rows are dropped without a note of where they begin
        """Mark the beginning of tokens that may be rolled back."""

    @abstractmethod
    def commit(self, count: Count, of: Count, path: PathRows | None = None) -> None:
        """Keep `count` of the `of` tokens read since `begin_round`: the first ones, or the first ones of a path."""

    @abstractmethod
    def roll_back(self) -> None:
        """Drop all tokens read since `begin_round` or `commit`, also if a pass was interrupted in any layer."""


class GrowingContext(CachedContext[int]):
    """A sequence in a growing cache of any kind; `cache` is `None` if the first pass makes one."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.num_tokens = cache, 0 if cache is None else num_rows(cache)
        self._is_recurrent: bool | None = None
        self._shrinks = True

    def begin_round(self) -> None:
        layers: list[Any] = self.cache.layers
        if self._is_recurrent is None:  # once, after the prompt
            self._shrinks = any(type(layer) is not DynamicLayer for layer in layers)
            self._is_recurrent = self._shrinks and is_recurrent(self.cache)
        # States cannot be cropped, nor windows and convolutions that do not record, as in the prompt of a later turn.
        records = all(getattr(layer, "record_past", True) for layer in layers) if self._shrinks else True
        if (self._is_recurrent or not records) and not self.pending:
            self.rollback_point = RollbackPoint(self.cache)

    def commit(self, count: int, of: int, path: PathRows | None = None) -> None:
        if self.rollback_point is not None:
            if count == of:
                self.pending, self.rollback_point = 0, None
            else:
                self.rollback_point.roll_back()
                self.pending += count
        elif path is None or count == of:  # all rows of a tree: it was a chain
            if count < of or self._shrinks:  # windows and convolutions shrink in any case
                self.cache.crop(count - of)
        else:
            keep_path(self.cache, self.cache.get_seq_length() - of, path.rows[:count], path.on_device[:count])
        self.num_tokens = self.cache.get_seq_length() if self._is_recurrent is False else num_rows(self.cache)

    def roll_back(self) -> None:
        if self.rollback_point is not None:
            self.rollback_point.roll_back()
        elif self.cache is not None:
            roll_back(self.cache, self.num_tokens)


# Arguments of a forward pass that grow with a sequence. ---------------------------------------------------------------


GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def without_last(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` without the last `count` columns of arguments that grow with the sequence, as views."""
    shorter = dict(model_kwargs)
    for name in GROWING:
        if (each := model_kwargs.get(name)) is not None:
            shorter[name] = each[..., : each.shape[-1] - count]
    return shorter


def extended(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` with `count` more columns in arguments that grow with the sequence, for further text tokens."""
    longer = dict(model_kwargs)
    for name in GROWING if count else ():
        if (each := model_kwargs.get(name)) is not None:
            further = each[..., -1:].expand(*each.shape[:-1], count)
            if name == "position_ids":
                further = further + torch.arange(1, count + 1, device=each.device, dtype=each.dtype)
            elif name != "token_type_ids":  # visible, and no image
                further = torch.full_like(further, name == "attention_mask")
            longer[name] = torch.cat((each, further), dim=-1)
    return longer


# Rows that are dropped or moved. --------------------------------------------------------------------------------------


def roll_back(cache: Cache, num_tokens: int) -> None:
    """Drop every row after the first `num_tokens` tokens, in place, wherever a pass was interrupted.

    Example: a cache of 10 tokens whose pass over 3 more failed in layer 1 holds 13, 10, 10 rows; afterwards 10, 10, 10.
    If a layer cannot be cropped (its window moved on, unrecorded), no layer is. At 0 tokens all layers are reset.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if num_tokens == 0:
            layer.reset()
        else:
            _drop_half(layer, num_tokens)
    surplus = [_surplus(layer, num_tokens) for layer in layers]
    if all(_can_crop(layer) for layer, count in zip(layers, surplus, strict=True) if count > 0):
        for layer, count in zip(layers, surplus, strict=True):
            if count > 0:
                layer.crop(-count)


def _drop_half(layer: Any, num_tokens: int) -> None:
    """Drop what an interrupted `update` has added to the keys but not to the values of a layer, or has only counted.
    `num_tokens`: those before it."""
    if type(layer) not in (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer) or layer.values is None:
        return
    rows = layer.values.shape[-2] if layer.values.numel() else 0  # before the first update values have one axis
    if layer.keys.numel() and layer.keys.shape[-2] > rows:
        layer.keys = layer.keys[..., :rows, :]
    if type(layer) is cache_utils.DynamicSlidingWindowLayer:
        most = layer.sliding_window - 1
        counted = min(num_tokens, most) + layer.cumulative_length - num_tokens
        if rows < (counted if layer.record_past else min(counted, most)):
            layer.cumulative_length = num_tokens


def _surplus(layer: Any, num_tokens: int) -> int:
    """Number of rows of a layer beyond `num_tokens`; of layers with convolutions, inputs since the last crop."""
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        states: dict[int, Any] = layer.conv_states
        sizes: dict[int, Any] = layer.conv_kernel_size
        return max((states[i].shape[-1] - sizes[i] for i in states if states[i] is not None), default=0)
    return layer.get_seq_length() - num_tokens if layer.keys is not None else 0


def _can_crop(layer: Any) -> bool:
    if isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
        return layer.record_past
    slides = type(layer) is cache_utils.DynamicSlidingWindowLayer
    return not slides or layer.record_past or layer.get_seq_length() < layer.sliding_window


def num_rows(cache: Cache) -> int:
    """Number of tokens in a cache. A cache of recurrent states only does not count them: 1 once it has read any."""
    for layer in cache.layers:
        if isinstance(layer, cache_utils.CacheLayerMixin):
            return int(cache.get_seq_length())  # of static caches it is a tensor
    return int(is_recurrent(cache))


def keep_path(cache: Cache, num_prefix: int, path: list[int], on_device: Tensor | None = None) -> None:
    """Reduce a tree in the cache to one path, in place. `path` and `on_device`: ascending node indices, root's first.

    The rows of the path move up to the prefix, then the cache is cropped, which costs O(path): the prefix is neither
    copied nor read. The crop leaves a view of the old storage, which the next pass replaces, so that discarded rows
    never accumulate. Sliding-window layers must have recorded their past (`activate_past_recording`) since before the
    nodes were read.

    Example: 5 tokens of prefix and the nodes 0 to 4 are in rows 0 to 9. For the path [0, 2, 4] node 0 stays in row 5,
    nodes 2 and 4 move from rows 7 and 9 to rows 6 and 7, and the crop leaves rows 0 to 7.
    """
    in_place, every_layer = num_in_place(path), list[Any](cache.layers)
    layers = [layer for layer in every_layer if layer.keys is not None]  # others share keys, or have read nothing
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
        layer.crop(len(path) - count)  # windows shrink even if nothing is removed


def num_in_place(path: list[int]) -> int:
    """Number of leading rows of an ascending path from the root, node 0, that need not move: 2 for [0, 1, 3]."""
    return len([node for place, node in enumerate(path) if place == node])


@torch.inference_mode()  # a draft's rows are inference tensors, writable in inference mode only
def move(rows: Sequence[Tensor], indices: Tensor, to: int) -> None:
    """Copy the rows `indices` of each tensor `[..., n, head]` to its rows from `to` on."""
    for each in rows:
        each[..., to : to + indices.shape[0], :] = each.index_select(-2, indices)


def width_of(num_tokens: int) -> int:
    """The width of a pass over `num_tokens` tokens: 1 for 1, 2 for 2, 4 for 3 and 4, 8 for 5 to 8."""
    return 1 << (num_tokens - 1).bit_length()
