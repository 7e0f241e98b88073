"""How likely is the target to accept a candidate? `acceptance_head` learns it, `DraftProbability` asks the draft.

An estimator is called once for each drafted token, with the `DraftStep` that drew it, and answers a probability. Its
`inputs` says which token that answer judges: `"before"` the candidate just drawn, from what is known without feeding
it to the draft; `"after"` the candidate before it, whose hidden state has only now been computed (SpecDec++). See
`docs/specdecpp.md`, and `docs/dyspec.md` for trees.

The verifier tells the truth about a few candidates in every round, so estimates are calibrated while a text is
generated (`AcceptanceRates`). What a candidate is judged by is known before that candidate is verified, so the output
stays exact.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from hf_specdecpp.figures import Floats

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


# What rounds say about estimates: how often each came true, and which follows which. --------------------------------


# Bins of estimates: narrow where they are many and where survival after a few candidates depends on them.
EDGES = (0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 0.96, 0.99)
bin_of: Callable[[float], int] = partial(bisect_right, EDGES)
CENTRES = np.array([0.05, 0.175, 0.35, 0.55, 0.725, 0.85, 0.93, 0.975, 0.995])
NO_VERDICT = len(CENTRES)  # the row of a round whose first verdict is still to come

# Before anything is observed: the estimates are right, and mostly high. Each prior counts as so many candidates. How
# high they are counts as fewer in chains, where a useless draft shows by its low estimates; in trees, which see many
# candidates a round, the fewer cost up to 5 % where costs have a dip.
PRIOR_PROBS = np.array([0.05, 0.05, 0.08, 0.10, 0.10, 0.10, 0.12, 0.15, 0.25])
PRIOR_COUNT, BIN_COUNT = 8.0, 3.0
UNCHANGED = (0.0, 1.0)  # the line that leaves log-odds as they are: intercept and slope
LINE_PRIOR = (2.0, 0.5)  # standard deviations of both
CONVERGED = 1e-9  # a step of Newton's method that is smaller than this one is the last

FIT_EVERY = 64  # rounds
FIRST_FITS = (2, 4, 8, 16, 32)
REMEMBERED = 0.9  # of all counts every FIT_EVERY rounds, so that they follow the text: a memory of some 600 rounds


class AcceptanceRates:
    """What the rounds so far say about estimates: how often each came true, and which follows which.

    Only candidates that the target got to count: in a chain those whose predecessors were accepted, among siblings
    those whose predecessors were rejected. It has judged no others, and what drafting gains depends on no others.

    Args:
        line: intercept and slope of the calibration before anything is observed.
        bin_count (candidates): that the prior of how high estimates are counts as.

    Attributes:
        rounds: how many were observed.
        judged: how many candidates; old ones fade.
        line: the intercept and the slope now: log-odds are calibrated to intercept + slope * log-odds, before what is
            learned of each bin is added.
        shift: by bin, what calibration adds to the log-odds of an estimate.
        acceptance: `[bins]`, chance that a candidate in each bin is accepted once the target got to it.
        following: `[bins + 1, bins]`, probabilities of the next bin given the last. The last row: of a first verdict.
    """

    def __init__(self, line: Sequence[float] = UNCHANGED, bin_count: float = BIN_COUNT) -> None:
        bins = len(CENTRES)
        self.prior, self.bin_count, self.rounds = np.array(line), bin_count, 0
        self.transitions = np.zeros((bins + 1, bins))
        self.estimated, self.accepted = np.zeros(bins), np.zeros(bins)
        self.fit()

    @property
    def judged(self) -> float:
        return float(self.transitions.sum())

    def observe(self, estimates: list[float], num_drafted: int, num_accepted: int) -> bool:
        """Count a round of a chain, and now and then learn from the counts.

        Example: the estimates 0.5, 0.97, 0.3 and one accepted candidate. The first counts as accepted in the bin of
        0.5, the second as rejected in the bin of 0.97 after one of 0.5; the target never got to the third.

        Args:
            estimates: of its candidates, in order; an estimate that comes late is missing for the last.
            num_drafted, num_accepted: candidates.

        Returns:
            Whether the calibration is another one now.
        """
        row = NO_VERDICT
        for position in range(min(num_drafted, num_accepted + 1)):
            was_accepted = position < num_accepted
            if position < len(estimates):
                following = bin_of(estimates[position])
                share = np.eye(len(CENTRES))[following]
                self.estimated += share * estimates[position]
            else:  # its bin is unknown: shares by the probability of each, given the last bin and the outcome
                following = NO_VERDICT
                share = self.following[row] * (self.acceptance if was_accepted else 1.0 - self.acceptance)
                share = share / share.sum()
                self.estimated += share * CENTRES
            self.transitions[row] += share
            self.accepted += share * was_accepted
            row = following
        return self._end_round()

    def observe_tree(self, families: Iterable[tuple[list[float], int | None]]) -> bool:
        """The same for a tree: of each node reached the estimates of its children, and the rank of the accepted one."""
        for estimates, accepted in families:
            row = NO_VERDICT
            for rank, estimate in enumerate(estimates if accepted is None else estimates[: accepted + 1]):
                following = bin_of(estimate)
                self.estimated[following] += estimate
                self.transitions[row, following] += 1.0
                self.accepted[following] += rank == accepted
                row = following
        return self._end_round()

    def _end_round(self) -> bool:
        self.rounds += 1
        fades = self.rounds % FIT_EVERY == 0
        if fades:
            for counts in (self.transitions, self.estimated, self.accepted):
                counts *= REMEMBERED
        if fades or self.rounds in FIRST_FITS:
            self.fit()
            return True
        return False

    def calibrated(self, estimate: float) -> float:
        """The chance that a candidate with this estimate is accepted."""
        estimate = min(max(estimate, 1e-4), 1.0 - 1e-4)
        return 1.0 / (1.0 + (1.0 - estimate) / estimate * math.exp(-self.shift[bin_of(estimate)]))

    def expected_tokens(self, most: int) -> Floats:
        """`[most + 1]` tokens of rounds with always 0, 1, ... candidates.

        Example: with an acceptance of 0.5 whatever the estimates say, 1, 1.5, 1.75, 1.875, ...
        """
        tokens = [1.0]
        survives = self.following[NO_VERDICT] * self.acceptance
        for _ in range(most):
            tokens.append(tokens[-1] + float(survives.sum()))
            survives = survives @ self.following[:NO_VERDICT] * self.acceptance
        return np.array(tokens)

    def fit(self) -> None:
        """Turn counts into probabilities; where counts are small, they are shrunk towards those of all bins."""
        judged = self.transitions.sum(0)
        estimated = _log_odds((self.estimated + CENTRES) / (judged + 1.0))
        # All bins together first: a useless draft shows after a few candidates, whichever bins they are in.
        self.line = _line(estimated, judged, self.accepted, self.prior)
        expected = _sigmoid(self.line[0] + self.line[1] * estimated)
        self.acceptance = (self.accepted + PRIOR_COUNT * expected) / (judged + PRIOR_COUNT)
        # What to add to the log-odds of an estimate, by bin.
        self.shift: list[float] = (_log_odds(self.acceptance) - estimated).tolist()
        usual = (judged + self.bin_count * PRIOR_PROBS) / (judged.sum() + self.bin_count)
        rows = self.transitions.sum(1, keepdims=True)
        self.following = (self.transitions + self.bin_count * usual) / (rows + self.bin_count)


def _line(log_odds: Floats, judged: Floats, accepted: Floats, prior: Floats) -> Floats:
    """Intercept and slope of a logistic regression on mean log-odds by bin (Newton's method); `prior`: their means."""
    if not judged.any():
        return prior
    inputs = np.stack((np.ones_like(log_odds), log_odds), axis=1)
    precision, line = np.diag(1.0 / np.square(LINE_PRIOR)), prior
    for _ in range(20):
        expected = _sigmoid(inputs @ line)
        weight = np.maximum(judged * expected * (1.0 - expected), 0.05 * judged)  # no wild steps where it is flat
        slope = inputs.T @ (accepted - judged * expected) - precision @ (line - prior)
        step = np.linalg.solve(inputs.T @ (weight[:, None] * inputs) + precision, slope)
        line = line + step
        if np.abs(step).max() < CONVERGED:
            break
    return line


def _log_odds(probability: Any) -> Any:
    probability = np.clip(probability, 1e-6, 1.0 - 1e-6)
    return np.log(probability / (1.0 - probability))


def _sigmoid(log_odds: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-log_odds))
