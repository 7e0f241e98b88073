"""The KV cache of fixed size that captured passes need (`FixedCache`), and its sequences (`FixedContext`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdecpp.caches.batches import other_layers
from hf_specdecpp.caches.cached_context import width_of
from hf_specdecpp.caches.masks import CachedPrompt, Nodes, inputs_in_place, span
from hf_specdecpp.cuda_graphs.graphs import lasting
from hf_specdecpp.models.causal_lm import CausalLM

MIN_CAPACITY, LARGE_CAPACITY = 256, 8192  # tokens; capacities above the second are its multiples
SHARE, KEPT_SHARE = 0.25, 0.75  # share of free memory for all fixed caches; the share of it that drops leave in use


class FixedLayer(CacheLayerMixin):
    """A layer of a `FixedCache`. With a window it keeps its latest tokens only: token t is in row t % capacity.

    Args:
        length: `[texts]` int64, committed tokens; shared by all layers.
        rows: by capacity of a layer `[texts, n]`, the rows that the current pass writes; shared by all layers.
        capacity (tokens): number of rows.

    Attributes:
        stored: keys and values, in one tensor `[2, texts, heads, capacity, size]` if their shapes are equal.
    """

    keys: Tensor
    values: Tensor
    stored: list[Tensor]
    is_compileable, is_sliding = True, False

    def __init__(self, length: Tensor, rows: dict[int, Tensor], capacity: int) -> None:
        super().__init__()
        self.length, self.rows, self.capacity = length, rows, capacity

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        texts, both = len(self.length), (key_states, value_states)
        shapes = [(texts, each.shape[1], self.capacity, each.shape[-1]) for each in both]
        with lasting():
            if shapes[0] == shapes[1]:
                together = key_states.new_zeros((2, *shapes[0]))
                self.keys, self.values, self.stored = *together, [together]
            else:
                self.keys, self.values = self.stored = [key_states.new_zeros(shape) for shape in shapes]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write a pass's keys and values to the rows of `FixedCache.begin_pass`; return all `capacity` rows of both."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows = self.rows[self.capacity]
        for tensor, states in ((self.keys, key_states), (self.values, value_states)):
            tensor.scatter_(2, _of_heads(rows, states), states)
        return self.keys, self.values

    def write(self, rows: slice | Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values `[m, heads, n, size]` of the first m texts to n `rows`."""
        if not self.is_initialized:
            self.lazy_initialization(keys, values)
        self.keys[: len(keys), :, rows], self.values[: len(keys), :, rows] = keys, values

    def rows_of(self, first: int, last: int) -> Tensor:
        """The rows of the tokens with the indices `first` to `last` - 1."""
        return torch.arange(first, last, device=self.length.device) % self.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.capacity, 0

    def get_seq_length(self) -> Any:
        """The first sequence's length, 0-d int64 on the device, as in transformers' static layers."""
        return self.length[0]

    def get_max_length(self) -> int:
        return self.capacity


