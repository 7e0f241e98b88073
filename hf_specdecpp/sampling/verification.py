"""Which candidates does the target accept, and what does it say instead? Pure functions of p, q and randomness.

p is the target's distribution, q the one that a candidate was really drawn from, both after all logits processors.
Chains are explained in `docs/verification.md`, trees in `docs/dyspec.md`. The readable versions run on a CPU. Those for
devices from which each read is slow are `verify_at_once` and what follows it: all tests first, then one read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness, waits_for_reads, widest

Verification = Literal["block", "token"]


def verify_greedy(candidates: list[int], scores: Tensor) -> tuple[int, int]:
    """Accept candidates while they are the target's likeliest tokens.

    Args:
        candidates: k tokens.
        scores: `[k + 1, vocab]`, the target's processed logits at each candidate and after the last.

    Returns:
        Number of accepted candidates, and the token that follows them.
    """
    choices = likeliest_tokens(scores)
    accepted = 0
    while accepted < len(candidates) and candidates[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def verify_chain(candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness) -> tuple[int, int]:
    """Speculative sampling, token by token (arXiv 2211.17192, Algorithm 1): the output is distributed exactly as p.

    Args:
        candidates: k tokens, the i-th drawn from `q[i]`; ids, or a tensor of them.
        p: `[k + 1, vocab]` probabilities of the target.
        q: `[k, vocab]` probabilities of the draft.

    Returns:
        Number of accepted candidates, and the token that follows them: from the residual after a rejection, from p
        (the bonus) when all were accepted.
    """
    ratios = chain_ratios(candidates, p, q).tolist()
    accepted = 0
    while accepted < len(candidates) and randomness.bernoulli(min(1.0, ratios[accepted])):
        accepted += 1
    emits = p[accepted] if accepted == len(candidates) else residual(p[accepted], q[accepted])
    return accepted, int(randomness.categorical(emits))


def verify_block(candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness) -> tuple[int, int]:
    """Block verification (arXiv 2403.10444): accepts more than `verify_chain`, and what is emitted is as exactly p.

    With r_i = p(y_i) / q(y_i), let c_0 = 1 and c_i = min(1, c_{i-1} r_i). The longest i is accepted that passes its
    test: all k candidates with chance c_k, and i < k of them with chance h_i = s_i / (s_i + 1 - c_i), where s_i is the
    sum of (c_i p - q)+ after i candidates. The token after them is drawn from norm((c_i p - q)+), or from p after k.

    For k = 1, p = [0.5, 0.5], q = [0.75, 0.25] and the candidate 0, c_1 is 2/3; i = 0 is left with [0, 0.25]. With one
    candidate this is `verify_chain`. `docs/verification.md` has an example with two.

    Arguments and results are those of `verify_chain`. A rule may stop drafting because of what it drafted: what keeps p
    there is that the last test is c_k, and not h_k.
    """
    carried = [1.0]
    for ratio in chain_ratios(candidates, p, q).tolist():
        carried.append(min(1.0, carried[-1] * ratio))
    accepted = len(candidates)
    if randomness.bernoulli(carried[accepted]):
        return accepted, int(randomness.categorical(p[accepted]))
    while True:
        accepted -= 1
        c = carried[accepted]
        if not randomness.bernoulli(c):  # s_i <= c_i, so h_i <= c_i: most tests that fail need no sum
            continue
        left = (c * p[accepted]).sub_(q[accepted]).clamp_min_(0.0)
        mass = float(left.sum())  # nan where p or q is, so that no further candidate counts
        if c == 1.0 or math.isnan(mass) or randomness.bernoulli(mass / (mass + 1.0 - c) / c):  # i = 0 always passes
            return accepted, int(randomness.categorical(left if mass > 0.0 else p[accepted]))


def chain_ratios(candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p(y_i) / q(y_i) of each candidate, `[..., k]` in the widest dtype; 0 where p or q is nan, so that no candidate is
    accepted there. `p` may have rows after them."""
    columns = torch.as_tensor(candidates, dtype=torch.int64, device=p.device)[..., None]
    p_of, q_of = (probs[..., : columns.shape[-2], :].gather(-1, columns)[..., 0] for probs in (p, q))
    return (p_of / q_of.to(widest(q.device))).nan_to_num_(0.0)


def likeliest_tokens(scores: Tensor) -> list[int]:
    """`scores.argmax(-1)` of `[n, vocab]`, which on a CPU numpy finds ten times faster than torch: 5 us a token."""
    if scores.device.type == "cpu":
        return scores.numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def acceptance(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(y) / q(y)): the chance that the verifier accepts y, `token` (SpecDec++, section 3.2), `[...]`; 0 where p
    or q is nan."""
    p_of, q_of = (probs.gather(-1, token[..., None])[..., 0] for probs in (p, q))
    return (p_of / q_of).clamp_max(1.0).nan_to_num(0.0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+), `[..., vocab]`: the distribution of the token that is emitted after a rejection.

    For p = [0.5, 0.3, 0.2] and q = [0.2, 0.6, 0.2] this is [1, 0, 0].

    In floating point a candidate can be rejected although p and q are equal to rounding, so that nothing is left: then
    p itself, which is the limit.
    """
    left = (p - q).clamp_min(0.0)
    mass = left.sum(-1, keepdim=True)
    return torch.where(mass > 0.0, left / mass, p)


