"""Take a cache back to where it was: keys and values by dropping rows, recurrent states by a copy of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from hf_specdecpp.caches.static import hold
from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, input_device, num_embeddings, trying
from hf_specdecpp.models.checks import WITHOUT, keeps_recurrent_state
from hf_specdecpp.sampling.randomness import widest

# Relative error of the logits that rounding does not reach: states are computed in float32 whatever the dtype is.
STATE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
HALF_STATE_TOLERANCE = 0.1


def roll_back(cache: Cache, num_tokens: int) -> None:
    """Drop every row after the first `num_tokens` tokens, in place, wherever a pass was interrupted.

    An exception may leave the layers with different numbers of rows: those before the failing layer have the pass's
    tokens already. Where a layer cannot go back (its window has moved on and it did not record), nothing is changed.

    Example: a cache of 10 tokens whose pass over 3 more failed in layer 1 holds 13, 10, 10 rows; afterwards 10, 10, 10.
    """
    if isinstance(cache, StaticCache):
        hold(cache, num_tokens)
        return
    layers: list[Any] = cache.layers
    surplus = [_surplus(layer, num_tokens) for layer in layers]
    if all(_can_crop(layer) for layer, count in zip(layers, surplus, strict=True) if count > 0):
        for layer, count in zip(layers, surplus, strict=True):
            if count > 0:
                layer.crop(-count)
    if num_tokens == 0:
        for layer in layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.reset()


def stop_recording(cache: Cache) -> None:
    """Let layers with windows and convolutions drop again what they do not need, once nothing is taken back any more.

    Without that each later turn would keep its whole text.
    """
    layers: list[Any] = cache.layers
    for layer in layers:
        if getattr(layer, "record_past", False):
            layer.record_past = False


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


class Mark:
    """A place that a cache with recurrent layers can go back to: they cannot drop tokens, so their states are copied.

    Example: a cache of 10 tokens is marked, and a pass over 5 more is made, of which 3 stand. `back()` leaves the 10
    tokens; the 3 are read again, before whatever comes next.

    Args:
        cache: that has read something.
    """

    def __init__(self, cache: Cache) -> None:
        layers: list[Any] = cache.layers
        self.recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self.others = [layer for layer in layers if isinstance(layer, DynamicLayer) and layer.keys is not None]
        for layer in self.recurrent:
            layer.record_past = False  # which serves layers that keep nothing but a convolution's inputs
        self.copies = [[state.clone() for state in _states(layer)] for layer in self.recurrent]
        self.lengths = [layer.get_seq_length() for layer in self.others]

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.numel() * copy.element_size() for copies in self.copies for copy in copies)

    def back(self) -> None:
        """Leave the cache as it was marked, wherever a pass was interrupted."""
        for layer, copies in zip(self.recurrent, self.copies, strict=True):
            for state, copy in zip(_states(layer), copies, strict=True):
                state.copy_(copy)
        for attention, length in zip(self.others, self.lengths, strict=True):
            # Of a layer that has both, this part only.
            kind: Any = DynamicSlidingWindowLayer if isinstance(attention, DynamicSlidingWindowLayer) else DynamicLayer
            kind.crop(attention, length - attention.get_seq_length())


def undoing(cache: Cache, count: int) -> Callable[[], None]:
    """What takes back the next `count` tokens that `cache` reads."""
    if isinstance(cache, StaticCache):
        return partial(hold, cache, num_rows(cache))
    return Mark(cache).back if is_recurrent(cache) else partial(cache.crop, -count)


def num_rows(cache: Cache) -> int:
    """Tokens that a cache holds. A cache of states alone does not count them: 1 once it has read something."""
    layers: list[Any] = cache.layers
    if layers and not any(isinstance(layer, CacheLayerMixin) for layer in layers):
        return int(is_recurrent(cache))
    return int(cache.get_seq_length())  # of static caches it is a tensor


def is_recurrent(cache: Cache) -> bool:
    """Whether a cache holds states that cannot drop tokens."""
    layers: list[Any] = cache.layers
    recurrent = (layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin))
    return any(any(layer.is_recurrent_states_initialized.values()) for layer in recurrent)


def _states(layer: Any) -> list[Tensor]:
    """A recurrent layer's states, those of its convolutions included."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


