"""Verification of a sampled chain without waiting for the device in between: all tests first, then one read.

The readable versions are in `verification.py`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness, waits_for_reads
from hf_specdecpp.sampling.verification import Verification, chain_ratios, follow, verify_block, verify_chain


def verify_sampled(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """`verify_block` or `verify_chain`, or their counterpart here where p lies on a device, then `follow`.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`; those for which there is no q were looked up.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[n, vocab]` probabilities of the draft.

    Returns:
        Number of accepted candidates, and the token that follows them.
    """
    drawn = len(q)
    verify = verify_block if verification == "block" else verify_chain
    if waits_for_reads(p.device):
        verify = partial(verify_at_once, verification=verification)
    accepted, token = verify(candidates[:drawn], p[: drawn + 1], q, randomness)
    if accepted < drawn or drawn == len(candidates):
        return accepted, token
    looked_up = [int(each) for each in candidates[drawn:]]
    further, token = follow(looked_up, token, lambda count: int(randomness.categorical(p[drawn + count])))
    return drawn + further, token


def verify_at_once(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """The same distribution of results as `verify_block` or `verify_chain`: all tests of the number of accepted
    candidates are made, and the longest that passes counts; then the token after them is drawn.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[k, vocab]` probabilities of the draft.
    """
    ratios = chain_ratios(candidates, p, q)
    is_block = verification == "block"
    carries = carried(ratios) if is_block else ratios.new_ones(len(candidates) + 1)
    left = leftovers(carries, p, q)
    tests = block_tests(carries, left) if is_block else as_tests(token_weights(ratios))

    # In floating point a candidate can be rejected although p and q are equal to rounding: nothing is left, so then p.
    return randomness.outcome(tests, partial(left.index_select, 0), partial(p.index_select, 0))


def leftovers(carries: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(c_i p - q)+, `[n, vocab]`, by c_i `[n]` and p `[n, vocab]`; c_i p in rows for which q `[k, vocab]` has none."""
    left = p * carries[:, None].to(p.dtype)
    left[: len(q)].sub_(q)
    return left.clamp_min_(0.0)


def block_tests(carries: Tensor, left: Tensor) -> Tensor:
    """h_i = s_i / (s_i + 1 - c_i), `[n]`, by c_i `[n]` and the `leftovers` `[n, vocab]`, whose sums are s_i.

    After the last candidate s_i is c_i, and so is h_i. Where c_i is 1 and nothing is left, the candidate after it is
    always accepted, and h_i, which is 0 here, does not matter.
    """
    sums = left.sum(-1, dtype=carries.dtype)
    return sums / (1.0 - carries).add_(sums).clamp_min_(torch.finfo(sums.dtype).tiny)


def token_weights(ratios: Tensor) -> Tensor:
    """The chance that `verify_chain` accepts i candidates, `[k + 1]`, by their p / q `[k]`.

    For [0.5, 2]: [0.5, 0, 0.5].
    """
    accepts, one = ratios.clamp_max(1.0), ratios.new_ones(1)
    return torch.cat((one, accepts.cumprod(0))) * torch.cat((1.0 - accepts, one))


def weights_of(tests: Tensor) -> Tensor:
    """The chance that each of the `tests` `[n]` is the first that passes, of those from the last to the first.

    For [1, 0.5, 0.25]: [0.375, 0.375, 0.25].
    """
    failed = (1.0 - tests).flip(0).cumprod(0)[:-1].flip(0)
    return tests * torch.cat((failed, tests.new_ones(1)))


def as_tests(weights: Tensor) -> Tensor:
    """The inverse of `weights_of`; 0 where neither the test nor any that comes later can be the first."""
    return (weights / weights.cumsum(0)).nan_to_num_(0.0)


def carried(ratios: Tensor) -> Tensor:
    """c_0 = 1, c_i = min(1, c_{i-1} r_i), `[k + 1]`, of the ratios r_i `[k]`.

    For [2, 0.5, 0.5, 4, 1]: [1, 1, 0.5, 0.25, 1, 1]. S_i being the product of the first i ratios, c_i is S_i divided by
    the largest S_j with j <= i, which needs no loop.
    """
    sums = torch.cat((ratios.new_zeros(1), ratios.log().cumsum(0)))
    return (sums - sums.cummax(0).values).exp()
