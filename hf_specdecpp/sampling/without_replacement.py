"""Ordered draws without replacement: the children of a tree node, first drawn first.

Each draw follows q without the tokens drawn before it, renormalised. Draws are made one by one when they are asked for,
because whether a further sibling is drawn may depend on those before it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

BLOCK = 256


class Siblings(Protocol):
    """Draws from the rows of q `[n, vocab]`."""

    def next(self, row: int) -> tuple[int, float] | None:
        """The next token drawn from a row and its probability in the row as given; `None` when no token is left."""


def likeliest(q: Tensor) -> Siblings:
    """The draft's likeliest tokens, for greedy targets. `q` may be overwritten."""
    return Likeliest(q) if q.device.type == "cpu" else Ranked(q, q)


class Ranked:
    """Tokens by descending `keys` `[n, vocab]`, none whose key is 0 or nan. Overwrites `keys`, which may be `q`.

    With keys = q these are the likeliest tokens. With keys = q / E, E being independent exponential numbers, they are
    drawn without replacement: token i fires at time E_i / q_i, and whatever has fired, the next to fire is i with
    probability proportional to q_i. One transfer from the device serves many draws.
    """

    def __init__(self, q: Tensor, keys: Tensor, ahead: int = 8) -> None:
        self.q, self.keys = q, keys
        self.ahead = [ahead] * q.shape[0]
        self.latest: list[Tensor] = []  # of each row the tokens that were fetched last
        self.fetched = self._fetch(slice(None), ahead)

    def _fetch(self, rows: slice, ahead: int) -> list[Iterator[tuple[int, float]]]:
        keys, tokens = self.keys[rows].topk(min(ahead, self.keys.shape[-1]), dim=-1)
        self.latest[rows] = tokens
        parts = (tokens, keys) if self.keys is self.q else (tokens, self.q[rows].gather(-1, tokens), keys)
        # As floating-point numbers, which are exact for ids below 2^24.
        found = torch.cat(parts, dim=-1).unflatten(-1, (len(parts), -1)).tolist()
        return [
            iter([(int(token), q) for token, q, key in zip(row[0], row[1], row[-1], strict=True) if key > 0.0])
            for row in found
        ]

    def next(self, row: int) -> tuple[int, float] | None:
        found = next(self.fetched[row], None)
        if found is None and self.ahead[row] < self.q.shape[-1]:
            self.keys[row].scatter_(-1, self.latest[row], 0.0)
            self.ahead[row] *= 4
            self.fetched[row] = self._fetch(slice(row, row + 1), self.ahead[row])[0]
            found = next(self.fetched[row], None)
        return found


class Likeliest:
    """Tokens by descending probability, none of probability 0: first the block of the largest maximum, then within it.

    On a CPU this is many times faster than to sort. Overwrites `q` `[n, vocab]`, as `Inverted` does.
    """

    def __init__(self, q: Tensor) -> None:
        self.maxima = _by_block(q, torch.amax).numpy()
        self.q = q.numpy()

    def next(self, row: int) -> tuple[int, float] | None:
        block = int(self.maxima[row].argmax())
        begin = block * BLOCK
        probabilities = self.q[row, begin : begin + BLOCK]
        place = int(probabilities.argmax())
        probability = float(probabilities[place])
        if not probability > 0.0:
            return None
        probabilities[place] = 0.0
        self.maxima[row, block] = probabilities.max()
        return begin + place, probability


class Inverted:
    """Draws by inverting the distribution function, first of blocks of tokens and then within the block.

    On a CPU this is many times faster than a random number for every token of the vocabulary. A drawn token's
    probability is set to zero in `q` (so `q` belongs to this object) and its block is summed anew: no error builds up.
    """

    def __init__(self, q: Tensor) -> None:
        self.sums = _by_block(q, torch.sum).double().numpy()
        self.q = q.numpy()

    def next(self, row: int) -> tuple[int, float] | None:
        u, v = torch.rand(2, dtype=torch.float64).tolist()
        block = _invert(self.sums[row], u)
        if block is None:
            return None
        begin = block * BLOCK
        probabilities = self.q[row, begin : begin + BLOCK]
        place = _invert(probabilities, v)
        if place is None:  # the block's sum is positive, so one of its tokens is
            return None
        probability = float(probabilities[place])
        probabilities[place] = 0.0
        self.sums[row, block] = probabilities.sum(dtype=np.float64)
        return begin + place, probability


def _by_block(q: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`[n, blocks]`: the maxima or sums of all blocks of `q` `[n, vocab]`, a shorter last one too."""
    whole = q.shape[-1] // BLOCK * BLOCK
    reduced = reduce(q[:, :whole].unflatten(-1, (-1, BLOCK)), -1)
    return torch.cat((reduced, reduce(q[:, None, whole:], -1)), dim=-1) if whole < q.shape[-1] else reduced


def _invert(weights: np.ndarray, u: float) -> int | None:
    """The index at which the cumulated `weights` `[n]` pass the share u of their sum; `None` if all are zero."""
    cumulated = np.add.accumulate(weights, dtype=np.float64)
    total = cumulated[-1]
    if not total > 0.0:
        return None
    # u is below 1, but u * total may round to total, behind the last positive weight.
    return int(cumulated.searchsorted(min(u * total, np.nextafter(total, 0.0)), side="right"))
