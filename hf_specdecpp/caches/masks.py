"""Who sees whom: the masks that models take, by kind of attention layer, for batches and token trees, and the windows
that caches and masks have.

A node of a tree sees the text and its own ancestors, and stands behind them as if no other node were there. Windows are
measured between places in the text (number of tokens before), not between rows of the cache, where siblings lie in
between.
"""

from __future__ import annotations

import inspect
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.checks import WITHOUT

MASKED = ("sdpa", "eager")  # implementations of attention that take a mask of any shape
# Config fields of families that attend to a choice of earlier tokens, made over rows or blocks of rows of the cache.
SPARSE = ("keep_window_size", "index_topk_blocks", "num_random_blocks")
# Kinds of layer with a window, the config field of its size, and transformers' function that makes its mask.
WINDOWS = (
    ("sliding_attention", "sliding_window", "create_sliding_window_causal_mask"),
    ("chunked_attention", "attention_chunk_size", "create_chunked_causal_mask"),
)


def counts_rows(config: Any) -> str | None:
    """What about a model depends on the rows of its cache rather than on positions, so that holes would change it."""
    if getattr(config, "attn_temperature_tuning", False):
        return "scales its attention by the row of the cache that a token lies in (attn_temperature_tuning)"
    if name := next((name for name in SPARSE if hasattr(config, name)), None):
        return f"chooses by their place which rows of its cache it reads ({name})"
    if "local" in getattr(config, "attention_layers", ()):
        return "measures its local attention along the rows of its cache"
    return None


def row_masks(model: CausalLM, valid: Tensor, count: int) -> Any:
    """The attention mask of a pass over the last `count` columns of a batch whose rows have holes.

    Windows are measured between places in a row's text. A dummy sees itself, so that no query sees nothing at all.

    Example: a row 1 0 1 1 whose last column is fed, with a window of 2: the token sees columns 2 and 3, its own.

    Args:
        valid: `[rows, columns]` bool: which columns are tokens of a row, those of the pass included.

    Returns:
        `[rows, columns]` int64, from which transformers makes the mask, where no layer has a window; else masks as
        `as_mask` makes them, by kind of layer where there are several.
    """
    config = model.config.get_text_config(decoder=True)
    kinds = set(layer_types(config, config.num_hidden_layers))
    if "sliding_attention" not in kinds or config._attn_implementation not in MASKED:
        return valid.long()
    columns = torch.arange(valid.shape[1], device=valid.device)
    key, query = columns[None, :], columns[-count:, None]
    seen = (valid[:, None, :] & (key < query)) | (key == query)
    places = valid.cumsum(dim=1)
    near = places[:, None, :] > places[:, -count:, None] - config.sliding_window
    masks = {kind: as_mask(seen & near if kind == "sliding_attention" else seen, model) for kind in kinds}
    return masks if len(masks) > 1 else next(iter(masks.values()))


def layer_types(config: Any, num_layers: int) -> list[str]:
    """The kind of each layer, as transformers' caches infer it."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return types
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * num_layers
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return ["chunked_attention" if chunked else "full_attention"] * num_layers


def as_mask(seen: Tensor, model: CausalLM) -> Tensor:
    """`[rows, 1, n_query, kv]` of bool `[rows, n_query, kv]`, or of one row without that dimension.

    Additive where the attention is eager, which adds its mask to the scores: a bool one would hide nothing.
    """
    seen = seen.view(-1, 1, *seen.shape[-2:])
    if model.config.get_text_config(decoder=True)._attn_implementation != "eager":
        return seen
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
    return mask.masked_fill_(~seen, torch.finfo(model.dtype).min)


def check_windows(target: CausalLM) -> None:
    """Raise `ValueError` if the target's cache has windows that its masks may not have."""
    if (reason := unknown_window(target, target.config.get_text_config(decoder=True))) is not None:
        raise ValueError(
            f"{type(target).__name__} {reason}. {WITHOUT}. A model that was trained without windows should say so in "
            "its config (sliding_window=None)."
        )


