"""p and q at a temperature and top-k, computed with the logits processors of `generate()`, and draws from many rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdecpp.sampling.randomness import widest


@dataclass(frozen=True)
class Sampling:
    """How target and draft choose tokens.

    Args:
        temperature: 0 is greedy: p is a point mass at the target's likeliest token, and the draft proposes its own
            likeliest token. The head then reads the softmax of the draft's logits as q, as in `generate()`.
        top_k: 0 for all tokens; ignored by greedy decoding.
    """

    temperature: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def processors(self) -> list[LogitsProcessor]:
        """The logits processors, in the order of `generate()`."""
        if self.greedy:
            return []
        warpers = [TemperatureLogitsWarper(self.temperature)] if self.temperature != 1.0 else []
        return [*warpers, *([TopKLogitsWarper(self.top_k)] if self.top_k else [])]

    def scores(self, logits: Tensor) -> Tensor:
        """Process logits `[n, vocab]`. Tokens are sampled from the softmax of the result, which is float32."""
        nothing = torch.empty((1, 0), dtype=torch.long, device=logits.device)  # the processors do not read the prefix
        process: Any = LogitsProcessorList(self.processors)
        return process(nothing, logits.float())

    def p(self, logits: Tensor) -> Tensor:
        """The target's probabilities p `[n, vocab]` from its logits."""
        return point_mass(logits.argmax(-1), logits.float()) if self.greedy else self.scores(logits).softmax(-1)

    def q(self, logits: Tensor) -> Tensor:
        """The draft's probabilities q `[n, vocab]`; for greedy decoding the softmax of its logits."""
        return self.scores(logits).softmax(-1)

    def drawn_from(self, q: Tensor, token: Tensor) -> Tensor:
        """The q `[..., vocab]` by which verification tests candidates `token` `[...]`: a point mass if greedy."""
        return point_mass(token, q) if self.greedy else q


def point_mass(token: Tensor, like: Tensor) -> Tensor:
    """Return distributions `[..., vocab]` that are 1 at `token` `[...]`, with dtype and vocabulary size of `like`."""
    return F.one_hot(token, like.shape[-1]).to(like.dtype)


def uniform(shape: tuple[int, ...], generator: torch.Generator | None, device: torch.device) -> Tensor:
    """Draw numbers in [0, 1) of `shape`, of dtype `widest`, on the host by `generator` (torch's global one by default),
    so that a seed gives the same numbers for every device."""
    return torch.rand(shape, generator=generator, dtype=torch.float64).to(device, widest(device))


def draw_rows(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw an index from each row of `probs` `[n, vocab]` (rows need not sum to 1): `[n]`; `generator` as in `uniform`.

    By inverting the cumulative sums: `multinomial` draws an exponential number for each entry, which takes longer."""
    if widest(probs.device) != torch.float64:  # float32 sums may fall, so that probability 0 could be drawn
        return draw_rows(probs.cpu(), generator).to(probs.device)
    sums = probs.cumsum(-1, dtype=torch.float64)
    at = uniform((len(probs), 1), generator, probs.device) * sums[:, -1:]
    # The first entry whose sum is larger, which never has probability 0.
    return torch.searchsorted(sums, at, right=True)[:, 0].clamp_max(probs.shape[-1] - 1)


def seed_of(seed: int, *parts: object) -> int:
    """Return a seed of 31 bits for these `parts` of a run: with a row's number added it stays within 32 bits."""
    digest = hashlib.sha256("/".join(map(str, (seed, *parts))).encode()).digest()
    return int.from_bytes(digest[:4], "big") // 2
