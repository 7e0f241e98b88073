"""Which candidates does the target accept, and what does it say instead? Pure functions of p, q and randomness.

p is the target's distribution, q the one that a candidate was really drawn from, both after all logits processors.
Chains are explained in `docs/verification.md`, trees in `docs/dyspec.md`. Here are the readable versions, which run on
a CPU; `at_once.py` has those for devices from which each read is slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from hf_specdecpp.sampling.randomness import Randomness, widest

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


def follow(looked_up: Sequence[int], token: int, draw: Callable[[int], int]) -> tuple[int, int]:
    """Go on from what was verified along candidates that were looked up.

    Such a candidate is one token for certain, so it is accepted exactly if it is what is drawn from the target's
    distribution. Drawing token by token is what plain generation does.

    Example: 7 and 8 were looked up, and 7 is drawn. So is 9 after it: one is accepted, and 9 follows.

    Args:
        looked_up: candidates after all others, which stand.
        token: drawn after those.
        draw: gives a token after so many of `looked_up`. Asked in order.

    Returns:
        Number of accepted candidates, and the token that follows them.
    """
    accepted = 0
    while accepted < len(looked_up) and looked_up[accepted] == token:
        accepted += 1
        token = draw(accepted)
    return accepted, token


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
        mass = float(left.sum())
        if c == 1.0 or randomness.bernoulli(mass / (mass + 1.0 - c) / c):  # c_0 is 1: i = 0 always passes
            return accepted, int(randomness.categorical(left if mass > 0.0 else p[accepted]))


def chain_ratios(candidates: Sequence[int] | Tensor, p: Tensor, q: Tensor) -> Tensor:
    """p(y_i) / q(y_i) of each candidate, `[k]` in the widest dtype. `p` may have rows after them."""
    columns = torch.as_tensor(candidates, dtype=torch.int64, device=p.device)[:, None]
    p_of, q_of = (probs[: len(candidates)].gather(-1, columns)[:, 0] for probs in (p, q))
    return p_of / q_of.to(widest(q.device))


def likeliest_tokens(scores: Tensor) -> list[int]:
    """`scores.argmax(-1)` of `[n, vocab]`, which on a CPU numpy finds ten times faster than torch: 5 us a token."""
    if scores.device.type == "cpu":
        return scores.numpy().argmax(axis=-1).tolist()
    return scores.argmax(dim=-1).tolist()


def acceptance(p: Tensor, q: Tensor, token: Tensor) -> Tensor:
    """min(1, p(y) / q(y)): the chance that the verifier accepts the candidate y (SpecDec++, section 3.2).

    Args:
        p, q: `[..., vocab]`.
        token: `[...]`, drawn from q.

    Returns:
        `[...]`
    """
    p_of, q_of = (probs.gather(-1, token[..., None])[..., 0] for probs in (p, q))
    return (p_of / q_of).clamp_max(1.0)


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
