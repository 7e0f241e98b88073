"""The only random decisions of speculative decoding, so that a test can enumerate every outcome of each.

Training and benchmarks draw many rows at once (`draw_rows`), from seeds of their own (`seed_of`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from hf_specdecpp.sampling.without_replacement import Inverted, Ranked, Siblings


class Randomness(Protocol):
    def categorical(self, probs: Tensor) -> Tensor:
        """An index (0-d int64) drawn with probabilities `probs` (`[n]`, need not sum to exactly 1)."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""

    def outcome(self, weights: Tensor, row: Callable[[Tensor], Tensor], size: int) -> tuple[int, int]:
        """An index drawn with `weights` `[n]`, then another from `row(index)`. One read from the device.

        Args:
            row: gives `[1, size]` weights for the first index, an int64 tensor `[1]`.
        """


class TreeRandomness(Randomness, Protocol):
    def siblings(self, q: Tensor) -> Siblings:
        """Draws without replacement from each row of `q` (`[n, vocab]`), which may be overwritten."""


def waits_for_reads(device: torch.device) -> bool:
    """Whether reading a number from the device waits for all that it has to do, so that a round should read once."""
    return device.type != "cpu"


class TorchRandomness:
    """Draws from torch's global generators, so `torch.manual_seed` fixes a run. Every call draws afresh."""

    def categorical(self, probs: Tensor) -> Tensor:
        if probs.device.type != "cpu":
            return _first_to_fire(probs, torch.empty_like(probs).exponential_())
        drawn = Inverted(probs[None].clone()).next(0)  # about 40 times faster for a vocabulary of 50k
        if drawn is None:
            raise ValueError(_nothing(probs))
        return torch.tensor(drawn[0])

    def bernoulli(self, probability: float) -> bool:
        # float64 on the CPU: no wait for a device, and a probability of exactly 0 or 1 is honoured.
        return bool(torch.rand((), dtype=torch.float64) < probability)

    def outcome(self, weights: Tensor, row: Callable[[Tensor], Tensor], size: int) -> tuple[int, int]:
        times = torch.empty(len(weights) + size, device=weights.device).exponential_()  # one call for both
        first = _first_to_fire(weights, times[: len(weights)])[None]
        probs = row(first)
        second = _first_to_fire(probs, times[len(weights) :])
        index, token, is_sound = torch.cat((first, second, probs.sum(-1) > 0.0)).tolist()
        if not is_sound:
            raise ValueError(_nothing(probs))
        return index, token

    def siblings(self, q: Tensor) -> Siblings:
        if q.device.type == "cpu":
            return Inverted(q)
        times = torch.empty_like(q).exponential_().clamp_min_(torch.finfo(q.dtype).tiny)
        return Ranked(q, q / times)


def _first_to_fire(weights: Tensor, times: Tensor) -> Tensor:
    """An index of `weights` `[..., n]`, drawn by them, given independent exponential numbers `times` `[n]`.

    Index i fires at time E_i / w_i, so it is the first with probability w_i / sum(w). `multinomial` does the same, but
    waits for the device to check its arguments.
    """
    return (weights / times.clamp_min(torch.finfo(times.dtype).tiny)).argmax(-1)


def _nothing(weights: Tensor) -> str:
    return (
        f"No token can be drawn: {weights.shape[-1]} probabilities sum to {float(weights.sum())}. The target's or the "
        "draft's logits are not numbers, or a logits processor forbids every token."
    )


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
