"""Whether a target that runs code of others reads several tokens at once as one after the other, found out in a text
(`Trial`); and what a cache held at some time (`SavedCache`), to go back to and to read from once more."""

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

# Errors (`largest_error`) that rounding does not reach.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
HALF_TOLERANCE = 0.5


class Trial:
    """Compares passes over several tokens of a text with passes over fewer.

    A text begins with passes over one token each. Its first 2 tokens are then read again in one pass, in a copy of the
    cache as it was before them. If that finds the same logits, keys and values, rounds may read 2 tokens, and a pass
    over 4 is compared with theirs, and so on. The code of others is called for one pass more at each step. What was
    found holds for later texts as long as the code stays the same.

    Args:
        passes: what is known of them, which is added to.
        most: candidates of a round.
        read_again: reads the first so many tokens of the text since the trial began in one pass: logits `[n, vocab]`,
            and the cache (`generation.single_target.reader_again`).
    """

    def __init__(
        self,
        target: CausalLM,
        passes: ForeignPasses,
        most: int,
        read_again: Callable[[Tensor, int], tuple[Tensor, Any]],
    ) -> None:
        self.passes, self._most_tokens = passes, most + 1
        self._read_again: Callable[[Tensor, int], tuple[Tensor, Any]] | None = read_again
        self._name, exact = type(target).__name__, None if multiplies_in_half(target) else TOLERANCE.get(target.dtype)
        self._tolerance = exact or HALF_TOLERANCE
        self._logits: list[Tensor] = []  # at the tokens since the trial began
        self._states = partial(remembered, target)
        self._before = self._states() if passes.width < self._most_tokens else []

    @property
    def max_candidates(self) -> int | None:
        """How many candidates a round may have; `None`: any number."""
        if self.passes.reason is not None:
            return 0
        width = self.passes.width
        return None if width >= self._most_tokens else min(width, self._next - len(self._logits)) - 1

    @property
    def _next(self) -> int:
        """Tokens of the next pass that is compared."""
        return min(2 * self.passes.width, self._most_tokens)

    def record_pass(self, logits: Tensor, ids: Tensor, cache: Cache) -> None:
        """A round has read tokens, with `logits` `[n, vocab]` there; the text is `ids` `[1, length]` now, and `cache`
        holds all but its last token."""
        if self.passes.reason is not None or self.passes.width >= self._most_tokens or self._read_again is None:
            self._read_again = None  # which holds the cache as it was
            return
        self._logits += logits
        if (count := len(self._logits)) < self._next:
            return
        if self._states() != self._before:
            self.refuse("calls leave something behind, so their number may matter")
            return
        try:
            error = self._error(*self._read_again(ids, count), cache)
        except Exception as failure:  # noqa: BLE001 - of code of others, which plain generation does not ask for this
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
        """Leave the rest of the text, and later texts, to passes over one token."""
        self.passes.reason = f"{self._name} runs {self.passes.name}, with which {reason}"

    def _error(self, logits: Tensor, copied: Cache, cache: Cache) -> float:
        """Of the logits, and of the last keys and values; what was read before the trial has to be the same."""
        count, errors = len(logits), [largest_error(logits, torch.stack(self._logits))]
        layers: Any = zip(copied.layers, cache.layers, strict=True)
        pairs = [pair for one, own in layers for pair in ((one.keys, own.keys), (one.values, own.values))]
        for found, expected in pairs:
            if expected is not None:
                is_same = torch.equal(found[..., :-count, :], expected[..., :-count, :])
                errors.append(largest_error(found[..., -count:, :], expected[..., -count:, :]) if is_same else math.inf)
        return float(torch.tensor(errors).max())


class SavedCache:
    """The state of a cache whose layers put new tensors in the place of old ones, which are kept here: no copies.

    Example: a cache of 10 tokens is held, a pass over 3 more is made, and a hook leaves 6 of the 13. `grew_by(3)` is
    false, and `roll_back()` leaves the 10.
    """

    def __init__(self, cache: Cache) -> None:
        self.cache = cache
        self._states = [dict(vars(layer)) for layer in cache.layers]

    def grew_by(self, count: int) -> bool:
        """Whether every layer with keys of its own holds so many tokens more."""
        pairs: Any = zip(self._states, self.cache.layers, strict=True)
        lengths = [(state["keys"].shape[-2], layer.keys.shape[-2]) for state, layer in pairs if layer.keys is not None]
        return all(now - then == count for then, now in lengths)

    def roll_back(self) -> None:
        for layer, state in zip(self.cache.layers, self._states, strict=True):
            vars(layer).clear()
            vars(layer).update(state)

    def copied(self) -> Any:
        """A cache that holds the same, whose passes leave this one alone."""
        copied = copy.copy(self.cache)
        copied.layers = [copy.copy(layer) for layer in self.cache.layers]
        for layer, state in zip(copied.layers, self._states, strict=True):
            vars(layer).update(state)
        return copied


def can_be_saved(cache: Cache) -> bool:
    """Whether all layers are keys and values that grow, or are made with the first pass."""
    return all(
        isinstance(layer, ATTENTION_LAYERS) and not isinstance(layer, LinearAttentionCacheLayerMixin)
        for layer in cache.layers
    )


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest difference of two tensors `[..., n]`, relative to how much the numbers of `expected` vary. The lowest
    number of a row is left out, which may stand for all that was forbidden."""
    if torch.equal(found, expected):
        return 0.0
    found, expected = found.double(), expected.double()
    varying = expected.where(expected > expected.amin(-1, keepdim=True), torch.nan)
    spread = (varying - varying.nanmean(-1, keepdim=True)).abs().nanmean()
    return float((found - expected).masked_fill(found == expected, 0.0).abs().max() / spread)