def sibling_tests(p: Tensor, drawn_from: Iterable[Tensor], tokens: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """The verifier's tests of siblings, one after another (DySpec, Algorithm 3, in the paper's notation).

    R is what is left of p after the rejections so far. Sibling y, drawn from D, is accepted with chance
    min(1, R(y) / D(y)); its rejection leaves R <- norm((R - D)+). If all are rejected, the token is drawn from R.

    For p = [0.5, 0.3, 0.2] and the siblings 1 and 0 from [0.2, 0.6, 0.2] and [0.5, 0, 0.5]: (0.5, p), then
    (1, [1, 0, 0]), then (0, [1, 0, 0] - [0.5, 0, 0.5] normalised, which is [1, 0, 0]).

    Args:
        p: `[..., vocab]`, the target's distribution at the siblings' place.
        drawn_from: D of each sibling, `[..., vocab]`.
        tokens: `[...]`, the siblings.

    Yields:
        For each sibling the chance `[...]` and the R `[..., vocab]` of its test; at last 0 and the R that all leave.
    """
    left = p
    for each, token in zip(drawn_from, tokens, strict=True):
        yield acceptance(left, each, token), left
        left = residual(left, each)
    yield torch.zeros_like(p[..., 0]), left


def remaining(q: Tensor, tokens: Iterable[Tensor]) -> Iterator[Tensor]:
    """D of each sibling: `q` `[vocab]` without the siblings before it (`tokens`, 0-d), renormalised.

    For q = [0.6, 0.3, 0.1] and the siblings 0 and 1: [0.6, 0.3, 0.1] and [0, 0.75, 0.25].
    """
    for token in tokens:
        yield q
        q = q.index_fill(-1, token, 0.0)
        q = q / q.sum()


def verify_sampled(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """`verify_block` or `verify_chain`, or where p lies on a device their counterpart: arguments and results alike."""
    if waits_for_reads(p.device):
        return verify_at_once(candidates, p, q, randomness, verification)
    return (verify_block if verification == "block" else verify_chain)(candidates, p, q, randomness)


def verify_at_once(
    candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor, randomness: Randomness, verification: Verification
) -> tuple[int, int]:
    """The same distribution of results as `verify_block` or `verify_chain`, of the same arguments: all tests of the
    number of accepted candidates are made, and the longest that passes counts; then the token after them is drawn."""
    ratios = chain_ratios(candidates, p, q)
    is_block = verification == "block"
    carries = carried(ratios) if is_block else ratios.new_ones(len(candidates) + 1)
    left = leftovers(carries, p, q)
    tests = block_tests(carries, left) if is_block else as_tests(token_weights(ratios))

    # In floating point a candidate can be rejected although p and q are equal to rounding: nothing is left, so then p.
    return randomness.outcome(tests, partial(left.index_select, 0), partial(p.index_select, 0))


def leftovers(carries: Tensor, p: Tensor, q: Tensor) -> Tensor:
    """(c_i p - q)+, by c_i `[..., n]` and p `[..., n, vocab]`; c_i p in rows for which q `[..., k, vocab]` has none."""
    left = p * carries[..., None].to(p.dtype)
    left[..., : q.shape[-2], :].sub_(q)
    return left.clamp_min_(0.0)


def block_tests(carries: Tensor, left: Tensor) -> Tensor:
    """h_i = s_i / (s_i + 1 - c_i), `[..., n]`, by c_i `[..., n]` and the `leftovers`, whose sums are s_i.

    After the last candidate s_i is c_i, and so is h_i. Where c_i is 1 and nothing is left, the candidate after it is
    always accepted, and h_i, which is 0 here, does not matter. Where p or q is nan, no further candidate counts: s_i is
    c_i as after the last.
    """
    sums = left.sum(-1, dtype=carries.dtype)
    sums = torch.where(sums.isnan(), carries, sums)
    return sums / (1.0 - carries).add_(sums).clamp_min_(torch.finfo(sums.dtype).tiny)


def token_weights(ratios: Tensor) -> Tensor:
    """The chance that `verify_chain` accepts i candidates, `[..., k + 1]`, by their p / q `[..., k]`.

    For [0.5, 2]: [0.5, 0, 0.5].
    """
    accepts, one = ratios.clamp_max(1.0), ratios.new_ones((*ratios.shape[:-1], 1))
    return torch.cat((one, accepts.cumprod(-1)), dim=-1) * torch.cat((1.0 - accepts, one), dim=-1)


def weights_of(tests: Tensor) -> Tensor:
    """The chance that each of the `tests` `[n]` is the first that passes, of those from the last to the first.

    For [1, 0.5, 0.25]: [0.375, 0.375, 0.25].
    """
    failed = (1.0 - tests).flip(0).cumprod(0)[:-1].flip(0)
    return tests * torch.cat((failed, tests.new_ones(1)))


def as_tests(weights: Tensor) -> Tensor:
    """The inverse of `weights_of`; 0 where neither the test nor any that comes later can be the first."""
    return (weights / weights.cumsum(-1)).nan_to_num_(0.0)


def carried(ratios: Tensor) -> Tensor:
    """c_0 = 1, c_i = min(1, c_{i-1} r_i), `[..., k + 1]`, of the ratios r_i `[..., k]`.

    For [2, 0.5, 0.5, 4, 1]: [1, 1, 0.5, 0.25, 1, 1]. S_i being the product of the first i ratios, c_i is S_i divided by
    the largest S_j with j <= i, which needs no loop.
    """
    sums = torch.nn.functional.pad(ratios.log().cumsum(-1), (1, 0))
    return (sums - sums.cummax(-1).values).exp()