class FixedCache(Cache):
    """A KV cache with tensors of fixed size, whose lengths are on the device only, so that graphs commit and roll back.

    Example: after 3 tokens, a pass over 2 writes rows 3 and 4. `length.add_(2)` commits both, `length.add_(1)` the
    first; the next pass overwrites all others. `length.sub_(1)` rolls back one token.

    Args:
        windows: for each layer the number of tokens that it attends to, infinite without a window.
        capacity (tokens): number of rows for each sequence, including tokens that are not committed.
        device: the model's device.
        positions: shape `[..., texts, 1]` of one token's position ids, for prompts that may be padded or have special
            position ids; `None` for one sequence without these.
        spare (tokens): rows of layers with a window beyond the window: at least as many as a pass writes.

    Attributes:
        text: value of `Budget.text` when the cache was last used.
        length: int64 `[texts]`, on the device: number of committed tokens.
        prompt: hidden tokens of the prompts and the offset of positions; `None` without `positions`.
    """

    layers: Any
    text = 0

    def __init__(
        self,
        windows: Sequence[float],
        capacity: int,
        device: torch.device,
        positions: torch.Size | None = None,
        spare: int = 0,
    ) -> None:
        texts = 1 if positions is None else positions[-2]
        with lasting():
            self.length = torch.zeros(texts, dtype=torch.long, device=device)
            self.prompt: CachedPrompt | None = None
            if positions is not None:
                shown = torch.ones((texts, capacity), dtype=torch.bool, device=device)
                self.prompt = CachedPrompt(shown, torch.zeros(positions, dtype=torch.long, device=device))
        self._rows: dict[int, Tensor] = {}
        capacities = [int(min(capacity, window + spare)) for window in windows]
        super().__init__(layers=[FixedLayer(self.length, self._rows, each) for each in capacities])
        self.capacity, self._of_windows = capacity, {*capacities} - {capacity}

    def begin_pass(self, num_tokens: int) -> None:
        """Called before a pass over `num_tokens` tokens: they get the rows after the committed ones."""
        self._rows[self.capacity] = rows = span(num_tokens, self.length.device) + self.length[:, None]
        self._rows.update({each: rows % each for each in self._of_windows})

    def part(self, first: int, count: int) -> FixedCache:
        """A cache of only the `count` layers from index `first` on, which shares tensors and lengths with this one."""
        part = copy(self)
        part.layers = self.layers[first : first + count]
        return part

    def move(self, rows: Tensor) -> None:
        """Move the latest pass's `rows` `[texts, n]`, ascending from 0, to the first rows after committed tokens.

        Example: 10 tokens are committed. Rows 0, 2 and 3 of the pass move from 10, 12, 13 to 10, 11, 12."""
        begin = self.length[:, None]
        goal, source = span(rows.shape[1], rows.device) + begin, rows + begin
        places = {self.capacity: (goal, source)} | {each: (goal % each, source % each) for each in self._of_windows}
        for layer in self.layers:
            goal, source = places[layer.capacity]
            for each in layer.stored if layer.is_initialized else ():
                each.scatter_(-2, _of_heads(goal, each), each.gather(-2, _of_heads(source, each)))

    def rows(self, first: int, last: int) -> list[Tensor]:
        """Views of all layers' keys and values: the rows `first` to `last` - 1, of layers with a window all rows."""
        return [each[:, :, first:last] if each.shape[2] == self.capacity else each for each in self.tensors]

    def tokens_of(self, capacity: int, length: Tensor) -> Tensor:
        """The index in the sequence of the token in each row of a layer, `[1 or texts, capacity]`, once `length`
        `[texts, 1]` tokens are written. In layers with a window, unwritten rows have negative indices.

        Example: after 10 tokens a layer of 4 rows holds the tokens 8, 9, 6 and 7."""
        rows = span(capacity, length.device)[None]
        return rows if capacity == self.capacity else length - 1 - (length - 1 - rows) % capacity

    def shown(self, tokens: Tensor) -> Tensor:
        """`[texts, n]`: whether the tokens with these indices exist (not if negative) and are not hidden."""
        known = tokens >= 0
        return known if self.prompt is None else known & self.prompt.shown.gather(1, tokens.clamp_min(0))

    @property
    def tensors(self) -> list[Tensor]:
        """Keys and values, alternating, of each initialised layer: `[texts, heads, its capacity, size]` each."""
        return [each for layer in self.layers if layer.is_initialized for each in (layer.keys, layer.values)]

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in self.tensors)

    def clear(self) -> None:
        """Empty the cache for other sequences. All rows become zero, because even hidden ones must not be NaN."""
        self.length.zero_()
        if self.prompt is not None:
            self.prompt.shown.fill_(True)
        for each in self.tensors:
            each.zero_()

    def copy_from(self, smaller: FixedCache) -> None:
        """Copy sequences, lengths and prompts of a smaller cache into this empty one."""
        for ours, layer in zip(self.layers, smaller.layers, strict=True):
            if layer.is_initialized:
                ours.write(slice(layer.capacity), layer.keys, layer.values)
        self.length.copy_(smaller.length)
        if self.prompt is not None and smaller.prompt is not None:
            self.prompt.shown[:, : smaller.capacity] = smaller.prompt.shown
            self.prompt.offset.copy_(smaller.prompt.offset)

    def read(self, cache: Cache, num_tokens: int) -> None:
        """Copy all `num_tokens` tokens of a growing cache, which may have fewer texts, into this one; in layers with a
        window only the tokens that the growing cache still has."""
        self.length.fill_(num_tokens)
        theirs: list[Any] = cache.layers
        for ours, layer in zip(self.layers, theirs, strict=True):
            if layer.is_initialized:
                first = num_tokens - (count := min(layer.keys.shape[-2], ours.capacity))
                ours.write(ours.rows_of(first, num_tokens), layer.keys[:, :, -count:], layer.values[:, :, -count:])

    def keys_values_of(self, text: int, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """For each layer keys and values `[heads, n, size]` of the first `num_tokens` tokens of the sequence in row
        `text`, without hidden ones. Those of tokens that have left a layer's window are arbitrary."""
        shown = slice(None) if self.prompt is None else self.prompt.shown[text, :num_tokens]
        layers = [layer for layer in self.layers if layer.is_initialized]
        rows = [layer.rows_of(0, num_tokens)[shown] for layer in layers]
        return [(layer.keys[text][:, own], layer.values[text][:, own]) for layer, own in zip(layers, rows, strict=True)]

    def write(self, cache: DynamicCache, num_tokens: int) -> None:
        """Replace the contents of a growing cache by the first `num_tokens` tokens, for passes without graphs."""
        theirs: list[Any] = cache.layers
        for ours, layer in zip(self.layers, theirs, strict=True):
            first = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                first = max(num_tokens - layer.sliding_window + 1, 0)
                layer.cumulative_length = num_tokens
            rows = ours.rows_of(first, num_tokens)
            layer.keys, layer.values = ours.keys[:, :, rows], ours.values[:, :, rows]


def _of_heads(rows: Tensor, states: Tensor) -> Tensor:
    """`rows` `[texts, n]` as an index `[..., texts, heads, n, size]` of `states` `[..., texts, heads, m, size]`."""
    return rows[:, None, :, None].expand(*states.shape[:-2], -1, states.shape[-1])


def free_bytes(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else float("inf")


class Budget:
    """Bounds the memory of all `FixedCache`s of a target and its drafts.

    Args:
        device: caches may take a quarter (`SHARE`) of the memory that is free there now; without CUDA any memory.
        forget: a function that destroys all graphs, because they may refer to dropped caches.

    Attributes:
        text: number of calls that have used the caches, including the present one, whose caches are never dropped.
    """

    def __init__(self, device: torch.device, forget: Callable[[], None]) -> None:
        self.most = free_bytes(device) * SHARE
        self.forget, self.text = forget, 0
        self.owners: WeakSet[FixedContext] = WeakSet()

    def make_room(self, needed: float) -> None:
        """Called before a cache is made: drop the least recently used caches if `needed` further bytes do not fit. More
        than necessary are dropped, so that this is rare: all graphs are destroyed, and must be captured again."""
        old = [(cache.text, id(cache), key, owner) for owner in self.owners for key, cache in owner.made.items()]
        old = sorted(each for each in old if each[0] < self.text)
        used = needed + sum(owner.num_bytes for owner in self.owners)
        if not old or used <= self.most:
            return
        for _, _, key, owner in old:
            if used > self.most * KEPT_SHARE:
                used -= owner.made.pop(key).num_bytes
        self.forget()


class FixedContext:
    """One sequence, or the rows of a batch, in a `FixedCache` that is copied to a larger one when necessary. Caches of
    all sizes are kept between calls, because graphs use them.

    Attributes:
        made: the caches, by capacity, `positions` and `spare`.
        cache: that of the current sequence; `None` before the first `with_capacity`, and once it is freed.
        num_tokens: the host's copy of the largest `cache.length`, which graphs change. Set by `RoundGraphs.commit` and
            `CapturedTarget.commit`.
        positions, spare: as for `FixedCache`; `spare` is 0 if no layer has a window.
    """

    def __init__(self, windows: Sequence[float], device: torch.device, budget: Budget) -> None:
        self.windows, self.device, self.budget, self.spare = windows, device, budget, 0
        self.made: dict[tuple[int, torch.Size | None, int], FixedCache] = {}
        self._bytes = 0.0  # for a token of one text, once known
        budget.owners.add(self)
        self.begin_text(None)

    def set_width(self, num_tokens: int) -> None:
        """Called before the first cache of a call. `num_tokens`: tokens of its largest pass, which sets `spare`."""
        self.spare = width_of(num_tokens) if any(map(math.isfinite, self.windows)) else 0

    def begin_text(self, positions: torch.Size | None) -> None:
        """Begin the sequences of a call, without a cache at first."""
        self.cache: Any = None
        self.positions, self.num_tokens = positions, 0

    @property
    def key(self) -> tuple[int, torch.Size | None, int]:
        """Identifies the current cache in keys of graphs."""
        return self.cache.capacity, self.positions, self.spare

    def with_capacity(self, num_tokens: int) -> FixedCache:
        """The cache of the current sequences, made or copied to a larger one if it lacks room for `num_tokens`."""
        cache: FixedCache | None = self.cache
        if cache is None or cache.capacity < num_tokens:
            larger = self.empty(num_tokens)
            if cache is not None:
                larger.copy_from(cache)
            self.cache = cache = larger  # only after all allocations succeeded
        return cache

    def empty(self, num_tokens: int) -> FixedCache:
        """An empty cache with the capacity `capacity_for(num_tokens)`: a kept one is cleared, a missing one made."""
        key = capacity_for(num_tokens), self.positions, self.spare
        if key not in self.made:
            for made in self.made.values():
                self._bytes = made.num_bytes / (made.capacity * len(made.length))
            self.budget.make_room(self._bytes * key[0] * (1 if self.positions is None else self.positions[-2]))
            self.made[key] = FixedCache(self.windows, key[0], self.device, *key[1:])
        else:
            self.made[key].clear()
        self.made[key].text = self.budget.text
        return self.made[key]

    @property
    def num_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(cache.num_bytes for cache in self.made.values())


def pass_inputs(model: CausalLM, cache: FixedCache, nodes: Nodes, num_prefix: Tensor, longest: float) -> dict[str, Any]:
    """Begin a captured pass over the queries of `nodes` after `num_prefix` `[texts]` tokens in `cache`, and return its
    arguments `attention_mask` and `position_ids`. `longest`: the number of positions of the model."""
    inputs = inputs_in_place(model, cache, nodes, num_prefix)
    cache.begin_pass(len(nodes.places))
    if longest < float("inf"):  # dummies may be beyond the last position
        inputs["position_ids"] = inputs["position_ids"].clamp_max(int(longest) - 1)
    return inputs


def capacity_for(num_tokens: int) -> int:
    """The least of the capacities 256, 512, ..., 8192, 16384, 24576, ... for `num_tokens` tokens."""
    if num_tokens > LARGE_CAPACITY:
        return -(-num_tokens // LARGE_CAPACITY) * LARGE_CAPACITY
    return max(MIN_CAPACITY, width_of(num_tokens))


def with_rows(per_text: Tensor, dim: int = 0) -> Tensor:
    """`per_text` with its last entry along axis `dim` repeated to 1, 2, 4, 8, ... sequences (`width_of`), so that few
    batch sizes are captured. The repeated sequences count as ended."""
    texts = per_text.shape[dim]
    return per_text.index_select(dim, span(width_of(texts), per_text.device).clamp_max(texts - 1))


def windows_of(text_config: Any) -> list[float] | None:
    """For each layer the number of tokens it attends to, infinite without a window; `None` if any is no attention."""
    layers = DynamicCache(config=text_config).layers
    return None if other_layers(layers) else [getattr(layer, "sliding_window", math.inf) for layer in layers]


def why_not_copied(cache: object) -> str | None:
    """Why a prompt's `cache` cannot be copied to a `FixedCache`, as a clause of a message; `None` if it can."""
    if type(cache) is not DynamicCache:
        return f"the text is in a {type(cache).__name__}"
    layers: list[Any] = cache.layers
    kinds = {type(layer) for layer in layers}
    if others := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"the cache keeps {', '.join(sorted(kind.__name__ for kind in others))}"
    if any(layer.keys is None for layer in layers):
        return "layers share the keys of others"
    return None
