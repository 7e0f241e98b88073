"""Keep the accepted path of a token tree in a key-value cache, and let a tree grow in it level by level."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer


class PathRows(NamedTuple):
    """The rows of a path in a pass over a tree: ascending, the root's (0) first.

    Attributes:
        rows: on the host, which knows with them where to crop.
        on_device: `[n]`, the same on a device, which copies them.
    """

    rows: list[int]
    on_device: Tensor

    def first(self, count: int) -> PathRows:
        """The first `count` of them."""
        return PathRows(self.rows[:count], self.on_device[:count])


def keep_path(cache: Cache, num_prefix: int, path: list[int], on_device: Tensor | None = None) -> None:
    """Reduce a tree in the cache to one path, in place.

    The rows of the path move up to the text, then the cache is cropped to them, which costs O(path): the text is
    neither copied nor read. What the crop leaves is a view of the old storage; the next pass replaces the storage, so
    that discarded rows never pile up.

    Example: 5 tokens of text and the nodes 0 to 4 lie in rows 0 to 9. For the path [0, 2, 4] node 0 stays in row 5,
    nodes 2 and 4 move from rows 7 and 9 to rows 6 and 7, and the crop leaves rows 0 to 7.

    Args:
        cache: holds `num_prefix` tokens of text, then nodes in feeding order. Sliding-window layers must have recorded
            their past (`activate_past_recording`) since before the nodes were fed.
        path: ascending indices of the nodes to keep, the root (node 0) among them.
        on_device: `[n]`, the same on a device; uploaded by default.
    """
    in_place = num_in_place(path)
    indices: dict[torch.device, Tensor] = {}
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:
            continue  # shares the keys of another layer, or was never fed
        nodes = layer.get_seq_length() - num_prefix
        if in_place < len(path):
            device = layer.keys.device
            if device not in indices:
                known = torch.tensor(path) if on_device is None else on_device
                indices[device] = known[in_place:].to(device)
            for rows in (layer.keys, layer.values):
                move(rows[..., rows.shape[-2] - nodes :, :], indices[device], in_place)
        # Also with nothing to remove: sliding-window layers shrink back to their window here.
        layer.crop(len(path) - nodes)


def num_in_place(path: list[int]) -> int:
    """How many of the first rows of a path lie where they belong."""
    return sum(place == node for place, node in enumerate(path))


@torch.inference_mode()  # a draft's rows are inference tensors, which cannot be written to outside of it
def move(nodes: Tensor, indices: Tensor, to: int) -> None:
    """Copy the rows `indices` of `nodes` `[..., nodes, head]` to the rows from `to` on."""
    nodes[..., to : to + indices.shape[0], :] = nodes.index_select(-2, indices)


class GrowingTreeLayer(DynamicSlidingWindowLayer):
    """A sliding-window layer whose tree is fed in several passes.

    transformers' layer shows a pass no more rows than a chain can need: a window of what was fed before. In a tree, the
    nodes fed before are mostly not on the path, and would push text that the window still reaches out of sight. So this
    layer shows all that it holds; the mask hides what lies outside the window.
    """

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shown = super().update(key_states, value_states, *args, **kwargs)
        held: Any = (self.keys, self.values)
        return held if self.record_past else shown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        held = held_rows(self)
        return held + query_length, self.cumulative_length - held


def grow_in(cache: Cache) -> None:
    """Make the sliding-window layers of `cache` fit for a tree that is fed in several passes."""
    for layer in cache.layers:
        if type(layer) is DynamicSlidingWindowLayer:
            layer.__class__ = GrowingTreeLayer


def held_rows(layer: Any) -> int:
    """Rows of keys in a layer: for sliding-window layers fewer than the tokens fed."""
    return layer.keys.shape[-2] if layer.is_initialized and layer.keys.numel() else 0


def shown_rows(layer: Any, num_queries: int) -> int:
    """Rows of keys that a pass over `num_queries` tokens will see, those of its own tokens included."""
    rows = held_rows(layer) + num_queries
    if type(layer) is DynamicSlidingWindowLayer and layer.record_past:
        return min(rows, layer.sliding_window - 1 + num_queries)
    return rows
