"""What rounds do with key-value caches: keep the accepted path of a token tree, let a tree grow level by level, go
back, and hold several sequences that each go at their own pace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_specdecpp.models.attention_masks import row_masks
from hf_specdecpp.models.causal_lm import CausalLM, input_device

# Layers of models that share keys between layers hold nothing of their own (transformers 5.18 has no class for them).
ATTENTION_LAYERS = (DynamicLayer, DynamicSlidingWindowLayer, getattr(cache_utils, "DummyLayer", DynamicLayer))
MOST_HOLES = 0.2  # of the columns that the longest row of a batch needs


def keep_path(cache: Cache, num_prefix: int, path: list[int]) -> None:
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
    """
    in_place = sum(place == node for place, node in enumerate(path))  # the first of the path lie where they belong
    indices: dict[torch.device, Tensor] = {}
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:
            continue  # shares the keys of another layer, or was never fed
        nodes = layer.get_seq_length() - num_prefix
        if in_place < len(path):
            device = layer.keys.device
            if device not in indices:
                indices[device] = torch.tensor(path[in_place:], device=device)
            for rows in (layer.keys, layer.values):
                _move(rows[..., rows.shape[-2] - nodes :, :], indices[device], in_place)
        # Also with nothing to remove: sliding-window layers shrink back to their window here.
        layer.crop(len(path) - nodes)


@torch.inference_mode()  # a draft's rows are inference tensors, which cannot be written to outside of it
def _move(nodes: Tensor, indices: Tensor, to: int) -> None:
    """Copy the rows `indices` of `nodes` `[..., nodes, head]` to the rows from `to` on."""
    nodes[..., to : to + indices.shape[0], :] = nodes.index_select(-2, indices)


def roll_back(cache: Cache, num_tokens: int) -> None:
    """Drop every row after the first `num_tokens` tokens, in place, wherever a pass was interrupted.

    An exception may leave the layers with different numbers of rows: those before the failing layer have the pass's
    tokens already. Where a layer cannot go back (its window has moved on and it did not record), nothing is changed.

    Example: a cache of 10 tokens whose pass over 3 more failed in layer 1 holds 13, 10, 10 rows; afterwards 10, 10, 10.
    """
    layers: list[Any] = cache.layers
    surplus = [_surplus(layer, num_tokens) for layer in layers]
    if all(_can_crop(layer) for layer, count in zip(layers, surplus, strict=True) if count > 0):
        for layer, count in zip(layers, surplus, strict=True):
            if count > 0:
                layer.crop(-count)


def _surplus(layer: Any, num_tokens: int) -> int:
    """Rows of a layer beyond `num_tokens`; of a convolution's states those since it was last cropped."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states: dict[int, Any] = layer.conv_states
        sizes: dict[int, Any] = layer.conv_kernel_size
        return max((states[i].shape[-1] - sizes[i] for i in states if states[i] is not None), default=0)
    return layer.get_seq_length() - num_tokens if layer.keys is not None else 0


def _can_crop(layer: Any) -> bool:
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return layer.record_past
    return (
        type(layer) is not DynamicSlidingWindowLayer
        or layer.record_past
        or (layer.get_seq_length() < layer.sliding_window)
    )


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


class BatchCache:
    """The cache of a batch, whose rows each go at their own pace: it is appended to with holes.

    Each pass feeds every row the same number of columns; a row with fewer tokens gets dummies, and what it forgets
    stays in its place. `valid` says which columns are tokens of a row. They are in the order of the text, so that the
    mask hides holes as it hides padding, and positions count a row's own tokens. Columns that are holes in every row
    are cropped at the end, and once a fifth of the longest row's columns are holes, all are moved together.

    Example: two rows hold 4 tokens each, and are fed 3 columns: the first its last token and two candidates, the second
    its last token, one candidate and a dummy. The first then forgets both candidates, the second none. Both keep two
    columns: `valid` gets 1 0 for the first, and 1 1 for the second.

    Args:
        model: that reads the rows.
        cache: its own, still empty. Layers with a window keep every column from now on.
        rows: sequences in the batch.

    Attributes:
        valid: `[rows, columns]` bool, on the host as all bookkeeping is.

    Raises:
        ValueError: the model has layers that are not attention.
    """

    def __init__(self, model: CausalLM, cache: DynamicCache, rows: int) -> None:
        if others := {type(layer).__name__ for layer in cache.layers if type(layer) not in ATTENTION_LAYERS}:
            raise ValueError(
                f"A batch of sequences cannot be assisted here: {type(model).__name__} keeps "
                f"{', '.join(sorted(others))} in its cache, which rows of different length cannot share. Call "
                "generate() once a sequence."
            )
        windows = (type(layer) is DynamicSlidingWindowLayer for layer in cache.layers)
        layers: list[Any] = cache.layers
        cache.layers = [DynamicLayer() if slides else layer for slides, layer in zip(windows, layers, strict=True)]
        self.model, self.cache = model, cache
        self.valid = torch.zeros(rows, 0, dtype=torch.bool)

    @property
    def lengths(self) -> Tensor:
        """Tokens that each row holds, `[rows]`."""
        return self.valid.sum(dim=1)

    def mask(self, fed: Tensor) -> Any:
        """The attention mask of a pass over n further columns, of which `fed` `[rows, n]` are tokens."""
        valid = torch.cat((self.valid, fed), dim=1).to(input_device(self.model))
        return row_masks(self.model, valid, fed.shape[1])

    def note(self, fed: Tensor) -> None:
        """Such a pass has been made."""
        self.valid = torch.cat((self.valid, fed), dim=1)

    def forget(self, counts: Sequence[int]) -> None:
        """Drop the last tokens of each row, `counts` of them."""
        from_the_end = self.valid.flip(1).cumsum(dim=1).flip(1)
        self.valid = self.valid & (from_the_end > torch.tensor(counts)[:, None])
        used = self.valid.any(dim=0).nonzero()
        width = int(used[-1]) + 1 if len(used) else 0
        self.cache.crop(width - self.valid.shape[1])
        self.valid = self.valid[:, :width]

    def select(self, places: Sequence[int]) -> None:
        """Keep these rows only."""
        self.valid = self.valid[list(places)]
        if places and self.valid.shape[1]:
            self.cache.batch_select_indices(torch.tensor(places))

    def close_up(self) -> None:
        """Move the columns together where there are many holes."""
        needed = int(self.lengths.max()) if len(self.valid) else 0
        if self.valid.shape[1] > (1.0 + MOST_HOLES) * needed > 0.0:
            self.valid = compact(self.cache, self.valid, needed)


def compact(cache: Cache, valid: Tensor, width: int) -> Tensor:
    """Move each row's tokens to the right end of `width` columns, in place.

    Example: rows 1 0 1 and 1 1 1 of `valid` become 0 1 1 and 1 1 1 where the width is 3, their tokens in the old order.

    Returns:
        `valid` `[rows, width]`.
    """
    order = valid.long().argsort(dim=1, stable=True)[:, -width:]
    layers: list[Any] = cache.layers
    for layer in layers:
        if layer.keys is None:  # it shares another layer's
            continue
        for name in ("keys", "values"):
            held = getattr(layer, name)
            index = order[:, None, :, None].to(held.device).expand(-1, held.shape[1], -1, held.shape[3])
            setattr(layer, name, held.gather(2, index))
    return valid.gather(1, order)