# Families whose forward over several tokens begins anew instead of going on from their state. In small ones of them the
# difference may be too small to be seen.
BEGIN_ANEW = {"mamba", "falcon_mamba"}
# Whether others go on, by model.
_states_go_on: WeakKeyDictionary[CausalLM, bool] = WeakKeyDictionary()


def no_way_back(model: CausalLM) -> str | None:
    """Why the recurrent states of a model, if it has any, cannot be taken back and gone on from.

    Tried on the model itself, once: some families read several tokens at once only at the beginning of a text. Where
    that raises an exception, nothing is known, so it is tried again.
    """
    if not keeps_recurrent_state(model):
        return None
    if model not in _states_go_on:
        try:
            tolerance = STATE_TOLERANCE.get(model.dtype, HALF_STATE_TOLERANCE)
            _states_go_on[model] = model.config.model_type not in BEGIN_ANEW and state_error(model) <= tolerance
        except Exception as failure:  # noqa: BLE001 - of a foreign forward, or of a device without memory for now
            return f"keeps a recurrent state, and trying to take it back failed ({failure!r}); another call tries again"
    if _states_go_on[model]:
        return None
    return (
        "keeps a recurrent state that, in this version of transformers, cannot be taken back when a candidate is "
        "rejected, or does not go on from there over several tokens at once as it does one token at a time"
    )


def check_states(target: CausalLM) -> None:
    """Raise `ValueError` if the target's recurrent states cannot be taken back."""
    if (reason := no_way_back(target)) is not None:
        raise ValueError(f"{type(target).__name__} {reason}. {WITHOUT}.")


def state_error(model: CausalLM) -> float:
    """How far a model's logits are, over tokens that it reads after taking others back, from those of reading the text
    at once, relative to how much the logits vary; or if that is more, how far its states are after several tokens at
    once from those after one token at a time, relative to their size: some families compute these in another way."""
    device = input_device(model)
    with trying(model) as read:
        vocab = num_embeddings(model)
        text = (11 + 7 * torch.arange(14, device=device)[None]) % vocab
        other = (text + 3) % vocab
        expected = read(text, use_cache=False).logits[0].to(widest(device))
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        inputs: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
        read(text[:, :5], **inputs)
        cache.activate_past_recording()  # of layers with windows
        mark, parts = Mark(cache), []
        read(other[:, :4], 5, **inputs)
        mark.back()
        for begin, end in ((5, 8), (8, 9)):
            parts.append(read(text[:, begin:end], begin, **inputs).logits[0].to(expected))
        mark = Mark(cache)
        parts.append(read(text[:, 9:], 9, **inputs).logits[0].to(expected))
        together = Mark(cache).copies
        mark.back()
        for place in range(9, 14):
            read(text[:, place : place + 1], place, **inputs)
    difference = (torch.cat(parts) - expected[5:]).norm(dim=-1).max()
    of_logits = float(difference / (expected - expected.mean(dim=0)).norm(dim=-1).mean())
    return max(of_logits, _difference(together, Mark(cache).copies))


def _difference(states: list[list[Tensor]], others: list[list[Tensor]]) -> float:
    """The largest relative difference between recurrent states, head by head: one head may differ where most do not."""
    errors = [0.0]
    for state, other in zip(chain.from_iterable(states), chain.from_iterable(others), strict=True):
        heads, theirs = (each.double().flatten(2 if each.dim() > 3 else 1) for each in (state, other))
        sizes = heads.norm(dim=-1).clamp(min=torch.finfo(state.dtype).tiny)
        errors.append(float(((heads - theirs).norm(dim=-1) / sizes).max()))
    return max(errors)
