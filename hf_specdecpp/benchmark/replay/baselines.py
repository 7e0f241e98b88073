"""Stopping rules by others that need no head. Replays compare ours with them (`sweep.py`)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from hf_specdecpp.drafting.stopping import Proposal, StoppingRule
from hf_specdecpp.estimation.estimators import DraftStep

SVIP_GAMMA = 0.15
ADAEDL_GAMMA = 0.2


class Baseline(StoppingRule):
    """A rule with one bound, between 0 and 1."""

    def __init__(self, bound: float, max_tokens: int) -> None:
        super().__init__(max_tokens)
        self.bound = bound


class Confidence(Baseline):
    """Stop after a candidate that the draft itself finds unlikely: q(y) < bound (transformers' dynamic speculation)."""

    def signal(self, step: DraftStep) -> Tensor:
        return step.q_of_token

    def stops(self, signal: float | None) -> bool:
        return signal is not None and signal < self.bound


class SVIP(Baseline):
    """Stop when the entropy H of q in nats says that the candidate was a guess: sqrt(0.15 H) > bound (arXiv
    2411.18462)."""

    def signal(self, step: DraftStep) -> Tensor:
        return step.entropy

    def stops(self, signal: float | None) -> bool:
        return signal is not None and math.sqrt(SVIP_GAMMA * max(signal, 0.0)) > self.bound


class AdaEDL(Baseline):
    """Stop when 1 - sqrt(0.2 H), a lower bound on the acceptance probability, falls under lambda (arXiv 2410.18351).

    lambda follows the acceptance rate: it falls while more than 90 % of the candidates are accepted and rises otherwise
    (exponential averages with the paper's 0.5 for the rate, 0.9 for lambda, steps of 0.01).
    """

    def __init__(self, bound: float, max_tokens: int) -> None:
        super().__init__(bound, max_tokens)
        self.acceptance_rate = 0.9

    def signal(self, step: DraftStep) -> Tensor:
        return step.entropy

    def stops(self, signal: float | None) -> bool:
        return signal is not None and 1.0 - math.sqrt(ADAEDL_GAMMA * max(signal, 0.0)) < self.bound

    def saw(self, proposal: Proposal, stands: Sequence[int]) -> None:
        if proposal.num_drawn == 0:
            return
        self.acceptance_rate = 0.5 * self.acceptance_rate + 0.5 * len(stands) / proposal.num_drawn
        moved = self.bound + (0.01 if self.acceptance_rate < 0.9 else -0.01)
        self.bound = min(max(0.9 * self.bound + 0.1 * moved, 0.0), 1.0)


BASELINES = {"confidence": Confidence, "svip": SVIP, "adaedl": AdaEDL}
