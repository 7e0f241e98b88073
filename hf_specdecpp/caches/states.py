"""Recurrent states, which cannot drop tokens: copies to which a cache is rolled back (`RollbackPoint`), and a test of
whether a model continues correctly from them."""

from __future__ import annotations

from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionCacheLayerMixin

from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, input_device, num_embeddings, trying
from hf_specdecpp.models.checks import keeps_recurrent_state
from hf_specdecpp.sampling.randomness import widest

# A `state_error` that rounding does not reach: states are computed in float32 whatever the model's dtype is.
STATE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
HALF_STATE_TOLERANCE = 0.1


class RollbackPoint:
    """The state of a cache, to which `roll_back` returns: copies of recurrent and convolution states, which cannot drop
    tokens, lengths of attention layers, and references to windows, whose tensors each pass replaces.

    Example: a point is made at 10 tokens, and a pass reads 5 more, of which 3 are accepted. `roll_back()` leaves the 10
    tokens; the next pass reads the 3 again, before any others."""

    def __init__(self, cache: Cache) -> None:
        stop_recording(cache)  # recording is for caches without recurrent states
        layers: list[Any] = cache.layers
        self.recurrent = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self.copies = [[state.clone() for state in _states(layer)] for layer in self.recurrent]
        attention = [layer for layer in layers if isinstance(layer, DynamicLayer)]
        self.windows = [(layer, dict(vars(layer))) for layer in attention if layer.is_sliding]
        others = [layer for layer in attention if not layer.is_sliding and layer.keys is not None]
        self.lengths = [(layer, layer.get_seq_length()) for layer in others]

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes for copies in self.copies for copy in copies)

    def roll_back(self) -> None:
        """Restore the cache, even if a pass was interrupted between layers."""
        for layer, copies in zip(self.recurrent, self.copies, strict=True):
            for state, copy in zip(_states(layer), copies, strict=True):
                state.copy_(copy)
        for window, before in self.windows:
            vars(window).update(before)
        for other, length in self.lengths:
            # Of a layer that has states as well, the keys and values only.
            kind: Any = DynamicLayer if isinstance(other, LinearAttentionCacheLayerMixin) else type(other)
            kind.crop(other, length - other.get_seq_length())


def stop_recording(cache: Cache) -> None:
    """Undo `activate_past_recording`: windows and convolutions drop old tokens again, so `crop` cannot restore them."""
    layers: list[Any] = cache.layers
    for layer in layers:
        if getattr(layer, "record_past", False):
            layer.record_past = False


def is_recurrent(cache: Cache) -> bool:
    """Whether a cache contains recurrent states of tokens that it has read. Such states cannot drop tokens."""
    recurrent = (layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin))
    return any(any(layer.is_recurrent_states_initialized.values()) for layer in recurrent)


def _states(layer: Any) -> list[Tensor]:
    """The recurrent and convolution states of a cache layer."""
    states = (*layer.conv_states.values(), *layer.recurrent_states.values())
    return [state for state in states if state is not None]


# Model types whose forward over several tokens ignores the recurrent state. Small models may hide the difference.
RESTARTING = {"mamba", "falcon_mamba"}
# For each model asked about, whether it continues correctly from a restored state.
_can_roll_back: WeakKeyDictionary[CausalLM, bool] = WeakKeyDictionary()


def why_no_rollback(model: CausalLM) -> str | None:
    """Why a model cannot continue from a restored recurrent state; `None` if it can, or has no recurrent state.

    `state_error` tests the model itself, once, because some families read several tokens at once only at the beginning
    of a sequence. After an exception the next call tests again."""
    if not keeps_recurrent_state(model):
        return None
    if model not in _can_roll_back:
        layers = {type(layer) for layer in DynamicCache(config=model.config.get_text_config(decoder=True)).layers}
        if own := sorted(each.__name__ for each in layers if each.__module__ != Cache.__module__):  # DeepSeek V4
            return f"keeps {', '.join(own)} in its cache, whose state no short trial shows"
        try:
            tolerance = STATE_TOLERANCE.get(model.dtype, HALF_STATE_TOLERANCE)
            _can_roll_back[model] = model.config.model_type not in RESTARTING and state_error(model) <= tolerance
        except Exception as failure:  # noqa: BLE001 - a foreign forward may raise anything, and memory may run out
            return f"keeps a recurrent state, and trying to take it back failed ({failure!r}); another call tries again"
    if _can_roll_back[model]:
        return None
    return (
        "keeps a recurrent state that, in this version of transformers, cannot be taken back when a candidate is "
        "rejected, or does not go on from there over several tokens at once as it does one token at a time"
    )


def state_error(model: CausalLM) -> float:
    """The larger of two relative errors of a model with recurrent states, from a few passes over 14 tokens.

    First, the error of the logits after a roll-back, compared with one pass over the whole sequence, relative to the
    variation of the logits. Second, the difference of the states after a pass over several tokens and after passes over
    one token each, relative to the size of the states: some families compute them differently."""
    device = input_device(model)
    with trying(model) as read:
        vocab = num_embeddings(model)
        text = (11 + 7 * torch.arange(14, device=device)[None]) % vocab
        other = (text + 3) % vocab
        expected = read(text, use_cache=False).logits[0].to(widest(device))
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        inputs: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
        read(text[:, :5], **inputs)
        point, parts = RollbackPoint(cache), []
        read(other[:, :4], 5, **inputs)
        point.roll_back()
        for begin, end in ((5, 8), (8, 9)):
            parts.append(read(text[:, begin:end], begin, **inputs).logits[0].to(expected))
        point = RollbackPoint(cache)
        parts.append(read(text[:, 9:], 9, **inputs).logits[0].to(expected))
        together = RollbackPoint(cache).copies
        point.roll_back()
        for place in range(9, 14):
            read(text[:, place : place + 1], place, **inputs)
    difference = (torch.cat(parts) - expected[5:]).norm(dim=-1).max()
    of_logits = float(difference / (expected - expected.mean(dim=0)).norm(dim=-1).mean())
    return max(of_logits, _difference(together, RollbackPoint(cache).copies))


def _difference(states: list[list[Tensor]], others: list[list[Tensor]]) -> float:
    """The largest relative difference between `RollbackPoint.copies`, computed per head: a single head may differ."""
    errors = [0.0]
    for state, other in zip(chain.from_iterable(states), chain.from_iterable(others), strict=True):
        heads, theirs = (each.to(widest(each.device)).flatten(2 if each.dim() > 3 else 1) for each in (state, other))
        sizes = heads.norm(dim=-1).clamp(min=torch.finfo(state.dtype).tiny)
        errors.append(float(((heads - theirs).norm(dim=-1) / sizes).max()))
    return max(errors)
