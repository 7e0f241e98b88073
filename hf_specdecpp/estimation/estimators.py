"""Estimators of the probability that the target accepts a candidate, and their calibration.

An estimator is called once for each drafted candidate, with the `DraftStep` that drew the candidate, and returns a
probability: with `inputs="before"` for this candidate, which the draft has not read; with `inputs="after"` for the
previous candidate, whose hidden state the step computed (SpecDec++). With `inputs="path"` (DSpark) an estimator is
called before the draw, so that a stopping rule decides whether to draw. `DraftProbability` returns q,
`acceptance_head` contains a trained network. See `docs/specdecpp.md`, and `docs/dyspec.md` for trees.

Each verification shows whether a few estimates were right, so estimates are calibrated during generation
(`AcceptanceRates`). An estimate uses only values from before the candidate's verification, so the output is exact."""

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
SIBLING_MASS, NUM_SIBLINGS = 3, 4  # indices in the scalars


def scalar_features(
    q: Tensor,
    token: Tensor,
    greedy: bool = False,
    sibling_mass: Tensor | None = None,
    num_siblings: Tensor | None = None,
) -> Tensor:
    """Scalar inputs of an `AcceptanceHead` with `inputs="before"`, for each candidate.

    Args:
        q: `[..., vocab]`, the distributions that the candidates were drawn from.
        token: `[...]`, the candidates.
        greedy: whether the target decodes greedily.
        sibling_mass, num_siblings: `[...]`, in trees: total q and number of the siblings drawn before each candidate;
            zero by default.

    Returns:
        `[..., 6]` float32: log q(y) of the candidate y, entropy of q in nats, the largest minus the second largest
        probability in q, `sibling_mass`, `num_siblings`, 1 if greedy."""
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


MODES = ("sampled", "greedy")  # index: whether the target is greedy


@dataclass
class DraftStep:
    """The result of a draft pass for one candidate, or after nodes `[...]` of a tree, and the tokens drawn from it."""

    index: int  # 0 for the first candidate of a round
    scores: Tensor  # `[..., vocab]` float32, the draft's logits after all processors; q is their softmax
    hidden: Tensor  # `[..., hidden_size]`, the draft's last state (after the final norm), which gave `scores`
    embed: Callable[[Tensor], Tensor]  # maps token ids `[...]` to the draft's input embeddings `[..., embedding_size]`
    greedy: bool = False  # whether the target decodes greedily: accepts a candidate if it is its likeliest token
    token: Tensor = None  # type: ignore[assignment]  # `[...]` int64, the candidate; set when drawn

    @cached_property
    def q(self) -> Tensor:
        """`[..., vocab]`, the distribution that the candidate is drawn from (in greedy generation the softmax of
        `scores`, whose likeliest token is taken)."""
        return self.scores.softmax(dim=-1)


class Estimator(Protocol):
    inputs: str

    def estimate(self, step: DraftStep) -> Tensor | None:
        """The probability `[...]` that the candidate of `step` is accepted; with `inputs="after"` that the previous
        candidate is accepted, `None` in a round's first step."""


class DraftProbability:
    """Estimates acceptance by q(y), the draft's probability of the candidate: untrained, and usually overconfident."""

    inputs = "before"

    def estimate(self, step: DraftStep) -> Tensor:
        return step.q.gather(-1, step.token[..., None])[..., 0]  # gather does not wait for the device


LAGS = {"path": -1, "before": 0, "after": 1}


def lag_of(estimator: Estimator) -> int:
    """By how many draws the estimate of a candidate comes after the candidate's own draw: 0 with `inputs="before"`; 1
    with `"after"`, with the next draw; -1 with `"path"`, before the draw."""
    return LAGS[estimator.inputs]


# Calibration: how often candidates with an estimate are accepted, and which estimates follow each other. -------------


