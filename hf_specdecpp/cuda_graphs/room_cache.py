"""A key-value cache of fixed rooms, as captured passes need it (`RoomCache`), and a text that grows in it."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from hf_specdecpp.caches.batches import other_layers
from hf_specdecpp.caches.masks import MASKED, Prompt, counts_rows, unknown_window
from hf_specdecpp.caches.text import width_of
from hf_specdecpp.cuda_graphs.graphs import lasting
from hf_specdecpp.cuda_graphs.model_copy import for_groups
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.checks import frequency_changes

LEAST_ROOM = 256  # tokens


class RoomLayer(CacheLayerMixin):
    """Keys and values of one layer. It keeps every token, also where the layer has a window: the mask hides the rest.

    Args:
        length: `[texts]` int64, tokens that the cache holds: one tensor for all of its layers.
        rows: holds the rows `[texts, n]` that the pass at hand writes, for all layers.
        room (tokens): the most that the layer can hold.
    """

    keys: Tensor
    values: Tensor
    is_compileable, is_sliding = True, False

    def __init__(self, length: Tensor, rows: list[Tensor], room: int) -> None:
        super().__init__()
        self.length, self.rows, self.room = length, rows, room

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        with lasting():
            self.keys, self.values = (
                each.new_zeros((*each.shape[:2], self.room, each.shape[-1])) for each in (key_states, value_states)
            )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write where the pass writes (`RoomCache.begin_pass`); all rows, those that hold nothing yet included."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        (rows,) = self.rows
        for held, states in ((self.keys, key_states), (self.values, value_states)):
            held.scatter_(2, _of_heads(rows, states), states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:  # noqa: ARG002 - transformers' signature
        return self.room, 0

    def get_seq_length(self) -> Any:
        """0-d int64, on the device, as in transformers' static layers."""
        return self.length[0]

    def get_max_length(self) -> int:
        return self.room


class RoomCache(Cache):
    """A cache with room for a number of tokens of each text, in which nothing depends on numbers of the host.

    Example: 3 tokens are held, and a pass over 2 writes rows 3 and 4. `length.add_(2)` keeps both, `length.add_(1)` the
    first; the next pass writes over what was not kept. `length.sub_(1)` takes one back.

    Args:
        num_layers: of the model.
        room (tokens): the most that it can hold of a text, what is written and not kept included.
        device: of the model.
        positions: shape of a token's position in each text, `[..., texts, 1]`, where prompts may be padded or have
            positions of their own; by default there is one text without either.

    Attributes:
        length: int64 `[texts]`, on the device: how many tokens are held of each.
        prompt: what of the prompts is hidden, and where they stand, where `positions` are given.
    """

    def __init__(self, num_layers: int, room: int, device: torch.device, positions: torch.Size | None = None) -> None:
        texts = 1 if positions is None else positions[-2]
        with lasting():
            self.length = torch.zeros(texts, dtype=torch.long, device=device)
            self.prompt: Prompt | None = None
            if positions is not None:
                shown = torch.ones((texts, room), dtype=torch.bool, device=device)
                self.prompt = Prompt(shown, torch.zeros(positions, dtype=torch.long, device=device))
        self._rows: list[Tensor] = []
        super().__init__(layers=[RoomLayer(self.length, self._rows, room) for _ in range(num_layers)])
        self.room = room

    def begin_pass(self, num_tokens: int) -> None:
        """The next pass writes so many rows after the tokens that are held."""
        self._rows[:] = [torch.arange(num_tokens, device=self.length.device) + self.length[:, None]]

    def part(self, first: int, count: int) -> RoomCache:
        """The cache of `count` of the layers: what is held of them is held of all."""
        part = copy(self)
        part.layers = self.layers[first : first + count]
        return part

    def move(self, rows: Tensor) -> None:
        """Of what the last pass has written after each text move these rows up to the text, `[texts, n]`, ascending."""
        begin = self.length[:, None]
        goal, source = torch.arange(rows.shape[1], device=rows.device) + begin, rows + begin
        for held in self.tensors:
            moved = held.gather(2, _of_heads(source, held))
            held.scatter_(2, _of_heads(goal, held), moved)

    def rows(self, first: int, last: int) -> list[Tensor]:
        """Keys and values of the rows from `first` up to `last` in all layers, to be written to."""
        return [held[:, :, first:last] for held in self.tensors]

    @property
    def tensors(self) -> list[Tensor]:
        """The keys and the values of each layer that has any, one after the other."""
        layers: list[Any] = self.layers
        return [held for layer in layers if layer.is_initialized for held in (layer.keys, layer.values)]

    def clear(self) -> None:
        """Hold nothing. What was written is overwritten, since even a hidden row must not be infinite or NaN."""
        self.length.zero_()
        if self.prompt is not None:
            self.prompt.shown.fill_(True)
        for held in self.tensors:
            held.zero_()

    def copy_from(self, smaller: RoomCache) -> None:
        """Hold what a smaller cache holds."""
        self.read(smaller, smaller.room)
        self.length.copy_(smaller.length)
        if self.prompt is not None and smaller.prompt is not None:
            self.prompt.shown[:, : smaller.room] = smaller.prompt.shown
            self.prompt.offset.copy_(smaller.prompt.offset)

    def read(self, cache: Cache, num_tokens: int) -> None:
        """Hold the `num_tokens` tokens that a growing cache holds. Rows that have left a window stay zero.

        Example: of 10 tokens a layer with a window of 4 has the last 3, which go to rows 7, 8 and 9.
        """
        self.length.fill_(num_tokens)
        theirs: list[Any] = cache.layers
        layers: list[Any] = self.layers
        for ours, layer in zip(layers, theirs, strict=True):
            if layer.is_initialized:
                if not ours.is_initialized:
                    ours.lazy_initialization(layer.keys, layer.values)
                first = num_tokens - layer.keys.shape[-2]
                ours.keys[:, :, first:num_tokens] = layer.keys
                ours.values[:, :, first:num_tokens] = layer.values

    def held_of(self, text: int, num_tokens: int) -> list[tuple[Tensor, Tensor]]:
        """In each layer keys and values `[heads, n, size]` of the first tokens of a text; hidden ones are left out."""
        shown = slice(None) if self.prompt is None else self.prompt.shown[text, :num_tokens]
        found = [held[text, :, :num_tokens][:, shown] for held in self.tensors]
        return list(zip(found[::2], found[1::2], strict=True))

    def write(self, cache: DynamicCache, num_tokens: int) -> None:
        """Leave the first `num_tokens` tokens in a growing cache, with which transformers' own passes can go on."""
        theirs: list[Any] = cache.layers
        layers: list[Any] = self.layers
        for ours, layer in zip(layers, theirs, strict=True):
            first = 0
            if isinstance(layer, DynamicSlidingWindowLayer):
                first = max(num_tokens - layer.sliding_window + 1, 0)
                layer.cumulative_length = num_tokens
            layer.keys = ours.keys[:, :, first:num_tokens].clone()
            layer.values = ours.values[:, :, first:num_tokens].clone()


