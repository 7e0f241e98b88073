"""Attention masks for batches and token trees, by kind of layer, also with sliding windows and chunks.

A node of a tree sees the prefix, its ancestors and itself. Its position is that in the path from the root. Windows are
measured in positions of the sequence, not in rows of the cache, because these also contain siblings."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

from hf_specdecpp.models.causal_lm import CausalLM, inner_decoder
from hf_specdecpp.models.checks import frequency_changes
from hf_specdecpp.models.foreign import names_in

MASKED = ("sdpa", "eager")  # implementations of attention that take a mask of any shape
GROUPED = "specdecpp_grouped"  # the attention of captured passes (`cuda_graphs.model_copy`)
# Config fields of families that attend to a choice of earlier tokens, made over rows or blocks of rows of the cache.
SPARSE = ("keep_window_size", "index_topk_blocks", "num_random_blocks")
# Kinds of layer with a window, the config field of its size, and transformers' function that makes its mask.
WINDOWS = (
    ("sliding_attention", "sliding_window", "create_sliding_window_causal_mask"),
    ("chunked_attention", "attention_chunk_size", "create_chunked_causal_mask"),
)


def is_replaced(config: Any) -> bool:
    """Whether captured passes replace a model's attention by `GROUPED`: sdpa and every version of FlashAttention."""
    name = config._attn_implementation or ""
    return name == "sdpa" or "flash" in name


def why_no_holes(config: Any) -> str | None:
    """Why holes or siblings in the cache would change a model's results, as the predicate of a message: the model
    computes with numbers of cache rows where others use positions. `None` if no reason is known."""
    if getattr(config, "attn_temperature_tuning", False):
        return "scales its attention by the row of the cache that a token lies in (attn_temperature_tuning)"
    if name := next((name for name in SPARSE if hasattr(config, name)), None):
        return f"chooses by their place which rows of its cache it reads ({name})"
    if "local" in getattr(config, "attention_layers", ()):
        return "measures its local attention along the rows of its cache"
    return None


def row_masks(model: CausalLM, valid: Tensor, count: int) -> Any:
    """The attention mask of a pass over the last `count` columns of a batch whose rows have holes (`BatchContext`).

    Windows are measured in a row's own tokens. A dummy sees itself, so that every query sees something.

    Example: with a window of 2, the token in the last column of the row 1 0 1 1 sees columns 2 and 3, its own.

    Args:
        valid: `[rows, columns]` bool: which columns are tokens of a row, including those of the pass.

    Returns:
        If no layer has a window, `[rows, columns]` int64, from which transformers makes the mask. Otherwise the result
        of `as_mask`, or a dict of such masks by kind of layer if there are several kinds.
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
    """The kind of each layer, such as "sliding_attention", inferred from a text config as transformers' caches do."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return types
    if getattr(config, "sliding_window", None) is not None:
        return ["sliding_attention"] * num_layers
    chunked = getattr(config, "attention_chunk_size", None) is not None
    return ["chunked_attention" if chunked else "full_attention"] * num_layers


def as_mask(seen: Tensor, model: CausalLM) -> Tensor:
    """The mask that the model's attention takes, `[rows, 1, n_query, kv]`. `seen`: bool `[rows, n_query, kv]`, or
    `[n_query, kv]` for one row: the keys that each query sees.

    The mask is boolean for sdpa, and additive for eager attention, which adds it to the scores. For `GROUPED` it is
    additive, `[rows, 1, group * n_query, kv]`, and so repeated once for all layers of a pass."""
    seen, config = seen.view(-1, 1, *seen.shape[-2:]), model.config.get_text_config(decoder=True)
    if (implementation := config._attn_implementation) not in ("eager", GROUPED):
        return seen
    mask = torch.zeros(seen.shape, dtype=model.dtype, device=seen.device)
    if implementation == "eager":
        return mask.masked_fill_(~seen, torch.finfo(model.dtype).min)
    return mask.masked_fill_(~seen, float("-inf")).repeat(1, 1, _group(config), 1)