def unknown_window(target: CausalLM, config: Any) -> str | None:
    """What about a model's windows may be measured in another way than here: no short test reaches past them.

    A cache drops what has left a window whether or not the model hides it. Where the model does not, several tokens at
    once see more than each would by itself. Whether it does is read from the code of its forward.
    """
    layers = DynamicCache(config=config).layers
    if not any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
        return None
    forward = inspect.unwrap(type(inner_decoder(target)).forward)
    for kind, size, maker in WINDOWS:
        windows = {
            layer.sliding_window
            for layer, layer_type in zip(layers, layer_types(config, len(layers)), strict=False)
            if layer_type == kind and isinstance(layer, DynamicSlidingWindowLayer)
        }
        described = f"{kind.replace('_', ' ')} over {sorted(windows)} tokens"
        if windows and maker not in _names(forward.__code__):
            return f"has {described} in its cache but not in its mask, so candidates would see more tokens"
        if windows and windows != {getattr(config, size, None)}:
            return f"has {described} whose mask hf_specdecpp does not know"
    return None


def _names(code: CodeType) -> set[str]:
    """Names that a function uses, those of the functions in it included."""
    inner = (_names(each) for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*inner)


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


# Token trees. -------------------------------------------------------------------------------------------------------


WINDOWED = ("sliding_attention", "chunked_attention")


class Prompt(NamedTuple):
    """A prompt in a cache of fixed size.

    Example: `[pad, pad, 5, 6]` in a room of 8 is shown as 0011 1111, its offset is -2: 6 is in row 3, at position 1.
    """

    shown: Tensor  # `[texts, room]` bool, false where a row is hidden from all queries
    offset: Tensor  # `[texts, 1]`, or `[d, texts, 1]` where a model has d positions: of a token less its row


def tree_inputs(model: CausalLM, cache: Cache, ancestors: Tensor, depths: Tensor, num_prefix: int) -> dict[str, Any]:
    """Forward arguments for one pass over the last n_query of n nodes; `check_tree(model)` says whether they work.

    Example: 3 tokens of text and a root with two children, none of them fed yet. The positions are 3, 4, 4; the mask's
    rows, over the 3 rows of text and the 3 nodes, are 111 100, 111 110 and 111 101.

    Args:
        cache: holds `num_prefix` tokens of text, then the n - n_query nodes fed earlier in this round (the levels of a
            growing tree).
        ancestors: bool `[n_query, n]`, on the model's device as `depths` are: which nodes, in feeding order and itself
            included, a query sees.
        depths: int `[n]`: node i stands at place `num_prefix + depths[i]`. The root, which is the last emitted token
            and not yet in the cache, has depth 0.
        num_prefix: tokens of text in the cache, masked ones included.

    Returns:
        `attention_mask`: `[1, 1, n_query, kv]`, bool where the attention implementation is sdpa and additive in the
        model's dtype where it is eager; or a dict of such masks by layer type where layers differ.
        `position_ids`: `[1, n_query]`, where the root's is `num_prefix`.
    """
    mask = tree_mask(model, cache, ancestors, depths, num_prefix)
    return {"attention_mask": mask, "position_ids": (num_prefix + depths[-ancestors.shape[0] :])[None]}


