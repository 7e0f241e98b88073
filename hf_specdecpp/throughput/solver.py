"""When is it best to stop drafting? The optimal stopping problem of a round, solved (`docs/throughput.md`).

A round drafts candidates one by one. After each its estimate is known: a bin b, accepted with probability a[b]. The
bins are a Markov chain with transition probabilities P. Stopping after k candidates takes `seconds[k]` and yields
1 + the accepted tokens. The survival S is the product of the a[b] so far.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_specdecpp.config.costs import Floats

# Above this many kinks the value functions are interpolated between them, so that a solution stays a few milliseconds.
MOST_KINKS = 96
MOST_STEPS = 10  # of Newton's method; 3 or 4 are usual, and interpolation can make the last digits restless
NEVER = float("inf")


@dataclass(frozen=True)
class Plan:
    """A solution.

    Attributes:
        critical: `critical[k][b]`: after k candidates, the last of them in bin b (or with no estimate known yet, which
            is the last b), stop unless the survival is above this.
        rate: tokens a second of rounds that follow it.
        plain_rate: tokens a second without candidates; `rate` is never below it.
    """

    critical: list[list[float]]
    rate: float
    plain_rate: float


def solve(
    acceptance: Floats,
    transitions: Floats,
    seconds: Floats,
    lag: int = 0,
    rate: float = 0.0,
    most_kinks: int = MOST_KINKS,
    most_steps: int = MOST_STEPS,
    tolerance: float = 1e-8,
) -> Plan:
    """Maximise E[tokens] / E[seconds] of a round.

    Example: two bins with acceptance 0.2 and 0.9, each next with probability 0.5; rounds with 0, 1, 2 candidates take
    1.0, 1.3, 1.6 seconds. The best rate is 1.24 tokens a second, so a candidate costs 1.24 * 0.3 = 0.37 tokens. The
    first promises 0.55 tokens and is drafted. The second promises 0.55 S, which is more for S > 0.676 = `critical[1]`:
    it is drafted after a first in bin 1 (S = 0.9), not after one in bin 0 (S = 0.2). Such rounds take
    1.3 + 0.5 * 0.3 = 1.45 seconds and yield 1 + 0.55 + 0.5 * 0.9 * 0.55 = 1.80 tokens: 1.24 a second.

    Args:
        acceptance: `[bins]`, chance that a candidate in each bin is accepted if those before it are.
        transitions: `[bins + 1, bins]`, probabilities of the next bin given the last one; the last row is for the
            first candidate.
        seconds: `[max_tokens + 1]` of rounds with 0, 1, ... candidates, of any form: a longer one may take less.
        lag: 1 if the estimate of a candidate is known one candidate later only.
        rate: tokens a second to start from, e.g. the rate of an earlier solution.
        most_kinks: up to so many kinks in the value functions the solution is exact; more are interpolated.
        most_steps: of Newton's method. After one or two from a good start the plan is good, and its rate is earned.
        tolerance: change of the rate, as a share of it, after which there is no further step.
    """
    acceptance = acceptance.clip(1e-9, 1.0)
    plain_rate = 1.0 / seconds[0]
    rate = max(rate, plain_rate)
    for _ in range(most_steps):
        # The best value of tokens - rate * seconds is convex in the rate. Its root is wanted, and its slope is minus
        # the seconds of the best rule, so Newton's step leads to that rule's own rate.
        critical, value, tokens = _best_rule(acceptance, transitions, seconds, lag, rate, most_kinks)
        better = max(tokens / ((tokens - value) / rate), plain_rate)
        converged, rate = abs(better - rate) <= tolerance * rate, better
        if converged:
            break
    return Plan(critical, rate, plain_rate)


def _best_rule(
    acceptance: Floats, transitions: Floats, seconds: Floats, lag: int, rate: float, most_kinks: int
) -> tuple[list[list[float]], float, float]:
    """Backward induction at a fixed rate: critical survivals, the round's value and its expected tokens.

    What may still be gained, W[row](S), is convex, nondecreasing and piecewise linear in the survival S. It is kept as
    `[bins + 1, points]` values at survivals x, which contain its kinks. In the example of `solve` the first pass of
    the loop (k = 1, one candidate drafted, cost 0.37) finds a gain of 0.55 S - 0.37 for each row: critical survival
    0.676, and W = 0, 0, 0.18 at x = 0, 0.676, 1.
    """
    most = len(seconds) - 1
    next_acceptance = transitions @ acceptance
    reward = acceptance * next_acceptance[:-1] if lag else acceptance
    x, gain_left = np.array([0.0, 1.0]), np.zeros((len(transitions), 2))
    critical = [[NEVER] * len(transitions) for _ in range(most + 1)]
    for k in reversed(range(lag, most)):
        cost = rate * (seconds[k + 1] - seconds[k])
        x, gain = _one_step_back(x, gain_left, acceptance, transitions, reward, most_kinks)
        critical[k] = [_root(x, row - cost) for row in gain]
        x, gain = _insert(x, gain, critical[k])
        gain_left = np.maximum(gain - cost, 0.0)

    value, accepted = gain_left[-1, -1], (gain_left[-1, -1] - gain_left[-1, -2]) / (x[-1] - x[-2])
    if lag:
        value += next_acceptance[-1] - rate * (seconds[1] - seconds[0])
        accepted += next_acceptance[-1]
        if value <= 0.0:
            value = accepted = 0.0
    return critical, 1.0 + float(value) - rate * float(seconds[0]), 1.0 + float(accepted)


def _one_step_back(
    x: Floats, later: Floats, acceptance: Floats, transitions: Floats, reward: Floats, most_kinks: int
) -> tuple[Floats, Floats]:
    """Expected gain of one more candidate, its own cost aside: points, and `[bins + 1, points]` values there.

    A kink of `later` at survival x is one of the gain at x / a[b] for every bin b: from there a candidate in b leads to
    x. With `later` = 0 (the last candidate) the example of `solve` gives points 0 and 1 with values 0 and 0.55.
    """
    kinks = (x[None] / acceptance[:, None]).ravel()
    points = np.unique(np.append(kinks[kinks < 1.0].round(12), (0.0, 1.0)))
    if len(points) > most_kinks:
        points = points[np.linspace(0, len(points) - 1, most_kinks).round().astype(int)]
    after = np.stack([np.interp(points * a, x, row) for a, row in zip(acceptance, later, strict=False)])
    return points, transitions @ (points * reward[:, None] + after)


def _root(x: Floats, gain: Floats) -> float:
    """Where a nondecreasing, piecewise linear gain leaves zero: 0.625 for -0.2, -0.1, 0.3 at x = 0, 0.5, 1."""
    above = gain > 0.0
    if not above[-1]:
        return NEVER
    right = int(above.argmax())
    if right == 0:
        return 0.0
    left = right - 1
    return float(x[left] - gain[left] * (x[right] - x[left]) / (gain[right] - gain[left]))


def _insert(x: Floats, values: Floats, critical: list[float]) -> tuple[Floats, Floats]:
    """Insert the zero crossings as knots, so that max(gain - cost, 0) stays piecewise linear.

    Example: the function -1, 1 at x = 0, 1 with a crossing at 0.5 becomes -1, 0, 1 at x = 0, 0.5, 1.
    """
    points = np.unique(np.append(x, [each for each in critical if each < 1.0]))
    return points, np.stack([np.interp(points, x, row) for row in values])