def _group(config: Any) -> int:
    """Number of query heads that share one head of keys and values."""
    heads = config.num_attention_heads
    return int(heads // (getattr(config, "num_key_value_heads", None) or heads))


def unknown_window(target: CausalLM, config: Any) -> str | None:
    """Why masks made here may not fit a model's windows, which no short test would find, as the predicate of a message;
    `None` if they fit.

    A cache drops tokens that have left a window even if the model's mask does not hide them. Several tokens read at
    once would then see more than each alone. Whether the model makes such masks is inferred from its forward's code."""
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
        if windows and maker not in names_in(forward.__code__):
            return (
                f"has {described} in its cache but not in its mask, so candidates would see more tokens (a model that "
                "was trained without windows should say so in its config: sliding_window=None)"
            )
        if windows and windows != {getattr(config, size, None)}:
            return f"has {described} whose mask hf_specdecpp does not know"
    return None


class GrowingTreeLayer(DynamicSlidingWindowLayer):
    """The sliding-window layer of a cache in which a tree is read in several passes.

    transformers' layer gives attention only as many rows as a chain needs, a window. In a tree most earlier nodes are
    not on a node's path, and would displace prefix tokens that are in its window. So this layer gives all its rows; the
    mask excludes those outside the window."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        shown = super().update(key_states, value_states, *args, **kwargs)
        stored: Any = (self.keys, self.values)
        return stored if self.record_past else shown

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        stored = 0 if self.keys is None or not self.keys.numel() else self.keys.shape[-2]
        return stored + query_length, self.cumulative_length - stored


# Token trees. -------------------------------------------------------------------------------------------------------


WINDOWED = ("sliding_attention", "chunked_attention")


class CachedPrompt(NamedTuple):
    """What masks and positions need to know about the prompts in a `FixedCache`: padding and special positions.

    Example: `[pad, pad, 5, 6]` in a cache of 8 rows has `shown` 0011 1111 and offset -2: 6 is in row 3, at position 1.
    """

    shown: Tensor  # `[sequences, capacity]` bool, false where a row is hidden from all queries
    offset: Tensor  # position minus row: `[sequences, 1]`, or `[d, sequences, 1]` if each token has d positions

    @property
    def padding(self) -> Tensor:
        """Number of hidden rows before the first shown token, `[sequences, 1, 1]`."""
        return (self.shown.cumsum(-1) == 0).sum(-1)[:, None, None]


def tree_inputs(model: CausalLM, cache: Cache, ancestors: Tensor, depths: Tensor, num_prefix: int) -> dict[str, Any]:
    """Mask and positions for a forward pass over the last n_query of the n nodes of a tree, in a growing cache.
    `check_tree(model)` tests whether the model supports them.

    Example: 3 tokens of prefix and a root with two children, none of them read yet. The positions are 3, 4, 4; the
    mask's rows, over the 3 rows of prefix and the 3 nodes, are 111 100, 111 110 and 111 101.

    Args:
        cache: contains `num_prefix` tokens, then the n - n_query nodes that this round's earlier passes have read.
        ancestors: bool `[n_query, n]`, on the model's device like `depths`: the nodes, in the order of reading, that
            each query sees, itself included.
        depths: int `[n]`: node i has position `num_prefix + depths[i]`. The root, the last emitted token, has depth 0.
        num_prefix: number of tokens in the cache before the root, including masked ones.

    Returns:
        `attention_mask`: `[1, 1, n_query, kv]` (`as_mask`), or a dict of such masks by layer type if layers differ;
            and `position_ids`: `[1, n_query]`, `num_prefix` for the root.
    """
    mask = tree_mask(model, cache, ancestors, depths, num_prefix)
    return {"attention_mask": mask, "position_ids": (num_prefix + depths[-ancestors.shape[0] :])[None]}


def tree_mask(
    model: CausalLM, cache: Cache, ancestors: Tensor, depths: Tensor, num_prefix: int, prefix_mask: Tensor | None = None
) -> Any:
    """The attention mask of `tree_inputs`, with the arguments described there, and also for prefixes with padding.
    `prefix_mask`: bool `[num_prefix]`, false for padding, which no query sees; `None` if there is none."""
    config = model.config.get_text_config(decoder=True)
    num_queries = ancestors.shape[0]
    if num_queries < ancestors.shape[1]:  # the tree is read in several passes
        for each in cache.layers:
            if type(each) is DynamicSlidingWindowLayer:
                each.__class__ = GrowingTreeLayer
    if prefix_mask is not None:
        prefix_mask = prefix_mask.to(ancestors.device)
    masks = {}
    for kind, layer in _kinds(config, cache).items():
        num_rows = num_queries if layer is None else layer.get_mask_sizes(num_queries)[0]
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
    """The kinds of a model's layers, each with the first layer in `cache` of this kind that has keys, else `None`."""
    types = layer_types(config, config.num_hidden_layers)
    kinds: dict[str, Any] = dict.fromkeys(types)
    layers: list[Any] = cache.layers
    for kind, layer in zip(types, layers, strict=False):
        if kinds[kind] is None and layer.keys is not None:  # else it is new, or shares another layer's keys
            kinds[kind] = layer
    return kinds


def _near(config: Any, kind: str, queries: Tensor, keys: Tensor, padding: Tensor | int) -> Tensor:
    """Bool `[..., n_query, kv]`: whether each key is in each query's sliding window, or for other `kind`s in its chunk.
    `queries` `[..., n_query]`, `keys` `[..., kv]`: positions; `padding`: hidden rows before the first token."""
    keys, queries = keys[..., None, :], queries[..., None]
    if kind == "sliding_attention":
        return keys > queries - config.sliding_window
    size = config.attention_chunk_size
    return (keys - padding) // size == (queries - padding) // size


@cache  # which graphs refer to
def span(count: int, device: torch.device) -> Tensor:
    """The integers 0 to `count` - 1, as one tensor for all calls, which must not be written to."""
    with torch.inference_mode(False):
        return torch.arange(count, device=device)


class Nodes:
    """The nodes of a chain or tree in a captured pass: nodes that the pass reads (queries), and nodes that queries see.

    Args:
        seen: bool `[n_query, n]`, or `[sequences, n_query, n]` if trees differ: which of n nodes each query sees. The
            nodes have the rows after the prefix, in this order; rows of later levels may be unwritten.
        depths: `[n]`, of all nodes, 0 for the root.
        places: `[n_query]`, depths of the queries.
    """

    def __init__(self, seen: Tensor, depths: Tensor, places: Tensor) -> None:
        self.seen, self.depths, self.places, self.most = seen, depths, places, seen.shape[-1]
        self._masks: dict[Any, Tensor] = {}

    def columns(self) -> Tensor:
        """`[..., n_query, n + 2]`: a column of true for all rows of the prefix, the columns of `seen`, and a column of
        false for all other rows."""
        return nn.functional.pad(nn.functional.pad(self.seen, (1, 0), value=True), (0, 1), value=False)

    def mask(self, model: CausalLM) -> Tensor:
        """`columns()` as a mask for the model's attention (`as_mask`), made once."""
        config = model.config.get_text_config(decoder=True)
        key = config._attn_implementation, model.dtype, _group(config)
        if key not in self._masks:
            self._masks[key] = as_mask(self.columns(), model)
        return self._masks[key]


def chain_nodes(count: int, device: torch.device, first: int = 0, most: int = 0) -> Nodes:
    """The nodes of a pass over `count` tokens of a chain of `most` tokens (0: of `count`), from index `first` on."""
    depths = span(most or count, device)
    places = depths[first : first + count]
    return Nodes(depths <= places[:, None], depths, places)


kept_chain_nodes = cache(chain_nodes)  # for passes of rounds, whose graphs refer to the masks


def inputs_in_place(model: CausalLM, cache: Any, nodes: Nodes, num_prefix: Tensor) -> dict[str, Any]:
    """Mask and positions of a captured pass over the queries of `nodes`, computed on the device only: `attention_mask`
    and `position_ids` as of `tree_inputs`, for all sequences in a cache of fixed size.

    Example: a cache of capacity 8 contains 3 tokens of prefix and a root; a pass reads its two children. With room for
    4 nodes, `seen` is 1100 and 1010, `depths` 0, 1, 1, 0 and `places` 1, 1. The positions are 4, 4; the mask's rows are
    1111 1000 and 1111 0100.

    Args:
        cache: a `FixedCache`.
        num_prefix: `[sequences]`, number of tokens in the cache before the root.
    """
    config = model.config.get_text_config(decoder=True)
    begin, prompt = num_prefix[:, None], cache.prompt
    queries = begin + nodes.places
    types, columns_of = layer_types(config, config.num_hidden_layers), dict[int, Tensor]()
    masks: dict[str, Tensor] = {}
    capacities = {kind: layer.capacity for kind, layer in zip(types, cache.layers, strict=False)}
    for kind in dict.fromkeys(types):
        if (capacity := capacities.get(kind, cache.capacity)) not in columns_of:
            columns_of[capacity] = _columns(cache, capacity, begin, nodes)
        columns = columns_of[capacity]
        if kind in WINDOWED:
            depths = nodes.depths[(columns - 1).clamp(0, nodes.most - 1)]
            keys = torch.where(columns > 0, begin + depths, cache.tokens_of(capacity, begin + nodes.most))
            near = _near(config, kind, queries, keys, 0 if prompt is None else prompt.padding)
            masks[kind] = as_mask(_of_rows(nodes.columns(), columns) & near, model)
        else:
            masks[kind] = _of_rows(nodes.mask(model), columns[:, None])
    return {
        "attention_mask": masks if len(masks) > 1 else next(iter(masks.values())),
        # Padding, which no query sees, would have negative positions, which position tables lack.
        "position_ids": queries if prompt is None else (queries + prompt.offset).clamp_min(0),
    }


def why_not_in_place(model: CausalLM) -> str | None:
    """Why a model's passes cannot be captured with `inputs_in_place`, for a message; `None` if they can."""
    config = model.config.get_text_config(decoder=True)
    if (implementation := config._attn_implementation) != "eager" and not is_replaced(config):
        return f"attn_implementation={implementation!r} takes no mask of ours"
    if frequency_changes(config):
        return "rotary frequencies change with the length of the text"
    return why_no_holes(config) or unknown_window(model, config)


def _of_rows(found: Tensor, columns: Tensor) -> Tensor:
    """`[sequences, ..., n_query, room]`: for each row of a layer the column of `found` `[..., n_query, n + 2]` that
    `columns` `[sequences, ..., room]` names."""
    shape = (len(columns), *found.shape[-columns.dim() : -1], columns.shape[-1])
    return found.expand(*shape[:-1], -1).gather(-1, columns[..., None, :].expand(shape))


def _columns(cache: Any, capacity: int, begin: Tensor, nodes: Nodes) -> Tensor:
    """For each row of a layer with `capacity` rows the index of its column in `Nodes.columns`, `[sequences, capacity]`.
    `begin`: number of prefix tokens, `[sequences, 1]`."""
    last, prompt = nodes.most + 1, cache.prompt
    if capacity == cache.capacity:
        columns = (span(capacity + 1, begin.device)[1:] - begin).clamp(0, last)
        return columns if prompt is None else torch.where(prompt.shown, columns, last)
    tokens = cache.tokens_of(capacity, begin + nodes.most)
    return torch.where(cache.shown(tokens), (tokens + 1 - begin).clamp(0, last), last)
