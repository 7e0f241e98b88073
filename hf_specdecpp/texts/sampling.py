"""p and q at a temperature and top-k, computed with the logits processors of `generate()`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper


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
        """Processed logits, `[n, vocab]` float32; the softmax of the result is sampled from."""
        nothing = torch.empty((1, 0), dtype=torch.long, device=logits.device)  # the processors do not read the prefix
        return LogitsProcessorList(self.processors)(nothing, logits.float())

    def p(self, logits: Tensor) -> Tensor:
        """The target's probabilities p `[n, vocab]` from its logits."""
        return point_mass(logits.argmax(-1), logits.float()) if self.greedy else self.scores(logits).softmax(-1)

    def q(self, logits: Tensor) -> Tensor:
        """The draft's probabilities q `[n, vocab]`; for greedy decoding the softmax of its logits."""
        return self.scores(logits).softmax(-1)

    def drawn_from(self, q: Tensor, token: Tensor) -> Tensor:
        """The q `[..., vocab]` that verification uses for candidates `token` `[...]`: a point mass if greedy."""
        return point_mass(token, q) if self.greedy else q


def point_mass(token: Tensor, like: Tensor) -> Tensor:
    """Distributions `[..., vocab]` that are 1 at `token` `[...]`, with the dtype and vocabulary size of `like`."""
    return F.one_hot(token, like.shape[-1]).to(like.dtype)
