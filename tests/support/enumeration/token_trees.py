"""Does a model read a token tree as it reads each path of it? Feeding trees to models, and what the answer must be."""

from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.cached_context import keep_path
from hf_specdecpp.caches.masks import tree_inputs, tree_mask
from hf_specdecpp.models.causal_lm import CausalLM, cache_argument, positions_of
from hf_specdecpp.trees.tree import relations

# Depth-first order; branches of different depth, the accepted path (PATH) with gaps before, within and after it.
PARENTS = [-1, 0, 1, 2, 3, 2, 1, 0, 7, 8, 7, 10, 10, 12]
PATH = [0, 7, 10, 12, 13]
LEVELS = [[0], [1, 7], [2, 6, 8, 10], [3, 5, 9, 11, 12], [4, 13]]


def tokens_for(model: CausalLM, num_prefix: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Text `[num_prefix]` and a token for each node, no special ones."""
    size, generator = model.get_input_embeddings().weight.shape[0], torch.Generator().manual_seed(seed)
    return torch.randint(3, size, (num_prefix + len(PARENTS),), generator=generator).split([num_prefix, len(PARENTS)])


def path_to(node: int) -> list[int]:
    return [*path_to(PARENTS[node]), node] if node >= 0 else []


def read(model: CausalLM, tokens: Tensor, first: int = 0, **arguments: Any) -> Tensor:
    """Logits `[n, vocab]` of tokens `[n]`, the first of them at `first`: like `generate()`, which counts from 0 where
    RoBERTa's forward by itself counts from 2."""
    ids = tokens[None]
    logits: Tensor = model(input_ids=ids, **positions_of(model, ids, first), **arguments).logits[0]
    return logits


@torch.no_grad()
def one_by_one(model: CausalLM, text: Tensor, nodes: Tensor) -> Tensor:
    """Logits `[nodes, vocab]` of each node, each read at the end of its own path, without any cache."""
    paths = [torch.cat((text, nodes[path_to(node)])) for node in range(len(PARENTS))]
    return torch.stack([read(model, path, use_cache=False)[-1] for path in paths])


@torch.no_grad()
def prefill(model: CausalLM, text: Tensor, record: bool = True) -> Any:
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    arguments: dict[str, Any] = {cache_argument(model): cache}
    read(model, text, use_cache=True, **arguments)
    if record:
        cache.activate_past_recording()
    return cache


@torch.no_grad()
def read_tree(
    model: CausalLM,
    cache: DynamicCache,
    num_prefix: int,
    nodes: Tensor,
    groups: list[list[int]] | None = None,
    prefix_mask: Tensor | None = None,
    position: Tensor | None = None,
) -> Tensor:
    """Logits `[nodes, vocab]` of the tree, in one pass or in one pass a group of nodes."""
    ancestors, depths = relations(PARENTS)
    logits = torch.empty(0)
    fed: list[int] = []
    for group in groups or [list(range(len(PARENTS)))]:
        fed += group
        tree = ancestors[group][:, fed], depths[fed], num_prefix
        inputs = tree_inputs(model, cache, *tree)
        if prefix_mask is not None:
            inputs["attention_mask"] = tree_mask(model, cache, *tree, prefix_mask)
        if position is not None:
            inputs["position_ids"] = inputs["position_ids"] + position - num_prefix
        inputs[cache_argument(model)] = cache
        out = model(input_ids=nodes[group][None], use_cache=True, **inputs).logits[0]
        logits = logits if logits.numel() else out.new_empty((len(PARENTS), out.shape[-1]))
        logits[group] = out
    return logits


def gap(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to how much what is expected varies (as a norm over the last dimension)."""
    difference = (actual - expected).norm(dim=-1).max()
    spread = (expected - expected.mean(dim=0)).norm(dim=-1).mean()
    return float(difference / spread)


def cache_gap(cache: Any, expected: Any) -> float:
    """Largest difference between the rows of two caches, which must hold the same number of tokens and of rows."""
    worst = 0.0
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        if other.keys is None:
            assert layer.keys is None
            continue
        assert layer.get_seq_length() == other.get_seq_length()
        for rows, others in ((layer.keys, other.keys), (layer.values, other.values)):
            assert rows.shape == others.shape
            worst = max(worst, float((rows - others).abs().max() / others.abs().max()))
    return worst


def all_gaps(model: CausalLM, num_prefix: int) -> dict[str, float]:
    """Tree against sequence: logits in one pass and level by level, the cache that is kept, and what comes after."""
    text, nodes = tokens_for(model, num_prefix)
    expected, gaps = one_by_one(model, text, nodes), {}
    for name, groups in (("pass", None), ("levels", LEVELS)):
        cache = prefill(model, text)
        gaps[name] = gap(read_tree(model, cache, num_prefix, nodes, groups), expected)
        fed = sum(groups, []) if groups else list(range(len(PARENTS)))
        keep_path(cache, num_prefix, [fed.index(node) for node in PATH])
        kept = torch.cat((text, nodes[PATH]))
        gaps[name + " cache"] = cache_gap(cache, prefill(model, kept, record=False))
        after = nodes[:6]
        with torch.no_grad():
            continued = read(model, after, len(kept), use_cache=True, **{cache_argument(model): cache})
            whole = read(model, torch.cat((kept, after)), use_cache=False)[-len(after) :]
        gaps[name + " after"] = gap(continued, whole)
    return gaps
