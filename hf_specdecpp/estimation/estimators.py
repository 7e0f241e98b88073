"""How likely is the target to accept a candidate? `acceptance_head` learns it, `DraftProbability` asks the draft.

An estimator is called once for each drafted token, with the `DraftStep` that drew it, and answers a probability. Its
`inputs` says which token that answer judges: `"before"` the candidate just drawn, from what is known without feeding
it to the draft; `"after"` the candidate before it, whose hidden state has only now been computed (SpecDec++). See
`docs/specdecpp.md`, and `docs/dyspec.md` for trees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

NUM_SCALARS = 6
SIBLING_MASS, NUM_SIBLINGS = 3, 4  # their places among the scalars


def scalar_features(
    q: Tensor,
    token: Tensor,
    greedy: bool = False,
    sibling_mass: Tensor | None = None,
    num_siblings: Tensor | None = None,
) -> Tensor:
    """Scalars of candidates for a head with `inputs="before"`.

    Args:
        q: `[..., vocab]`, what they were drawn from.
        token: `[...]`, the candidates.
        greedy: whether the target decodes greedily.
        sibling_mass, num_siblings: `[...]`, total draft probability and number of the siblings drawn before each in a
            tree; zero by default.

    Returns:
        `[..., 6]` float32: log q(y), entropy in nats, margin q1 - q2, sibling mass, number of siblings, 1 if greedy.
    """
    top = q.topk(min(2, q.shape[-1]), dim=-1).values
    log_q = q.gather(-1, token[..., None])[..., 0].clamp_min(1e-30).log()
    none = torch.zeros_like(log_q)
    scalars = (
        log_q,
        torch.special.entr(q).sum(-1),
        top[..., 0] - top[..., -1],
        none if sibling_mass is None else sibling_mass,
        none if num_siblings is None else num_siblings.to(q.dtype),
        torch.full_like(log_q, float(greedy)),
    )
    return torch.stack(scalars, dim=-1).float()


MODES = ("sampled", "greedy")  # indexed by whether the target is greedy


@dataclass
class DraftStep:
    """One draft forward and the candidate drawn from it.

    Attributes:
        index: 0 for the first candidate of a round.
        scores: `[..., vocab]` float32, the draft's logits after all processors: q is their softmax.
        hidden: `[..., hidden_size]`, the draft's last hidden state (after the final norm) that `scores` were computed
            from.
        embed: maps a token id to its input embedding `[embedding_size]` in the draft.
        greedy: whether the target decodes greedily, so that the candidate is accepted if it is the target's choice.
        token: `[...]` int64, the candidate; unset until it is drawn.
    """

    index: int
    scores: Tensor
    hidden: Tensor
    embed: Callable[[Tensor], Tensor]
    greedy: bool = False
    token: Tensor = None  # type: ignore[assignment]

    @cached_property
    def q(self) -> Tensor:
        """`[..., vocab]`, what the candidate is drawn from (in greedy decoding: the draft's confidence)."""
        return self.scores.softmax(dim=-1)

    @property
    def q_of_token(self) -> Tensor:
        """`[...]`, q(y) of the candidate."""
        return self.q.gather(-1, self.token[..., None])[..., 0]  # an index of a device would be read

    @property
    def entropy(self) -> Tensor:
        """Entropy of q in nats."""
        return torch.special.entr(self.q).sum(-1)

    @cached_property
    def scalars(self) -> Tensor:
        """`[..., 6]`, `scalar_features` of the candidate."""
        return scalar_features(self.q, self.token, self.greedy)


class Estimator(Protocol):
    inputs: str

    def estimate(self, step: DraftStep) -> Tensor | None:
        """A probability (0-d), or `None` where there is no token to judge yet."""


class DraftProbability:
    """q(y): the draft's own probability of the candidate. Needs no training; usually overconfident."""

    inputs = "before"

    def estimate(self, step: DraftStep) -> Tensor:
        return step.q_of_token


def lag_of(estimator: Estimator) -> int:
    """How many candidates late its answers come."""
    return int(estimator.inputs == "after")
