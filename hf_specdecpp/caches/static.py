"""Static caches of transformers (`StaticCache`): read in passes of few widths, and taken back in place."""

from __future__ import annotations

from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer, StaticSlidingWindowLayer

from hf_specdecpp.caches.paths import PathRows, move, num_in_place


class StaticRows:
    """The rows of a static cache while candidates are verified in it.

    A compiled forward may be compiled anew for every number of tokens that it meets, so passes have a power of two of
    them: those to verify, and after them dummies, which none of them sees and which are forgotten. What is forgotten
    stays in its rows, hidden by the mask, until something else is written there.

    Example: of 20 rows 11 are held. The last token and 4 candidates are read with 3 dummies, in rows 11 to 18. Two
    candidates stand, so 14 rows are held. In the 6 that are free the next pass has at most 4 tokens, 3 of them
    candidates.

    Of a tree the rows of the path that stands move up to the text, in place: after those 11 rows, nodes 0 to 4 and 3
    dummies lie in rows 11 to 18. For the path [0, 2, 4] nodes 2 and 4 move from rows 13 and 15 to rows 12 and 13.

    Args:
        cache: the target's.
        longest_text (tokens): that the target has positions for.

    Attributes:
        held: rows in use, on the host, once the prompt has been read; reading them from the cache waits for the device.
    """

    def __init__(self, cache: StaticCache, longest_text: float) -> None:
        self.cache, self.held = cache, 0
        self.room = int(min(num_rows(cache), longest_text))
        self._has_prompt = False

    @property
    def most_candidates(self) -> int:
        """How many candidates the next pass has room for."""
        return most_in(max(self.room - self.held, 1))

    def keep(self, count: int, path: PathRows | None = None) -> int:
        """Keep the first `count` tokens of the pass just made, or of a `path` in it, or all of the prompt's: how many
        rows are held then."""
        if self._has_prompt:
            if path is not None:
                self._move(path.first(count))
            self.held += count
            hold(self.cache, self.held)
        else:
            self.held, self._has_prompt = int(self.cache.get_seq_length()), True
        return self.held

    def _move(self, path: PathRows) -> None:
        in_place = num_in_place(path.rows)
        if in_place == len(path.rows):
            return
        for layer in _layers(self.cache):
            indices = path.on_device[in_place:].to(layer.keys.device)
            for rows in (layer.keys, layer.values):
                move(rows[..., self.held :, :], indices, in_place)


def width_of(num_tokens: int) -> int:
    """The width of a pass over so many tokens: 1 for 1, 2 for 2, 4 for 3 and 4, 8 for 5 to 8."""
    return 1 << (num_tokens - 1).bit_length()


def most_in(num_rows: int) -> int:
    """How many candidates, with the token before them and dummies, fit into so many rows: 3 into 4 to 7."""
    return (1 << (num_rows.bit_length() - 1)) - 1


def num_rows(cache: StaticCache) -> int:
    """How many tokens can be held, and forgotten again, by every layer."""
    return min(layer.max_cache_len for layer in _layers(cache))


def hold(cache: StaticCache, num_tokens: int) -> None:
    """Hold the first `num_tokens` tokens, in place, wherever a pass was interrupted.

    Example: a pass over 8 tokens after 10 failed in layer 1, so the layers hold 18, 10 and 10; `hold(cache, 10)` leaves
    10, 10 and 10.
    """
    layers = _layers(cache)
    lengths = [layer.cumulative_length for layer in layers]
    # Together, since on a GPU each layer's would be a kernel of its own.
    torch._foreach_zero_(lengths)
    torch._foreach_add_(lengths, num_tokens)
    for layer in layers:
        if isinstance(layer, StaticSlidingWindowLayer):
            layer.cumulative_length_int = num_tokens


def widen(cache: StaticCache, num_rows: int, further: int = 0) -> None:
    """Let layers with a window, in a cache that is still empty, keep every token; the mask hides the rest.

    A window that is full moves its rows on with each token, and what has left it cannot come back.

    Args:
        num_rows: for the text, at least.
        further: rows that all layers get beside them.
    """
    room = max(num_rows, cache.get_max_length()) + further
    kinds = (StaticLayer, StaticSlidingWindowLayer) if further else (StaticSlidingWindowLayer,)
    cache.layers = [_with_room(layer, room) if type(layer) in kinds else layer for layer in cache.layers]


def _with_room(layer: Any, room: int) -> StaticLayer:
    """An empty layer in the place of one."""
    wider = StaticLayer(room)
    if layer.is_initialized:  # before a prompt that is read in chunks
        wider.lazy_initialization(layer.keys, layer.values)
    return wider


def _layers(cache: StaticCache) -> list[Any]:
    """Those that hold something: layers that share the keys of others do not."""
    return [layer for layer in cache.layers if isinstance(layer, StaticLayer)]
