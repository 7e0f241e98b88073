"""The random decisions of speculative decoding (`Randomness`), so that a test can enumerate the outcomes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

DRAWS_AHEAD = 8  # each of one float per token: 5 MB per row of a batch for a vocabulary of 150k


class NothingToDrawError(RuntimeError):
    """No token can be drawn. The message begins like that of plain `generate()`."""

    def __init__(self) -> None:
        super().__init__(
            "probability tensor contains either `inf`, `nan` or element < 0: no token can be drawn. The target's "
            "logits are not numbers, or a logits processor forbids every token."
        )


class Randomness(Protocol):
    """Source of all random decisions: `TorchRandomness`, or one of a test that enumerates the outcomes."""

    def categorical(self, probs: Tensor) -> Tensor:
        """Draw an index (0-d int64) with probabilities `probs` (`[n]`, need not sum to exactly 1). If all are 0 or one
        is NaN, raises `NothingToDrawError` on a CPU, and returns any index elsewhere."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""

    def outcome(self, tests: Tensor, weights: Tensor) -> tuple[int, int]:
        """Return the index i of the last test that passes, and an index drawn from row i of `weights`, with one read
        from the device. `NothingToDrawError` if no index can be drawn.

        Args:
            tests: `[n]`, the probability with which each test passes. If none passes, i is 0.
            weights: `[n, size]`; rows need not sum to 1.
        """

    def siblings(self, q: Tensor) -> Siblings:
        """Prepare draws without replacement from each row of `q` `[n, vocab]`, which may be overwritten."""


def waits_for_reads(device: torch.device) -> bool:
    """Whether reading a number from the device waits for all queued work, so that a round should read once."""
    return device.type != "cpu"


@cache
def widest(device: torch.device) -> torch.dtype:
    """The dtype for sums and ratios of probabilities: float64 if the device supports it, which is tested once."""
    try:
        torch.ones(2, dtype=torch.float64, device=device).cumsum(0)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, RuntimeError):  # of Apple's GPUs, of some of Intel's
        return torch.float32
    return torch.float64


def exponential(*shape: int, device: torch.device) -> Tensor:
    """Independent positive exponential numbers E: the largest w_i / E_i is at i with probability w_i / sum(w)."""
    times = torch.empty(shape, dtype=torch.float32, device=device).exponential_()
    return times.clamp_min_(torch.finfo(times.dtype).tiny)


class TorchRandomness:
    """Draws from torch's global generators, so `torch.manual_seed` fixes a run. One instance per generation."""

    def __init__(self) -> None:
        self._ahead = torch.empty(0, 0)
        self._used = 0

    def categorical(self, probs: Tensor) -> Tensor:
        if probs.device.type != "cpu":
            return self._race(probs).indices
        drawn = InBlocks(probs[None].clone(), greedy=False).draw_next(
            0
        )  # about 40 times faster for a vocabulary of 50k
        if drawn is None:
            raise NothingToDrawError
        return torch.tensor(drawn[0], device="cpu")

    def bernoulli(self, probability: float) -> bool:
        # float64 on the CPU: no wait for a device, and probabilities 0 and 1 are exact.
        return bool(torch.rand((), dtype=torch.float64, device="cpu") < probability)

    def outcome(self, tests: Tensor, weights: Tensor) -> tuple[int, int]:
        passes = torch.rand(len(tests), dtype=tests.dtype, device=tests.device) < tests
        last = passes.cumsum(0).argmax(0, keepdim=True)  # index of the last increase
        rates, tokens = self._race(weights.index_select(0, last))
        index, token, rate = torch.cat((last, tokens, rates)).tolist()  # float32 is exact for ids below 2^24
        if not rate > 0.0:
            raise NothingToDrawError
        return int(index), int(token)

    def _race(self, weights: Tensor) -> torch.return_types.max:
        """An index drawn with `weights` `[n]` or `[1, n]`, and w_i / E_i there, for exponential numbers E: i fires at
        time E_i / w_i, so it is the first with probability w_i / sum(w)."""
        # `multinomial` does the same, but waits for the device to check its arguments.
        return (weights / self._times(weights[None] if weights.dim() == 1 else weights)[0]).max(-1)

    def _times(self, like: Tensor) -> Tensor:
        """Return exponential numbers, one for each element of `like` `[n, size]`; made in advance for several draws."""
        count, size = like.shape
        if self._used + count > len(self._ahead) or (size, like.device) != (self._ahead.shape[1], self._ahead.device):
            self._ahead, self._used = exponential(max(count, DRAWS_AHEAD), size, device=like.device), 0
        self._used += count
        return self._ahead[self._used - count : self._used]

    def siblings(self, q: Tensor) -> Siblings:
        if q.device.type == "cpu":
            return InBlocks(q, greedy=False)
        return Ranked(q, q / self._times(q))