# Bins of estimates are narrow near 1, where most estimates lie and where survival after a few candidates is decided.
EDGES = (0.1, 0.25, 0.45, 0.65, 0.8, 0.9, 0.96, 0.99)
bin_of: Callable[[float], int] = partial(bisect_right, EDGES)
CENTRES = np.array([0.05, 0.175, 0.35, 0.55, 0.725, 0.85, 0.93, 0.975, 0.995])
NO_VERDICT = len(CENTRES)  # index of the row for a round without an estimate so far

# Priors: estimates are right (counts as `PRIOR_COUNT` candidates) and mostly high (`PRIOR_PROBS`; counts as 3 in
# chains, so that a useless draft's low estimates soon matter; as 8 in trees, which lost 5 % with 3 if costs had a dip).
PRIOR_PROBS = np.array([0.05, 0.05, 0.08, 0.10, 0.10, 0.10, 0.12, 0.15, 0.25])
PRIOR_COUNT, BIN_COUNT = 8.0, 3.0
UNCHANGED = (0.0, 1.0)  # intercept and slope of the identity
LINE_PRIOR = (2.0, 0.5)  # prior standard deviations of intercept and slope
CONVERGED = 1e-9  # Newton's method stops after a smaller step

FIT_EVERY = 64  # rounds
FIRST_FITS = (2, 4, 8, 16, 32)  # further fits, after these rounds
REMEMBERED = 0.9  # factor of all counts every FIT_EVERY rounds: a memory of about 600 rounds


