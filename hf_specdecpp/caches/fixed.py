"""A key-value cache of fixed size that is rolled back in place, as compiled forwards need it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, StaticLayer

from hf_specdecpp.caches.batches import other_layers
from hf_specdecpp.caches.static import width_of

LEAST_ROOM = 256  # tokens


class FixedLayer(StaticLayer):
    """Keys and values of one layer. It keeps every token, also where the layer has a window: the mask hides the rest.

    All layers of a cache share one count of the tokens that they hold, which the pass as a whole advances.
    """

    keys: Tensor
    values: Tensor

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write after the tokens that are held; all rows, those that hold nothing yet included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = torch.arange(key_states.shape[-2], device=key_states.device) + self.cumulative_length
        self.keys.index_copy_(2, rows, key_states)
        self.values.index_copy_(2, rows, value_states)
        return self.keys, self.values


class FixedCache(Cache):
    """A cache with room for a number of tokens.

    Example: 3 tokens are held, and a pass over 2 writes rows 3 and 4. `length.add_(2)` keeps both, `length.add_(1)` the
    first; the next pass writes over what was not kept. `length.sub_(1)` takes one back.

    Args:
        num_layers: of the model.
        room (tokens): the most that it can hold, what is written and not kept included.
        device: of the model.

    Attributes:
        length: int64 0-d, on the device: how many tokens are held.
    """

    def __init__(self, num_layers: int, room: int, device: torch.device) -> None:
        layers: list[Any] = [FixedLayer(room) for _ in range(num_layers)]
        self.length = layers[0].cumulative_length.to(device)
        for layer in layers:
            layer.cumulative_length = self.length
        super().__init__(layers=layers)
        self.room = room

    @torch.inference_mode()
    def clear(self) -> None:
        """Hold nothing. What was written is overwritten, since even a hidden row must not be infinite or NaN."""
        self.length.zero_()
        layers: list[Any] = self.layers
        for layer in layers:
            if layer.is_initialized:
                layer.keys.zero_()
                layer.values.zero_()

    @torch.inference_mode()
    def copy_from(self, smaller: FixedCache) -> None:
        """Hold what a smaller cache holds."""
        self.length.copy_(smaller.length)
        layers: list[Any] = self.layers
        held: list[Any] = smaller.layers
        for ours, theirs in zip(layers, held, strict=True):
            if theirs.is_initialized:
                if not ours.is_initialized:
                    ours.lazy_initialization(theirs.keys, theirs.values)
                ours.keys[:, :, : smaller.room] = theirs.keys
                ours.values[:, :, : smaller.room] = theirs.values


def room_for(num_tokens: int) -> int:
    """The room to make for so many tokens: a power of two, so that there are few sizes to compile for."""
    return max(LEAST_ROOM, width_of(num_tokens))


def num_fixed_layers(text_config: Any) -> int | None:
    """How many layers a `FixedCache` of a model needs; `None` where some of them are not attention."""
    layers = DynamicCache(config=text_config).layers
    return None if other_layers(layers) else len(layers)