def tree_mask(
    model: CausalLM,
    cache: Cache,
    ancestors: Tensor,
    depths: Tensor,
    num_prefix: int,
    prefix_mask: Tensor | None = None,
) -> Any:
    """The mask of `tree_inputs` alone, for a text whose rows are not its positions: after masked tokens and images.
    `prefix_mask`, bool `[num_prefix]`, is false where a token is padding, which nobody sees; `None` if none is."""
    config = model.config.get_text_config(decoder=True)
    num_queries = ancestors.shape[0]
    if num_queries < ancestors.shape[1]:
        grow_in(cache)
    if prefix_mask is not None:
        prefix_mask = prefix_mask.to(ancestors.device)
    masks = {}
    for kind, layer in _kinds(config, cache).items():
        num_rows = num_queries if layer is None else shown_rows(layer, num_queries)
        num_text = num_rows - ancestors.shape[1]
        seen = nn.functional.pad(ancestors, (num_text, 0), value=True)  # without any window
        if prefix_mask is not None:
            seen[:, :num_text] = prefix_mask[num_prefix - num_text :]
        if kind in WINDOWED:
            text = torch.arange(num_prefix - num_rows + depths.shape[0], num_prefix, device=ancestors.device)
            padding = 0 if prefix_mask is None else (prefix_mask.cumsum(0) == 0).sum()
            places = torch.cat((text, num_prefix + depths))
            seen &= _near(config, kind, places[-num_queries:], places, padding)
        masks[kind] = as_mask(seen, model)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def _kinds(config: Any, cache: Cache) -> dict[str, Any]:
    """The kinds of attention layer in a model, each with the first cache layer of its kind (`None` before any pass)."""
    types = layer_types(config, config.num_hidden_layers)
    kinds: dict[str, Any] = dict.fromkeys(types)
    missing = len(kinds)
    layers: list[Any] = cache.layers
    for kind, layer in zip(types, layers, strict=False):
        if kinds[kind] is None and layer.keys is not None:  # else it is new, or shares another layer's keys
            kinds[kind] = layer
            missing -= 1
            if not missing:
                break
    return kinds


def _near(config: Any, kind: str, queries: Tensor, keys: Tensor, padding: Tensor | int = 0) -> Tensor:
    """Bool `[..., n_query, kv]`: which keys lie within the window of each query, or its chunk, which counts no
    padding; by their places `[..., n_query]` and `[..., kv]`."""
    keys, queries = keys[..., None, :], queries[..., None]
    if kind == "sliding_attention":
        return keys > queries - config.sliding_window
    size = config.attention_chunk_size
    return (keys - padding) // size == (queries - padding) // size


def inputs_in_place(
    model: CausalLM, cache: Any, ancestors: Tensor, depths: Tensor, places: Tensor, num_prefix: Tensor
) -> dict[str, Any]:
    """The same for texts in caches of fixed size, where nothing depends on numbers of the host: for captured passes.

    Example: a cache with room for 8 tokens holds 3 tokens of text and a root, below which two children are read. With
    room for 4 nodes, `ancestors` are 1100 and 1010, `depths` 0, 1, 1, 0 and `places` 1, 1. The positions are 4, 4; the
    mask's rows are 1111 1000 and 1111 0100.

    Args:
        cache: has a `room` for so many tokens, and the `prompt`: what of it is hidden, and where its tokens stand;
            `None` where nothing is, and rows are positions.
        ancestors: bool `[n_query, n]`, or `[texts, n_query, n]` where texts have other trees: which of up to n nodes a
            query sees. They lie after the text, in this order.
        depths: `[n]`, of all nodes.
        places: `[n_query]`, depths of the queries.
        num_prefix: `[texts]`, tokens of each text in the cache.
    """
    config = model.config.get_text_config(decoder=True)
    begin, (count, most), prompt = num_prefix[:, None], ancestors.shape[-2:], cache.prompt
    nodes = torch.arange(cache.room, device=ancestors.device) - begin  # negative: text
    known = nodes.clamp(0, most - 1)
    text = nodes < 0 if prompt is None else (nodes < 0) & prompt.shown
    of_rows = ancestors.expand(len(begin), -1, -1).gather(2, known[:, None].expand(-1, count, -1))
    seen = (of_rows & ((nodes >= 0) & (nodes < most))[:, None]) | text[:, None]
    keys = begin + torch.where(nodes < 0, nodes, depths[known])
    queries = begin + places
    padding = 0 if prompt is None else (prompt.shown.cumsum(-1) == 0).sum(-1)[:, None, None]
    masks = {
        kind: as_mask(seen & _near(config, kind, queries, keys, padding) if kind in WINDOWED else seen, model)
        for kind in dict.fromkeys(layer_types(config, config.num_hidden_layers))
    }
    return {
        "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        # Padding, which nobody sees, has no positions, and a table of positions has none below 0.
        "position_ids": queries if prompt is None else (queries + prompt.offset).clamp_min(0),
    }
