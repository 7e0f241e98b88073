"""What a model needs to read a token tree in one pass: who sees whom (the mask), and who stands where (the positions);
and which models can, refused with the reason (`check_tree`).

A node sees the text and its own ancestors, and stands behind them as if no other node were there. Windows are measured
between places in the text (number of tokens before), not between rows of the cache, where siblings lie in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import Cache

from hf_specdecpp.caches.batches import other_layers
from hf_specdecpp.caches.masks import MASKED, as_mask, counts_rows, grow_in, layer_types, shown_rows, unknown_window
from hf_specdecpp.models.causal_lm import (
    CausalLM,
    cache_argument,
    input_device,
    num_embeddings,
    takes_positions,
    trying,
    why_no_positions,
)
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.models.foreign import foreign_code
from hf_specdecpp.models.quantised import multiplies_in_half
from hf_specdecpp.sampling.randomness import widest
from hf_specdecpp.trees.tree import relations

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
        seen = _seen(ancestors, num_prefix, num_rows, prefix_mask)
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


def _seen(ancestors: Tensor, num_prefix: int, num_rows: int, prefix_mask: Tensor | None) -> Tensor:
    """Bool `[n_query, num_rows]`: what each query would see without any window."""
    num_text = num_rows - ancestors.shape[1]
    seen = nn.functional.pad(ancestors, (num_text, 0), value=True)
    if prefix_mask is not None:
        seen[:, :num_text] = prefix_mask[num_prefix - num_text :]
    return seen


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


CHAIN = "Draft chains instead (tree=False)"
TREE_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
# Relative error of the logits that rounding alone does not reach; wrong masks and positions are far above it. Some
# families compute partly in float32 whatever their dtype.
TREE_TOLERANCE = {torch.float64: 1e-4, torch.float32: 2e-3}
HALF_TREE_TOLERANCE = 0.1

# Attention implementation and dtype with which a model has passed the test of `tree_error`.
_passed: WeakKeyDictionary[CausalLM, tuple[str, torch.dtype]] = WeakKeyDictionary()


def check_tree(target: CausalLM, role: str = "target", cache: Cache | None = None) -> None:
    """Raise `ValueError` unless `target`, the `role` in messages, reads a token tree in one pass as it reads its paths.

    A model that is known not to (`refuse_tree`) is not run. Any other reads a small tree, once, and the logits are
    compared: in `cache`, where that is not the model's own kind.
    """
    refuse_tree(target, role, cache)
    if has_read_tree(target):
        return
    if role == "target" and any(True for _ in foreign_code(target)):  # compared in each text until enough is known
        return
    subject = f"The {role} {type(target).__name__}"
    try:
        error = tree_error(target)
    except Exception as failure:  # whatever goes wrong in a foreign forward, trees are refused
        raise ValueError(f"{subject} fails on a token tree ({failure!r}). {CHAIN}.") from failure
    exact = None if multiplies_in_half(target) else TREE_TOLERANCE.get(target.dtype)
    tolerance = exact or HALF_TREE_TOLERANCE
    if not error <= tolerance:
        raise ValueError(
            f"{subject} reads a token tree differently from each of its paths: its logits are off by {error:.2g} of "
            f"their spread (rounding explains {tolerance:g}), so the output would be wrong. {CHAIN}."
        )
    _passed[target] = _way_to_read(target)


def check_trees(readers: Mapping[str, CausalLM]) -> None:
    """`check_tree` for each of the models by their roles."""
    for role, model in readers.items():
        check_tree(model, role)


def refuse_tree(target: CausalLM, role: str = "target", cache: Cache | None = None) -> None:
    """Raise `ValueError` if `target`, the `role` in messages, is known, without a pass, not to read token trees."""
    check_target(target, recurrent=True)
    subject, config = f"The {role} {type(target).__name__}", target.config.get_text_config(decoder=True)
    if (implementation := config._attn_implementation) not in MASKED:
        raise ValueError(
            f"{subject} runs attn_implementation={implementation!r}, which takes no mask of a tree's shape. Load it "
            f'with attn_implementation="sdpa", or call its set_attn_implementation("sdpa"). {CHAIN} otherwise.'
        )
    layers = [*DynamicCache(config=config).layers, *(cache.layers if cache is not None else [])]
    if (reason := _no_tree(target, config, layers)) is not None:
        raise ValueError(f"{subject} {reason}, so it cannot read a token tree. {CHAIN}.")


def has_read_tree(target: CausalLM) -> bool:
    """Whether `check_tree` has run a model as it is now, and the logits were right."""
    return _passed.get(target) == _way_to_read(target)


def _way_to_read(target: CausalLM) -> tuple[str, torch.dtype]:
    return target.config.get_text_config(decoder=True)._attn_implementation, target.dtype


def _no_tree(target: CausalLM, config: Any, layers: list[Any]) -> str | None:
    """What is known about the model, without running it, that rules out trees."""
    if target.config.model_type == "paligemma":
        return "reads its prompt in both directions and counts positions from 1"
    if getattr(config, "alibi", False) or config.model_type in ("bloom", "mpt"):
        return "measures distances along the rows of its cache (ALiBi)"
    if not takes_positions(target):
        return f"{why_no_positions(target)}, but siblings in a tree stand at one position"
    if (reason := counts_rows(config)) is not None:
        return reason
    if getattr(config, "cross_attention_layers", None):
        return "keeps rows of another length in its cache (cross-attention)"
    types = set(getattr(config, "layer_types", None) or ())
    if unknown := types - TREE_LAYER_TYPES:
        return f"has layers of type {', '.join(sorted(unknown))}"
    if others := other_layers(layers):
        return f"keeps {others} in its cache"
    return unknown_window(target, config)


# The tree of `tree_error`: each node's parent, in depth-first order, and the paths to its leaves, equally long.
TEST_PARENTS = [-1, 0, 1, 1, 0, 4]
TEST_PATHS = [[0, 1, 2], [0, 1, 3], [0, 4, 5]]


def tree_error(model: CausalLM) -> float:
    """How far the model's logits on a small tree are from those of its paths read one by one, relative to how much
    the logits vary from node to node. Three passes, of at most 18 tokens.
    """
    device = input_device(model)
    with trying(model) as read:
        tokens = (11 + 7 * torch.arange(3 + len(TEST_PARENTS), device=device)) % num_embeddings(model)
        text, nodes = tokens[:3], tokens[3:]
        paths = torch.stack([torch.cat((text, nodes[path])) for path in TEST_PATHS])
        one_by_one = read(paths, use_cache=False).logits[:, len(text) :].to(widest(device))
        expected = one_by_one.new_empty((len(nodes), one_by_one.shape[-1]))
        for path, logits in zip(TEST_PATHS, one_by_one, strict=True):
            expected[path] = logits
        cache = DynamicCache(config=model.config.get_text_config(decoder=True))
        arguments: dict[str, Any] = {cache_argument(model): cache, "use_cache": True}
        read(text[None], **arguments)
        cache.activate_past_recording()
        ancestors, depths = (each.to(device) for each in relations(TEST_PARENTS))
        inputs = tree_inputs(model, cache, ancestors, depths, num_prefix=len(text))
        logits = read(nodes[None], **arguments, **inputs).logits[0]
    difference = (logits.to(expected) - expected).norm(dim=-1).max()
    return float(difference / (expected - expected.mean(dim=0)).norm(dim=-1).mean())
