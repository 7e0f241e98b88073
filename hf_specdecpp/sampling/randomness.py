"""The only random decisions of speculative decoding, so that a test can enumerate every outcome of each.

Training and benchmarks draw many rows at once (`draw_rows`), from seeds of their own (`seed_of`).
"""

from __future__ import annotations

import hashlib
from typing import Protocol

import torch
from torch import Tensor

from hf_specdecpp.sampling.without_replacement import Inverted, Ranked, Siblings


class Randomness(Protocol):
    def categorical(self, probs: Tensor) -> Tensor:
        """An index (0-d int64) drawn with probabilities `probs` (`[n]`, need not sum to exactly 1)."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""


class TreeRandomness(Randomness, Protocol):
    def siblings(self, q: Tensor) -> Siblings:
        """Draws without replacement from each row of `q` (`[n, vocab]`), which may be overwritten."""


class TorchRandomness:
    """Draws from torch's global generators, so `torch.manual_seed` fixes a run. Every call draws afresh."""

    def categorical(self, probs: Tensor) -> Tensor:
        if probs.device.type != "cpu":
            return torch.multinomial(probs, num_samples=1).squeeze(0)
        drawn = Inverted(probs[None].clone()).next(0)  # about 40 times faster for a vocabulary of 50k
        if drawn is None:
            raise ValueError(f"No token can be drawn: {probs.shape[0]} probabilities sum to {float(probs.sum())}.")
        return torch.tensor(drawn[0])

    def bernoulli(self, probability: float) -> bool:
        # float64 on the CPU: no wait for a device, and a probability of exactly 0 or 1 is honoured.
        return bool(torch.rand((), dtype=torch.float64) < probability)

    def siblings(self, q: Tensor) -> Siblings:
        if q.device.type == "cpu":
            return Inverted(q)
        times = torch.empty_like(q).exponential_().clamp_min_(torch.finfo(q.dtype).tiny)
        return Ranked(q, q / times)


def draw_rows(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One index from each row of `probs` `[n, vocab]` (rows need not sum to 1): `[n]`.

    By inverting the cumulative sums: `multinomial` draws an exponential number for each entry, which takes longer.
    """
    sums = probs.cumsum(-1, dtype=torch.float64)
    at = torch.rand((len(probs), 1), generator=generator, dtype=torch.float64, device=probs.device) * sums[:, -1:]
    # The first entry whose sum is above: one of probability zero never is.
    return torch.searchsorted(sums, at, right=True)[:, 0].clamp_max(probs.shape[-1] - 1)


def seed_of(seed: int, *parts: object) -> int:
    """A seed for these parts of a run: 31 bits, which leave room to add a row's number in 32."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:4], "big") // 2
