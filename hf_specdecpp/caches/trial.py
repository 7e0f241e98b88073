"""For targets that run foreign code: a test, during generation, of whether passes over several tokens compute what
passes over single tokens compute (`Trial`), and copies of a cache (`copy_of`)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionCacheLayerMixin

from hf_specdecpp.caches.batches import ATTENTION_LAYERS
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.foreign import ForeignPasses, remembered
from hf_specdecpp.models.quantised import multiplies_in_half

# `largest_error` that rounding does not reach.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
HALF_TOLERANCE = 0.5
ReadAgain = Callable[[Tensor, int], tuple[Tensor, Any]]


class Trial:
    """During one generation, compares passes over several tokens with passes over fewer.

    Generation begins with passes over one token. Then the first 2 tokens are read again in one pass, in a copy of the
    cache from before them. If logits, keys and values are equal up to rounding, rounds may read 2 tokens; next, a pass
    over 4 tokens is compared with those over 2, and so on. Each comparison calls the foreign code once more.

    Args:
        passes: the results for this target's foreign code, also of earlier generations; updated here.
        most: the most candidates of a round.
        read_again: a function that gets the sequence `[1, length]` and a number n, reads the first n tokens since the
            trial began in one pass, and returns logits `[n, vocab]` and the copy of the cache (`reader_again`).
    """

    def __init__(self, target: CausalLM, passes: ForeignPasses, most: int, read_again: ReadAgain) -> None:
        self.passes, self._most_tokens = passes, most + 1
        self._read_again: ReadAgain | None = read_again
        self._name, exact = type(target).__name__, None if multiplies_in_half(target) else TOLERANCE.get(target.dtype)
        self._tolerance = exact or HALF_TOLERANCE
        self._logits: list[Tensor] = []  # after each token since the trial began
        self._states = partial(remembered, target)
        self._before = self._states() if passes.width < self._most_tokens else []

    @property
    def max_candidates(self) -> int | None:
        """The most candidates of the next round, by the comparisons so far; `None`: no limit."""
        if self.passes.reason is not None:
            return 0
        width = self.passes.width
        return None if width >= self._most_tokens else min(width, self._next - len(self._logits)) - 1

    @property
    def _next(self) -> int:
        """Number of tokens in the pass of the next comparison."""
        return min(2 * self.passes.width, self._most_tokens)

    def record_pass(self, logits: Tensor, ids: Tensor, cache: Cache) -> None:
        """Called after each round; makes the next comparison once enough tokens are read. `logits`: `[n, vocab]`, after
        the n committed tokens; `ids`: `[1, length]`, the sequence, of which `cache` holds all but the last token."""
        if self.passes.reason is not None or self.passes.width >= self._most_tokens or self._read_again is None:
            self._read_again = None  # frees the saved cache
            return
        self._logits += logits
        if (count := len(self._logits)) < self._next:
            return
        if self._states() != self._before:
            self.refuse("calls leave something behind, so their number may matter")
            return
        try:
            error = self._error(*self._read_again(ids, count), cache)
        except Exception as failure:  # noqa: BLE001 - foreign code may raise anything; plain generation never makes this pass
            self.refuse(f"a pass over {count} tokens fails ({failure!r})")
            return
        if not error <= self._tolerance:
            self.refuse(
                f"a pass over {count} tokens is off by {error:.2g} of the spread of its numbers from passes over fewer "
                f"(rounding explains {self._tolerance:g})"
            )
            return
        self.passes.width = count

    def refuse(self, reason: str) -> None:
        """Allow no candidates in the rest of this sequence and in later ones, because of `reason`, a clause."""
        self.passes.reason = f"{self._name} runs {self.passes.name}, with which {reason}"

    def _error(self, logits: Tensor, copied: Cache, cache: Cache) -> float:
        """The largest error of a repeated pass: of its `logits`, and of keys and values in its cache `copied`. Infinite
        if those of earlier tokens differ."""
        count, errors = len(logits), [largest_error(logits, torch.stack(self._logits))]
        layers: Any = zip(copied.layers, cache.layers, strict=True)
        pairs = [pair for one, own in layers for pair in ((one.keys, own.keys), (one.values, own.values))]
        for found, expected in pairs:
            if expected is not None:
                is_same = torch.equal(found[..., :-count, :], expected[..., :-count, :])
                errors.append(largest_error(found[..., -count:, :], expected[..., -count:, :]) if is_same else math.inf)
        return float(torch.tensor(errors).max())


def copy_of(cache: Cache) -> Any:
    """A copy of a cache, with the same tensors. Passes over one leave the other as it is, because they replace tensors
    and never write to them.

    Example: a cache of 10 tokens is copied; after a pass over 3 more, a hook has left 6 tokens. `have_grown` is false
    for a count of 3, and the layers of the copy have the 10 tokens."""
    copied = copy.copy(cache)
    copied.layers = [copy.copy(layer) for layer in cache.layers]
    return copied


def have_grown(before: Any, now: Any, count: int) -> bool:
    """Whether every layer with keys has `count` tokens more in the cache `now` than in its copy `before`."""
    pairs = zip(before.layers, now.layers, strict=True)
    return all(own.keys.shape[-2] - then.keys.shape[-2] == count for then, own in pairs if own.keys is not None)


def can_be_saved(cache: Cache) -> bool:
    """Whether `copy_of` supports a cache: whether all layers are attention layers without recurrent states."""
    return all(
        isinstance(layer, ATTENTION_LAYERS) and not isinstance(layer, LinearAttentionCacheLayerMixin)
        for layer in cache.layers
    )


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference between two tensors `[..., n]`, divided by the mean absolute deviation of `expected`. The
    deviation leaves out the lowest number of each row, such as -inf for masked tokens."""
    if torch.equal(found, expected):
        return 0.0
    found, expected = found.double(), expected.double()
    varying = expected.where(expected > expected.amin(-1, keepdim=True), torch.nan)
    spread = (varying - varying.nanmean(-1, keepdim=True)).abs().nanmean()
    return float((found - expected).masked_fill(found == expected, 0.0).abs().max() / spread)
