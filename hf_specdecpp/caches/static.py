"""A call with a static cache uses a growing copy (`as_growing`), whose contents are copied back at its end."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicSlidingWindowLayer, StaticLayer, StaticSlidingWindowLayer

from hf_specdecpp.caches.batches import ATTENTION_LAYERS
from hf_specdecpp.models.causal_lm import CACHE, CausalLM


def as_growing(target: CausalLM, static: StaticCache, rows: int, longest: int) -> DynamicCache:
    """A copy of a static cache that can grow and be rolled back.

    Args:
        rows: number of sequences in the batch.
        longest (tokens): the maximum length of the sequence at the end of the call.

    Raises:
        ValueError: the contents could not be copied back at the end, as with several rows or too small a window.
    """
    growing = DynamicCache(config=target.config.get_text_config(decoder=True))
    if (reason := _unfit(target, static, growing, rows, longest)) is not None:
        raise ValueError(
            f"A static cache cannot be used here: {reason}. Leave cache_implementation unset and pass no StaticCache."
        )
    for theirs, layer in _pairs(static, growing):
        if length := int(theirs.get_seq_length()):
            layer.update(theirs.keys[:, :, :length], theirs.values[:, :, :length])
            if layer.is_sliding:
                layer.cumulative_length = length
    return growing


def copy_back(static: StaticCache, growing: DynamicCache) -> None:
    """Replace the contents of a static cache by those of the growing copy; `IndexError` if they do not fit.

    Example: after 10 tokens a growing layer with a window of 4 has the last 3. They become rows 1 to 3 of the static
    layer. Row 0 is zero; the next token displaces it."""
    for layer, theirs in _pairs(static, growing):
        length = int(theirs.get_seq_length())
        if length > layer.max_cache_len and not layer.is_sliding:
            raise IndexError(f"A static cache with room for {layer.max_cache_len} tokens cannot hold {length}.")
        layer.reset()
        if length:
            missing = max(min(length, layer.max_cache_len) - theirs.keys.shape[-2], 0)
            keys, values = (functional.pad(each, (0, 0, missing, 0)) for each in (theirs.keys, theirs.values))
            layer.update(keys, values)
            if layer.is_sliding:
                layer.cumulative_length_int = length


def with_static(found: Any, static: StaticCache, growing: DynamicCache) -> Any:
    """`found`, the output of `generate()`, with the static cache in it, and with attentions padded to its size."""
    if isinstance(found, Tensor) or found[CACHE] is not growing:  # some models replace the cache
        return found
    found[CACHE] = static
    if found.attentions is not None:
        rooms = [getattr(layer, "max_cache_len", 0) for layer in list[Any](static.layers)]
        found.attentions = tuple(tuple(map(_widened, step, rooms)) for step in found.attentions)
    return found


def _pairs(static: StaticCache, growing: DynamicCache) -> list[tuple[Any, Any]]:
    """Pairs of a static layer and the growing layer of equal index. Layers that use other layers' keys are left out."""
    both = zip(list[Any](static.layers), list[Any](growing.layers), strict=True)
    return [(layer, other) for layer, other in both if isinstance(layer, StaticLayer)]


def _widened(attention: Tensor, room: int) -> Tensor:
    return functional.pad(attention, (0, max(room - attention.shape[-1], 0)))


def _unfit(target: CausalLM, static: StaticCache, growing: DynamicCache, rows: int, longest: int) -> str | None:
    """Why `as_growing` cannot be used, as a clause for its message; `None` if it can."""
    name, layers, others = type(target).__name__, list[Any](static.layers), list[Any](growing.layers)
    if rows > 1:
        return f"the {rows} rows of a batch accept different numbers of candidates, and it has one length"
    if unknown := {type(layer) for layer in layers} - {StaticLayer, StaticSlidingWindowLayer, *ATTENTION_LAYERS}:
        kept = ", ".join(sorted(kind.__name__ for kind in unknown))
        return f"{name} keeps {kept} in it, which cannot be copied back when candidates are rejected"
    if static.offloading:
        return "it is offloaded, with which assistants were never tried"
    if type(static) is not StaticCache or "update" in vars(static):
        return f"{type(static).__name__} may have code of its own, which would not be called"
    own = [isinstance(layer, StaticSlidingWindowLayer) for layer in layers]
    if own != [isinstance(layer, DynamicSlidingWindowLayer) for layer in others]:
        return f"its layers are not those of {name}"
    for layer, other in _pairs(static, growing):
        if layer.is_sliding and layer.max_cache_len < min(other.sliding_window, longest - 1):
            return (
                f"{name} has windows of {other.sliding_window} tokens, of which it has room for {layer.max_cache_len}, "
                f"and the text may grow to {longest}: plain generate() would see a smaller window"
            )
    return None
