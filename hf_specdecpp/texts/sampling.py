"""p and q at a temperature and top-k, through the processors that `generate()` would use."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from hf_specdecpp.sampling.processors import Processing


@dataclass(frozen=True)
class Sampling:
    """How target and draft choose tokens.

    Args:
        temperature: 0 is greedy: p is a point mass at the target's likeliest token, the draft takes its own likeliest
            one, and what the head sees as q is the softmax of the draft's unprocessed logits, as in `generate()`.
        top_k: 0 for all tokens; greedy decoding ignores it.
    """

    temperature: float = 1.0
    top_k: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def processors(self) -> list[LogitsProcessor]:
        """In the order of `generate()`."""
        if self.greedy:
            return []
        warpers = [TemperatureLogitsWarper(self.temperature)] if self.temperature != 1.0 else []
        return [*warpers, *([TopKLogitsWarper(self.top_k)] if self.top_k else [])]

    def scores(self, logits: Tensor) -> Tensor:
        """Processed logits, `[n, vocab]` float32: their softmax is the distribution that is drawn from."""
        nothing = torch.empty((1, 0), dtype=torch.long, device=logits.device)  # none of the processors reads the text
        return Processing(self.processors).along(nothing, [], logits.float())

    def p(self, logits: Tensor) -> Tensor:
        """The target's probabilities p `[n, vocab]` from its logits."""
        return point_mass(logits.argmax(-1), logits.float()) if self.greedy else self.scores(logits).softmax(-1)

    def q(self, logits: Tensor) -> Tensor:
        """The draft's probabilities q `[n, vocab]`; in greedy decoding its confidence."""
        return self.scores(logits).softmax(-1)

    def drawn_from(self, q: Tensor, token: Tensor) -> Tensor:
        """The distribution `[..., vocab]` that the verifier holds against p for `token` (`[...]`) proposed by q."""
        return point_mass(token, q) if self.greedy else q


def point_mass(token: Tensor, like: Tensor) -> Tensor:
    """The distribution of a candidate that was taken and not drawn: `[..., vocab]`, 1 at `token` (`[...]`)."""
    return F.one_hot(token, like.shape[-1]).to(like.dtype)