class AsPlain(TorchRandomness):
    """Draws each token as plain `generate()` does, and nothing else: equal seeds give equal tokens.

    For rounds without drawn candidates, in which the result of every test is certain."""

    def categorical(self, probs: Tensor) -> Tensor:
        return probs[None].multinomial(1)[0, 0]

    def bernoulli(self, probability: float) -> bool:
        return probability > 0.0

    def outcome(self, tests: Tensor, weights: Tensor) -> tuple[int, int]:
        return 0, int(self.categorical(weights[0]))


BLOCK = 256  # tokens in a block of `InBlocks`


class Siblings(Protocol):
    """Tokens drawn one after another from each row of q `[n, vocab]`, none of them twice."""

    def draw_next(self, row: int) -> tuple[int, float] | None:
        """Return the next token of a row and its probability in q; `None` if no token with q above 0 is left."""


def likeliest(q: Tensor) -> Siblings:
    """Tokens of each row of `q` `[n, vocab]` by descending probability, for greedy targets. `q` may be overwritten."""
    return InBlocks(q, greedy=True) if q.device.type == "cpu" else Ranked(q, q)


class Ranked:
    """`Siblings` by descending `keys` `[n, vocab]`, none with key 0 or nan. Overwrites `keys`, which may be `q`.

    With keys = q these are the likeliest. With keys = q / E, E exponential numbers, they are drawn without replacement:
    token i fires at time E_i / q_i, so it is the next to fire in proportion to q_i. Fetches several at once."""

    def __init__(self, q: Tensor, keys: Tensor, ahead: int = 8) -> None:
        self.q, self.keys = q, keys
        self.ahead = [ahead] * q.shape[0]
        self.latest: list[Tensor] = []  # by row, the tokens fetched last
        self.fetched = self._fetch(slice(None), ahead)

    def _fetch(self, rows: slice, ahead: int) -> list[Iterator[tuple[int, float]]]:
        keys, tokens = self.keys[rows].topk(min(ahead, self.keys.shape[-1]), dim=-1)
        self.latest[rows] = tokens
        parts = (tokens, keys) if self.keys is self.q else (tokens, self.q[rows].gather(-1, tokens), keys)
        # Floating-point numbers, exact for ids below 2^24.
        found = torch.cat(parts, dim=-1).unflatten(-1, (len(parts), -1)).tolist()
        return [
            iter([(int(token), q) for token, q, key in zip(row[0], row[1], row[-1], strict=True) if key > 0.0])
            for row in found
        ]

    def draw_next(self, row: int) -> tuple[int, float] | None:
        found = next(self.fetched[row], None)
        if found is None and self.ahead[row] < self.q.shape[-1]:
            self.keys[row].scatter_(-1, self.latest[row], 0.0)
            self.ahead[row] *= 4
            self.fetched[row] = self._fetch(slice(row, row + 1), self.ahead[row])[0]
            found = next(self.fetched[row], None)
        return found


class InBlocks:
    """`Siblings` on a CPU, drawn with probability q, or if `greedy` by descending probability. First a block of tokens
    is chosen by its sum (its maximum), then a token of this block.

    This is many times faster than a random number for every token, or sorting. A token's probability is set to zero in
    `q` `[n, vocab]`, which is overwritten, and its block is summed again, so that no error accumulates."""

    def __init__(self, q: Tensor, greedy: bool) -> None:
        self.greedy = greedy
        self.of_blocks = _by_block(q, torch.amax if greedy else torch.sum).double().numpy()
        self.q = q.numpy()

    def draw_next(self, row: int) -> tuple[int, float] | None:
        u, v = (None, None) if self.greedy else torch.rand(2, dtype=torch.float64, device="cpu").tolist()
        block = _pick(self.of_blocks[row], u)
        begin = block * BLOCK
        probabilities = self.q[row, begin : begin + BLOCK]
        place = _pick(probabilities, v)
        probability = float(probabilities[place])
        if not probability > 0.0:
            return None
        probabilities[place] = 0.0
        left = probabilities.max() if self.greedy else probabilities.sum(dtype=np.float64)
        self.of_blocks[row, block] = left
        return begin + place, probability


def _by_block(q: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Return `[n, blocks]`: maximum or sum of each block of `q` `[n, vocab]`, the last of which may be shorter."""
    whole = q.shape[-1] // BLOCK * BLOCK
    reduced = reduce(q[:, :whole].unflatten(-1, (-1, BLOCK)), -1)
    return torch.cat((reduced, reduce(q[:, None, whole:], -1)), dim=-1) if whole < q.shape[-1] else reduced


def _pick(weights: np.ndarray, u: float | None) -> int:
    """The first index at which the running sum of `weights` `[n]` exceeds u times their sum. The index of the largest
    weight without u, or if all are zero; of a nan, if there is one."""
    if u is None:
        return int(weights.argmax())
    cumulated = np.add.accumulate(weights, dtype=np.float64)
    total = cumulated[-1]
    if not total > 0.0:
        return int(weights.argmax())
    # u is below 1, but u * total may round to total, which is after the last positive weight.
    return int(cumulated.searchsorted(min(u * total, np.nextafter(total, 0.0)), side="right"))
