"""Take a key-value cache back to where it was."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import Cache, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin


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
