"""A sequence in a cache of transformers (`GrowingContext`), to which a round's tokens are committed or rolled back.

Keys and values are rolled back by dropping rows, recurrent states by restoring a copy. Of a token tree the rows of one
path are kept."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import cache_utils
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdecpp.caches.states import RollbackPoint, is_recurrent


class PathRows(NamedTuple):
    """The rows that the nodes of a path have in the target's pass over a tree: ascending, the root's (0) first."""

    rows: list[int]  # on the host
    on_device: Tensor  # `[n]`, the same numbers on a device


class GrowingContext:
    """A sequence in a model's growing cache, of any kind of layers. In each round, one or several passes append tokens,
    of which `commit` keeps a part.

    Example: the cache has 10 tokens. After `begin_round()` and a pass over 5 more, `commit(3, of=5)` leaves 13.

    Args:
        cache: the model's cache; `None` if the first pass makes it.

    Attributes:
        num_tokens: number of committed tokens in the cache, without `pending` ones.
        pending: number of committed tokens that the next pass must read again. Recurrent states cannot drop rejected
            candidates, so the cache is reset to `rollback_point`, which is before these tokens.
        rollback_point: the cache as it was before the pending tokens or this round; `None` if not needed.
    """

    def __init__(self, cache: Any) -> None:
        self.cache, self.num_tokens = cache, 0 if cache is None else num_rows(cache)
        self.pending = 0
        self.rollback_point: RollbackPoint | None = None
        self._is_plain: bool | None = None  # whether no layer has windows, convolutions or states

    def begin_round(self) -> None:
        """Called before the first pass of a round: what follows can be rolled back."""
        if self._is_plain is None:  # once, after the prompt
            self._is_plain = all(type(layer) is DynamicLayer for layer in self.cache.layers)
        if self._is_plain or self.pending:
            return
        # States cannot be cropped, nor windows and convolutions that do not record, as in the prompt of a later turn.
        records = all(getattr(layer, "record_past", True) for layer in self.cache.layers)
        if not records or is_recurrent(self.cache):
            self.rollback_point = RollbackPoint(self.cache)

    def commit(self, count: int, of: int, path: PathRows | None = None) -> None:
        """Keep `count` of the `of` tokens read since `begin_round`: the first ones, or the first ones of a `path`."""
        if self.rollback_point is not None:
            if count == of:
                self.pending, self.rollback_point = 0, None
            else:
                self.rollback_point.roll_back()
                self.pending += count
        elif path is None or count == of:  # all rows of a tree: it was a chain
            if count < of or not self._is_plain:  # windows and convolutions shrink in any case
                self.cache.crop(count - of)
        else:
            keep_path(self.cache, self.cache.get_seq_length() - of, path.rows[:count], path.on_device[:count])
        self.num_tokens = self.cache.get_seq_length() if self._is_plain else num_rows(self.cache)

    def roll_back(self) -> None:
        """Drop all tokens read since `begin_round` or `commit`, also if a pass was interrupted in any layer."""
        if self.rollback_point is not None:
            self.rollback_point.roll_back()
        elif self.cache is not None:
            roll_back(self.cache, self.num_tokens)


# Arguments of a forward pass that grow with a sequence. ---------------------------------------------------------------


GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")


def without_last(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` in which the arguments of `GROWING` lack their last `count` columns, as views."""
    shorter = dict(model_kwargs)
    for name in GROWING:
        if (each := model_kwargs.get(name)) is not None:
            shorter[name] = each[..., : each.shape[-1] - count]
    return shorter


def extended(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` in which the arguments of `GROWING` have `count` further columns, for visible text tokens."""
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
    """Drop every row after the first `num_tokens` tokens, in place, even if a pass was interrupted between layers.
    Windows and convolutions must record (`activate_past_recording`). With 0 tokens all layers are reset.

    Example: a cache of 10 tokens whose pass over 3 more failed in layer 1 has 13, 10, 10 rows, and then 10, 10, 10."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if num_tokens == 0:
            layer.reset()
        elif isinstance(layer, cache_utils.LinearAttentionCacheLayerMixin):
            states: dict[int, Any] = layer.conv_states
            sizes: dict[int, Any] = layer.conv_kernel_size
            known = (states[number].shape[-1] - size for number, size in sizes.items() if size is not None)
            if layer.record_past and (since := max(known, default=0)) > 0:  # inputs since the last crop
                layer.crop(-since)
        elif layer.keys is None or not layer.keys.numel():
            continue
        elif type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
            # Not by `crop`: the values may have fewer rows than the keys, and a window may count tokens that it lacks.
            kept = min(num_tokens, layer.sliding_window - 1) if layer.is_sliding else num_tokens
            layer.keys, layer.values = layer.keys[..., :kept, :], layer.values[..., :kept, :]
            if layer.is_sliding:
                layer.cumulative_length = num_tokens
        else:
            layer.crop(min(num_tokens - layer.get_seq_length(), 0))


def num_rows(cache: Cache) -> int:
    """Number of tokens in a cache. A cache with recurrent states only does not count them: 0 if empty, otherwise 1."""
    for layer in cache.layers:
        if isinstance(layer, cache_utils.CacheLayerMixin):
            return int(cache.get_seq_length())  # of static caches it is a tensor
    return int(is_recurrent(cache))


def keep_path(cache: Cache, num_prefix: int, path: list[int], on_device: Tensor | None = None) -> None:
    """Reduce a tree in the cache, after `num_prefix` tokens, to one path, in place. `path`: rows of the path's nodes in
    the pass over the tree, ascending, the root's (0) first; `on_device`: these numbers on a device, if available.

    The path's rows move up to the prefix, then the cache is cropped, which costs O(path): the prefix is neither copied
    nor read. The crop leaves a view of the old storage, which the next pass replaces, so that discarded rows never
    accumulate. Sliding windows must have recorded (`activate_past_recording`) since before the tree was read.

    Example: 5 tokens of prefix and a tree of 5 nodes are in rows 0 to 9. For the path [0, 2, 4] row 5 stays, rows 7 and
    9 move to rows 6 and 7, and the crop leaves rows 0 to 7."""
    in_place, layers = num_in_place(path), list[Any](cache.layers)
    own = [layer for layer in layers if layer.keys is not None]  # others share keys, or have read nothing
    counts = [layer.get_seq_length() - num_prefix for layer in own]
    if in_place < len(path):
        moving = (torch.tensor(path) if on_device is None else on_device)[in_place:]
        with torch.inference_mode():  # a draft's rows are inference tensors, writable in inference mode only
            for layer, count in zip(own, counts, strict=True):
                for rows in (layer.keys, layer.values):
                    nodes = rows[..., rows.shape[-2] - count :, :]
                    nodes[..., in_place : len(path), :] = nodes.index_select(-2, moving.to(rows.device))
    for layer, count in zip(own, counts, strict=True):
        layer.crop(len(path) - count)  # windows shrink even if nothing is removed


def num_in_place(path: list[int]) -> int:
    """Number of leading rows of an ascending path that `keep_path` need not move: 2 for [0, 1, 3]."""
    return len([node for place, node in enumerate(path) if place == node])


def width_of(num_tokens: int) -> int:
    """The smallest power of two that is at least `num_tokens`, to which captured passes are padded: 8 for 5 to 8."""
    return 1 << (num_tokens - 1).bit_length()
