"""A block draft as it is taught: blocks after tokens chosen at random, several of each text in one pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.training.distillation.student import DISTANCES, Taught, through


class BlockStudent(Taught):
    """A draft whose block has `places` candidates; all of it is trained. Embeddings and LM head are the target's.

    Args:
        drafter: has met the target.
        anchors: blocks of a text in one pass.
        decay: of the weights of places, in places.
        loss: one of `DISTANCES`.
    """

    def __init__(self, drafter: Any, anchors: int, decay: float, loss: str = "kl") -> None:
        super().__init__()
        self.model = drafter.model.requires_grad_(True)
        object.__setattr__(self, "drafter", drafter)
        self.unroll, self.distance = drafter.places, DISTANCES[loss]
        self.anchors = anchors
        self.weights = [math.exp(-place / decay) for place in range(self.unroll)]

    def forward(
        self,
        input_ids: Tensor,
        answers: Tensor,
        p_logits: Callable[[Any], Tensor],
        states: Any = None,
        measure: bool = False,
    ) -> Tensor:
        """Teach or measure the draft at the answers' positions; arguments as above.

        To teach, the distance between p and q is taken at all places of the blocks after some of the positions, and
        what is returned is its weighted mean times the number of the answers' positions, as if all had a block. To
        measure, each position is the first candidate of one block, the second of another, and so on.
        """
        if measure:
            return self._measured(input_ids, answers, p_logits, states)
        anchors, taught = chosen(answers, self.anchors, self.unroll)
        hidden = self.drafter.blocks_after(input_ids, states, anchors)[taught]
        places = (anchors[..., None] + torch.arange(self.unroll, device=anchors.device))[taught]
        rows = torch.arange(len(answers), device=anchors.device)[:, None, None].expand_as(taught)[taught]
        number = (answers.flatten().cumsum(0) - 1).view_as(answers)[rows, places]  # among the answers' positions
        weights = torch.tensor(self.weights, device=hidden.device).expand(taught.shape)[taught]
        total = through(
            hidden, lambda at, own: (weights[at] * self.distances(own[:, None], p_logits(number[at]))[:, 0]).sum()
        )
        return total / weights.sum() * answers.sum()

    def _measured(
        self, input_ids: Tensor, answers: Tensor, p_logits: Callable[[Any], Tensor], states: Tensor
    ) -> Tensor:
        first = max(int(answers.any(0).nonzero()[0]) - self.unroll + 1, 1)
        anchors = torch.arange(first, answers.shape[1], device=answers.device).expand(len(answers), -1)
        blocks = self.drafter.blocks_after(input_ids, states, anchors)
        rows, places = answers.nonzero().unbind(1)
        hidden = torch.stack([blocks[rows, places - place - first, place] for place in range(self.unroll)], 1)
        return self.measured(hidden, p_logits)


def chosen(answers: Tensor, count: int, places: int) -> tuple[Tensor, Tensor]:
    """Anchors `[batch, a]`, at random among the answers' positions, and which places `[batch, a, places]` are taught.

    Example: of a text of 9 tokens the answer begins with token 5, and blocks have 3 places. Positions 4 to 7 may be
    anchors, and after 6 two places are taught, the tokens 7 and 8.

    Args:
        answers: bool `[batch, n - 1]`: the target wrote the token after this one.
    """
    draw = torch.rand(answers.shape, device=answers.device).masked_fill(~answers, -1.0)
    value, anchors = draw.topk(min(count, answers.shape[1]), dim=1)
    at = anchors[..., None] + torch.arange(places, device=answers.device)
    inside = at < answers.shape[1]
    later = answers.gather(1, at.clamp_max(answers.shape[1] - 1).flatten(1)).view_as(at)
    return anchors.clamp_min(1), (value >= 0.0)[..., None] & inside & later
