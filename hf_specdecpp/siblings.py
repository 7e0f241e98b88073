"""Ordered draws without replacement: the children of a tree node, first drawn first.

Each draw follows q without the tokens drawn before it, renormalised. Draws are made one by one when they are asked for,
because whether a further sibling is drawn may depend on those before it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

BLOCK = 256


class Siblings(Protocol):
    """Draws from the rows of `[n, vocab]` laws."""

    def next(self, row: int) -> tuple[int, float] | None:
        """The next token drawn from a row and its probability in the row as given; `None` when no token is left."""


class Ranked:
    """Tokens by descending `keys` `[n, vocab]`, none whose key is 0. Overwrites `keys`, which may be `q`.

    With keys = q these are the draft's likeliest tokens, for greedy targets. With keys = q / E, E being independent
    exponential numbers, they are drawn without replacement: token i fires at time E_i / q_i, and whatever has fired,
    the next to fire is i with probability proportional to q_i. One transfer from the device serves many draws.
    """

    def __init__(self, q: Tensor, keys: Tensor, ahead: int = 8) -> None:
        self.q, self.keys = q, keys
        self.ahead = [ahead] * q.shape[0]
        self.fetched = self._fetch(slice(None), ahead)

    def _fetch(self, rows: slice, ahead: int) -> list[Iterator[tuple[int, float]]]:
        keys, tokens = _largest(self.keys[rows], min(ahead, self.keys.shape[-1]))
        found = torch.stack((tokens.double(), self.q[rows].gather(-1, tokens).double(), keys.double()), dim=-1)
        self.keys[rows].scatter_(-1, tokens, 0.0)
        return [iter([(int(token), q) for token, q, key in row if key > 0.0]) for row in found.tolist()]

    def next(self, row: int) -> tuple[int, float] | None:
        found = next(self.fetched[row], None)
        if found is None and self.ahead[row] < self.q.shape[-1]:
            self.ahead[row] *= 4
            self.fetched[row] = self._fetch(slice(row, row + 1), self.ahead[row])[0]
            found = next(self.fetched[row], None)
        return found


class Inverted:
    """Draws by inverting the distribution function, first of blocks of tokens and then within the block.

    On a CPU this is many times faster than a random number for every token of the vocabulary. A drawn token's
    probability is set to zero in `q` (so `q` belongs to this object) and its block is summed anew: no error builds up.
    """

    def __init__(self, q: Tensor) -> None:
        whole = q.shape[-1] // BLOCK
        blocks = q[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).sum(-1)
        rest = q[:, whole * BLOCK :].sum(-1, keepdim=True)
        self.sums = torch.cat((blocks, rest), dim=-1).double().numpy()
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


def _largest(keys: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`keys.topk(count)` of `[n, vocab]`, looking only into the blocks with the largest maxima: half the time."""
    whole = keys.shape[-1] // BLOCK
    if whole <= 2 * count:
        return keys.topk(count, dim=-1)
    maxima = keys[:, : whole * BLOCK].unflatten(-1, (whole, BLOCK)).amax(-1)
    begins = maxima.topk(count, dim=-1).indices * BLOCK
    inside = (begins[..., None] + torch.arange(BLOCK, device=keys.device)).flatten(1)
    rest = torch.arange(whole * BLOCK, keys.shape[-1], device=keys.device).expand(keys.shape[0], -1)
    columns = torch.cat((inside, rest), dim=-1)
    values, places = keys.gather(-1, columns).topk(count, dim=-1)
    return values, columns.gather(-1, places)


def _invert(weights: np.ndarray, u: float) -> int | None:
    """The index at which the cumulated `weights` `[n]` pass the share u of their sum; `None` if all are zero."""
    cumulated = weights.cumsum(dtype=np.float64)
    total = cumulated[-1]
    if not total > 0.0:
        return None
    # u is below 1, but u * total may round to total, behind the last positive weight.
    return int(cumulated.searchsorted(min(u * total, np.nextafter(total, 0.0)), side="right"))
