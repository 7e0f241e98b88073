"""Verification of a sampled chain without waiting for the device in between: all tests first, then one read.

The readable versions are in `verification.py`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness, waits_for_reads
from hf_specdecpp.sampling.verification import Verification, chain_ratios, residual, verify_block, verify_chain


def verify_sampled(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """`verify_block` or `verify_chain`, or their counterpart here where p lies on a device."""
    if waits_for_reads(p.device):
        return verify_at_once(candidates, p, q, randomness, verification)
    verify = verify_block if verification == "block" else verify_chain
    return verify(candidates, p, q, randomness)


def verify_at_once(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """The same distribution of results as `verify_block` or `verify_chain`: the number of accepted candidates is drawn
    by the chance of each, then the token after them.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[k, vocab]` probabilities of the draft.
    """
    ratios = chain_ratios(candidates, p, q)
    carries = carried(ratios) if verification == "block" else ratios.new_ones(len(candidates) + 1)
    weights = block_weights(carries, p, q) if verification == "block" else token_weights(ratios)

    def follows(accepted: Tensor) -> Tensor:
        scaled = p.index_select(0, accepted) * carries.index_select(0, accepted)[:, None].to(p.dtype)
        if len(candidates) == 0:
            return scaled
        is_rejected = accepted < len(candidates)
        return residual(scaled, q.index_select(0, accepted.clamp_max(len(candidates) - 1)) * is_rejected[:, None])

    return randomness.outcome(weights, follows, p.shape[-1])


def token_weights(ratios: Tensor) -> Tensor:
    """The chance that `verify_chain` accepts i candidates, `[k + 1]`, by their p / q `[k]`.

    For [0.5, 2]: [0.5, 0, 0.5].
    """
    accepts, one = ratios.clamp_max(1.0), ratios.new_ones(1)
    return torch.cat((one, accepts.cumprod(0))) * torch.cat((1.0 - accepts, one))


def block_weights(carries: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """The chance that `verify_block` accepts i candidates, `[k + 1]`, by its c_i `[k + 1]`.

    Of the longest first: h_k, (1 - h_k) h_{k-1}, (1 - h_k) (1 - h_{k-1}) h_{k-2}, ...
    """
    passes = torch.cat((block_tests(carries[:-1], p[:-1], q), carries[-1:])).flip(0)
    failed = (1.0 - passes).cumprod(0)
    return (passes * torch.cat((passes.new_ones(1), failed[:-1]))).flip(0)


def block_tests(carries: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """h_i of all but the last i, `[k]`, by c_i `[k]`, p and q `[k, vocab]`."""
    left = (p * carries[:, None].to(p.dtype)).sub_(q).clamp_min_(0.0).sum(-1).double()
    return torch.where(carries < 1.0, left / (left + 1.0 - carries), 1.0)


def carried(ratios: Tensor) -> Tensor:
    """c_0 = 1, c_i = min(1, c_{i-1} r_i), `[k + 1]`, of the ratios r_i `[k]`.

    For [2, 0.5, 0.5, 4, 1]: [1, 1, 0.5, 0.25, 1, 1]. S_i being the product of the first i ratios, c_i is S_i divided by
    the largest S_j with j <= i, which needs no loop.
    """
    sums = torch.cat((ratios.new_zeros(1), ratios.log().cumsum(0)))
    return (sums - sums.cummax(0).values).exp()