def _of_heads(rows: Tensor, states: Tensor) -> Tensor:
    """`[texts, n]` rows for all heads and numbers of keys or values `[texts, heads, ..., size]`."""
    return rows[:, None, :, None].expand(-1, states.shape[1], -1, states.shape[3])


class Rooms:
    """Caches for one text or batch at a time, each of its room, kept from call to call: graphs read and write them."""

    def __init__(self, num_layers: int, device: torch.device) -> None:
        self.num_layers, self.device = num_layers, device
        self._made: dict[Hashable, RoomCache] = {}

    def empty(self, num_tokens: int, positions: torch.Size | None) -> RoomCache:
        """The one for so many tokens, emptied."""
        key = room_for(num_tokens), positions
        if key not in self._made:
            self._made[key] = RoomCache(self.num_layers, key[0], self.device, positions)
        else:
            self._made[key].clear()
        return self._made[key]

    def clear(self) -> None:
        """Keep none; texts keep theirs."""
        self._made.clear()

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(held.nbytes for cache in self._made.values() for held in cache.tensors)


class RoomText:
    """A text in one of the `rooms`. As it grows, it goes on in a larger one that holds the same. `held` is
    `cache.length`, on the host; `positions` are of a `RoomCache`."""

    cache: Any = None

    def __init__(self, rooms: Rooms, positions: torch.Size | None) -> None:
        self.rooms, self.positions, self.held = rooms, positions, 0

    @property
    def place(self) -> tuple[int, torch.Size | None]:
        """Which cache the text is in, for the keys of graphs."""
        return self.cache.room, self.positions

    def with_room(self, num_tokens: int) -> RoomCache:
        """The cache, which has room for so many tokens."""
        if (smaller := self.cache) is None or smaller.room < num_tokens:
            larger = self.rooms.empty(num_tokens, self.positions)
            if smaller is not None:
                larger.copy_from(smaller)
            self.cache = larger  # not before all of it has found memory
        cache: RoomCache = self.cache
        return cache


def prepared(
    inputs: dict[str, Any], model: CausalLM, cache: RoomCache, tokens: Tensor, longest: float
) -> dict[str, Any]:
    """Masks and positions `inputs` of a captured pass over `tokens` `[texts, n]`, which begins."""
    cache.begin_pass(tokens.shape[1])
    positions = inputs["position_ids"]
    if longest < float("inf"):  # of dummies, which may stand behind the last position that there is
        positions = positions.clamp_max(int(longest) - 1)
    return inputs | {"attention_mask": for_groups(inputs["attention_mask"], model), "position_ids": positions}


def room_for(num_tokens: int) -> int:
    """The room to make for so many tokens: 256, 512, 1024 and so on, so that there are few sizes to capture for."""
    return max(LEAST_ROOM, width_of(num_tokens))


def num_room_layers(text_config: Any) -> int | None:
    """How many layers a `RoomCache` of a model needs; `None` where some of them are not attention."""
    layers = DynamicCache(config=text_config).layers
    return None if other_layers(layers) else len(layers)


def why_not_in_place(model: CausalLM) -> str | None:
    """Why passes of a model cannot be told by `caches.masks.inputs_in_place` who sees whom, and where."""
    config = model.config.get_text_config(decoder=True)
    if (implementation := config._attn_implementation) not in MASKED:
        return f"attn_implementation={implementation!r} takes no mask of ours"
    if frequency_changes(config):
        return "rotary frequencies change with the length of the text"
    return counts_rows(config) or unknown_window(model, config)


def why_not_rooms(cache: object) -> str | None:
    """Why what a cache holds, once it has read a prompt, cannot go on in rooms."""
    if type(cache) is not DynamicCache:
        return f"the text is in a {type(cache).__name__}"
    layers: list[Any] = cache.layers
    kinds = {type(layer) for layer in layers}
    if others := kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        return f"the cache keeps {', '.join(sorted(kind.__name__ for kind in others))}"
    if any(layer.keys is None for layer in layers):
        return "layers share the keys of others"
    return None
