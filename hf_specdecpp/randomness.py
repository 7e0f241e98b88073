"""The only two random decisions of speculative decoding, so that a test can enumerate every outcome of both."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Randomness(Protocol):
    def categorical(self, probs: Tensor) -> Tensor:
        """An index (0-d int64) drawn with probabilities `probs` (`[n]`, need not sum to exactly 1)."""

    def bernoulli(self, probability: float) -> bool:
        """True with this probability."""


class TorchRandomness:
    """Draws from torch's global generators, so `torch.manual_seed` fixes a run. Every call draws afresh."""

    def categorical(self, probs: Tensor) -> Tensor:
        return torch.multinomial(probs, num_samples=1).squeeze(0)

    def bernoulli(self, probability: float) -> bool:
        # float64 on the CPU: no wait for a device, and a probability of exactly 0 or 1 is honoured.
        return bool(torch.rand((), dtype=torch.float64) < probability)