class AcceptanceRates:
    """Acceptance rates by bin of estimates, and transition probabilities between bins, learned from rounds.

    Only tested candidates count: in a chain, candidates whose predecessors were all accepted; among siblings, those
    whose earlier siblings were all rejected. The gain of drafting depends on these only.

    Args:
        line: prior means of the attribute `line`.
        bin_count (candidates): weight of the prior of transitions, `PRIOR_PROBS`.

    Attributes:
        rounds: number of rounds observed.
        judged: number of tested candidates, with less weight on older ones.
        line: the fitted intercept and slope: log-odds of estimates become intercept + slope * log-odds, before the
            correction of each bin.
        shift: for each bin (`bin_of`), the number that calibration adds to the log-odds of an estimate.
        acceptance: `[bins]`, for each bin of estimates the probability that a tested candidate is accepted.
        following: `[bins + 1, bins]`, for each bin of a candidate's estimate the probabilities of the next candidate's
            bin, in a tree that of its first child; in the last row (`NO_VERDICT`), of the round's first candidate's.
        following_siblings: `[bins, bins]`, in trees the same of the next sibling, if the candidate was rejected."""

    def __init__(self, line: Sequence[float] = UNCHANGED, bin_count: float = BIN_COUNT) -> None:
        bins = len(CENTRES)
        self.prior, self.bin_count, self.rounds = np.array(line), bin_count, 0
        self.transitions, self.siblings = np.zeros((bins + 1, bins)), np.zeros((bins, bins))
        self.estimated, self.accepted = np.zeros(bins), np.zeros(bins)
        self.fit()

    @property
    def judged(self) -> float:
        return float(self.transitions.sum() + self.siblings.sum())

    def record_chain(self, estimates: Sequence[float], num_drafted: int, num_accepted: int) -> bool:
        """`observe_tree` for a chain, which is a tree of one branch. `estimates`: uncalibrated, of the first of its
        `num_drafted` candidates; the others, such as the last with `inputs="after"`, have none."""
        known = [*estimates, *[None] * num_drafted][:num_drafted]
        # Each candidate is the only child of the one before. Those after the first rejected one were not tested.
        return self.observe_tree(zip(zip(known), [*[0] * num_accepted, None], strict=False))

    def observe_tree(self, families: Iterable[tuple[Sequence[float | None], int | None]]) -> bool:
        """Called after a round: count the tested candidates. After rounds 2, 4, 8, 16, 32 and every 64 `fit`, and
        return `True`.

        First children count in `transitions` after their parents, others in `siblings` after the sibling before.
        Candidates without an estimate are divided among the bins.

        Example: the estimates of a chain are 0.5, 0.97, 0.3 and one candidate is accepted. The first counts as accepted
        in the bin of 0.5, the second as rejected in the bin of 0.97 after the bin of 0.5; the third was not tested.

        Args:
            families: from `DraftTree.judged`, for each reached node its children's uncalibrated estimates, and the rank
                of the accepted child."""
        row = NO_VERDICT
        for estimates, accepted in families:
            counts = self.transitions
            for rank, estimate in enumerate(estimates if accepted is None else estimates[: accepted + 1]):
                was_accepted = rank == accepted
                if estimate is None:  # by the bins' probabilities, given the last bin and the outcome
                    share = self.following[row] * (self.acceptance if was_accepted else 1.0 - self.acceptance)
                    share, following = share / share.sum(), NO_VERDICT
                    self.estimated += share * CENTRES
                    counts[row] += share
                    self.accepted += share * was_accepted
                else:
                    following = bin_of(estimate)
                    self.estimated[following] += estimate
                    counts[row, following] += 1.0
                    self.accepted[following] += was_accepted
                row, counts = following, self.siblings
        self.rounds += 1
        fades = self.rounds % FIT_EVERY == 0
        if fades:
            for table in (self.transitions, self.siblings, self.estimated, self.accepted):
                table *= REMEMBERED
        if is_due := fades or self.rounds in FIRST_FITS:
            self.fit()
        return is_due

    def calibrated(self, estimate: float) -> float:
        """The calibrated probability that a candidate with this estimate is accepted."""
        estimate = min(max(estimate, 1e-4), 1.0 - 1e-4)
        return 1.0 / (1.0 + (1.0 - estimate) / estimate * math.exp(-self.shift[bin_of(estimate)]))

    def expected_tokens(self, most: int) -> Floats:
        """`[most + 1]`, expected number of tokens that a round with a chain of 0, 1, ..., `most` candidates emits.

        Example: if each candidate is accepted with probability 0.5, returns 1, 1.5, 1.75, 1.875, ..."""
        if most not in self._expected:
            tokens, survives = [1.0], self.following[NO_VERDICT] * self.acceptance
            for _ in range(most):
                tokens.append(tokens[-1] + float(survives.sum()))
                survives = survives @ self.following[:NO_VERDICT] * self.acceptance
            self._expected[most] = np.array(tokens)
        return self._expected[most]

    def fit(self) -> None:
        """Compute all rates from the counts. Small counts are shrunk: a bin's acceptance towards a line fitted to all
        bins, a row of `following` towards the frequencies in all rows."""
        judged = self.transitions.sum(0) + self.siblings.sum(0)
        estimated = _log_odds((self.estimated + CENTRES) / (judged + 1.0))
        # First all bins together, so that a useless draft is recognised after a few candidates in any bins.
        self.line = _line(estimated, judged, self.accepted, self.prior)
        expected = _sigmoid(self.line[0] + self.line[1] * estimated)
        self.acceptance = (self.accepted + PRIOR_COUNT * expected) / (judged + PRIOR_COUNT)
        self.shift: list[float] = (_log_odds(self.acceptance) - estimated).tolist()
        usual = (judged + self.bin_count * PRIOR_PROBS) / (judged.sum() + self.bin_count)
        self.following, self.following_siblings = (
            (counts + self.bin_count * usual) / (counts.sum(1, keepdims=True) + self.bin_count)
            for counts in (self.transitions, self.siblings)
        )
        self._expected: dict[int, Floats] = {}


def _line(log_odds: Floats, judged: Floats, accepted: Floats, prior: Floats) -> Floats:
    """Intercept and slope of a logistic regression (Newton's method) of the numbers of `accepted` among `judged`
    candidates on the log-odds of mean estimates, all by bin. `prior`: their prior means."""
    if not judged.any():
        return prior
    inputs = np.stack((np.ones_like(log_odds), log_odds), axis=1)
    precision, line = np.diag(1.0 / np.square(LINE_PRIOR)), prior
    for _ in range(20):
        expected = _sigmoid(inputs @ line)
        weight = np.maximum(judged * expected * (1.0 - expected), 0.05 * judged)  # bounds steps where the loss is flat
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
