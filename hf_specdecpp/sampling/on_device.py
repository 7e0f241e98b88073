"""Drawing and verification as functions of tensors alone: nothing is read, so that a device can run them in one graph.

`verification.py` has the readable versions. Here a chain has k places, of which only the first `count` hold candidates
that were drafted before a stopping rule ended the draft: what stands in the others was drawn and is never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdecpp.sampling.verification import (
    Verification,
    as_tests,
    block_tests,
    carried,
    chain_ratios,
    leftovers,
    token_weights,
)


def race(weights: Tensor, times: Tensor) -> Tensor:
    """An index of `weights` `[..., n]`, drawn by them: the first to fire, at the time E_i / w_i.

    Args:
        times: `[..., n]`, the E_i, independent exponential numbers above 0.
    """
    return (weights / times).argmax(-1)


def exponential(*shape: int, device: torch.device) -> Tensor:
    """Times for `race`."""
    times = torch.empty(shape, device=device).exponential_()
    return times.clamp_min_(torch.finfo(times.dtype).tiny)


def count_until(fires: Tensor) -> Tensor:
    """How many candidates a round has whose rule stops after the first place `[k]` that fires: 0-d, from 1 to k.

    Example: [0, 1, 0, 1] stops after the second candidate, [0, 0] after the last.
    """
    return ((fires.cumsum(0) == 0).sum() + 1).clamp_max(fires.shape[0])


def accept_greedily(candidates: Tensor, count: Tensor, choices: Tensor) -> tuple[Tensor, Tensor]:
    """How many candidates stand, and the token after them, both 0-d: those that the target would have chosen.

    Args:
        candidates: `[k]`.
        count: 0-d, how many of them there are.
        choices: `[k + 1]`, the target's likeliest tokens before each candidate and after the last.
    """
    places = torch.arange(candidates.shape[0], device=candidates.device)
    stands = (candidates == choices[:-1]) & (places < count)
    accepted = stands.long().cumprod(0).sum()
    return accepted, choices.gather(0, accepted[None])[0]


def outcomes(
    candidates: Tensor, count: Tensor, p: Tensor, q: Tensor, verification: Verification
) -> tuple[Tensor, Tensor]:
    """The tests of the number of accepted candidates, from the last to the first, and what follows each number.

    Args:
        candidates: `[k]`, the i-th drawn from `q[i]`.
        count: 0-d, how many of them there are.
        p, q: `[k + 1, vocab]` and `[k, vocab]`, probabilities of the target and of the draft.

    Returns:
        `[k + 1]` chances that each test passes, where none passes the first counts; and `[k + 1, vocab]` weights of the
        token that follows.
    """
    drawn = torch.arange(q.shape[0], device=q.device) < count
    ratios = torch.where(drawn, chain_ratios(candidates, p, q), 0.0)
    # Without q nothing is left out of p after the last candidate: the token there is the bonus token.
    q = q * drawn[:, None]
    is_block = verification == "block"
    carries = carried(ratios) if is_block else ratios.new_ones(len(candidates) + 1)
    left = leftovers(carries, p, q)
    tests = block_tests(carries, left) if is_block else as_tests(token_weights(ratios))
    # In floating point a candidate can be rejected although p and q are equal to rounding: nothing is left, so then p.
    return tests, torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)


def first_passing(tests: Tensor, chances: Tensor) -> Tensor:
    """The last of `tests` `[n]` that passes, `[1]`: 0 where none does. `chances`: `[n]`, uniform."""
    return (chances < tests).cumsum(0).argmax(0, keepdim=True)  # the sum grows for the last time there


def accept_sampled(
    candidates: Tensor, count: Tensor, p: Tensor, q: Tensor, verification: Verification
) -> tuple[Tensor, Tensor]:
    """How many candidates stand, and the token after them, both 0-d, with fresh random numbers."""
    tests, weights = outcomes(candidates, count, p, q, verification)
    chances = torch.rand(tests.shape[0], dtype=tests.dtype, device=tests.device)
    accepted = first_passing(tests, chances)
    token = race(weights.index_select(0, accepted)[0], exponential(p.shape[-1], device=p.device))
    return accepted[0], token
