"""Drawing and verification as functions of tensors alone: nothing is read, so that a device can run them in one graph.

`verification.py` and `trees/` have the readable versions. All functions work on several texts at once. A text has n
nodes, level by level and as many at each level; a chain has one. Of a chain only the first `count` nodes are candidates
that were drafted before a stopping rule ended the draft: what stands in the others was drawn and is never looked at.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
    """An index of `weights` `[..., n]`, drawn by them: the first to fire, at the time E_i / w_i. `times`: `[..., n]`,
    the E_i, independent exponential numbers above 0."""
    return (weights / times).argmax(-1)


def follows(weights: Tensor, last: Tensor) -> Tensor:
    """A token `[texts]` after the nodes `last`, drawn by `weights` `[texts, nodes + 1, vocab]`; -1 where these are nan
    or all 0, so that there is none."""
    of_last = weights.gather(1, last[:, None, None].expand(-1, 1, weights.shape[-1]))[:, 0]
    first = (of_last / exponential(*of_last.shape, device=weights.device)).max(-1)
    return torch.where(first.values > 0.0, first.indices, -1)


def exponential(*shape: int, device: torch.device) -> Tensor:
    """Times for `race`."""
    times = torch.empty(shape, device=device).exponential_()
    return times.clamp_min_(torch.finfo(times.dtype).tiny)


def count_until(fires: Tensor) -> Tensor:
    """How many candidates a round has whose rule stops after the first place `[..., k]` that fires: from 1 to k.

    Example: [0, 1, 0, 1] stops after the second candidate, [0, 0] after the last.
    """
    return ((fires.cumsum(-1) == 0).sum(-1) + 1).clamp_max(fires.shape[-1])


# Trees ---------------------------------------------------------------------------------------------------------------


def remaining(q: Tensor, tokens: Tensor) -> Tensor:
    """What each of several siblings is drawn from, `[..., c, vocab]`: q `[..., vocab]` without those before it.
    `tokens`: `[..., c]`, in the order in which they were drawn."""
    rows = [q]
    for place in range(tokens.shape[-1] - 1):
        q = q.scatter(-1, tokens[..., place : place + 1], 0.0)
        q = q / q.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
        rows.append(q)
    return torch.stack(rows, dim=-2)


def slot_values(values: Tensor, chances: Tensor) -> Tensor:
    """The values `[texts, m, c]` of the slots below the nodes of a level: a node's, times the chance that the earlier
    siblings fail.

    Example: nodes of the values 0.9 and 0.1 with first children of 0.8 and 0.3. The slots are 0.9, 0.18, 0.1 and 0.07.

    Args:
        values: `[texts, m]`, the chance that a node stands, as far as is known.
        chances: `[texts, m, c]`, that each child stands if those drawn before it fail.
    """
    return values[..., None] * functional.pad((1.0 - chances[..., :-1]).cumprod(-1), (1, 0), value=1.0)


def best_slots(values: Tensor, chances: Tensor, width: int, greedy: bool = False) -> Tensor:
    """The most valuable slots below the nodes of a level, `[texts, width]`: slot j of node i is number i * c + j.

    The value of a slot is known before its own token is drawn, and no other slot's value that depends on this token is
    larger. So whether the slot is among the best does not depend on what is drawn there (invariant of DySpec, section
    4.1). For a greedy target nothing is drawn, and the chance of the slot's own token counts, too.

    Example: in that of `slot_values` two of the best three slots are below the first node.
    """
    slots = slot_values(values, chances)
    if greedy:  # a sibling is taken after those before it
        slots = (slots * chances).cummin(-1).values
    return slots.flatten(1).sort(descending=True, stable=True).indices[:, :width]


def stands_greedily(tokens: Tensor, parents: Tensor, drawn: Tensor, choices: Tensor) -> Tensor:
    """Which nodes `[texts, n]` are what the target would have chosen after their parents.

    Args:
        tokens, parents, drawn: `[texts, n]`; the root is number 0, the first node 1. Of those that are not `drawn`
            nothing is looked at.
        choices: `[texts, n + 1]`, the target's likeliest tokens after the root and after each node.
    """
    return (tokens == choices.gather(1, parents)) & drawn


def last_on_path(stands: Tensor, ancestors: Tensor) -> tuple[Tensor, Tensor]:
    """The deepest node all of whose ancestors stand `[texts]`, and which these are, `[texts, n + 1]` bool. At most one
    child of each node `stands`; `ancestors` `[texts, n + 1, n + 1]` have the root and each node itself."""
    fails = functional.pad(~stands, (1, 0), value=False)
    on_path = ~(ancestors & fails[:, None]).any(-1)
    return (on_path * torch.arange(on_path.shape[1], device=stands.device)).amax(-1), on_path


def tree_tests(
    tokens: Tensor, parents: Tensor, drawn: Tensor, p: Tensor, q: Tensor, width: int
) -> tuple[Tensor, Tensor]:
    """The chance that each node is accepted once its parent was and its earlier siblings were not, and what follows
    each node if no child of it is (DySpec, Algorithm 3: what is left of p after each rejected sibling).

    Args:
        tokens, parents, drawn: `[texts, n]`, as in `stands_greedily`, `width` nodes at each level. Siblings are in the
            order in which they were drawn.
        p: `[texts, n + 1, vocab]`, the target's probabilities after the root and after each node.
        q: `[texts, n, vocab]`, what each node was drawn from.

    Returns:
        `[texts, n]` and `[texts, n + 1, vocab]`.
    """
    left, chances, tiny = p, [], torch.finfo(p.dtype).tiny
    for rank in range(width):  # one node of each level: all have other parents
        of_level = slice(rank, None, width)
        above = parents[:, of_level, None].expand(-1, -1, p.shape[-1])
        here, is_drawn = left.gather(1, above), drawn[:, of_level]
        here = here / here.sum(-1, keepdim=True).clamp_min(tiny)
        p_of, q_of = (each.gather(-1, tokens[:, of_level, None])[..., 0] for each in (here, q[:, of_level]))
        chances.append(torch.where(is_drawn, p_of / q_of.clamp_min(tiny), 0.0).clamp_max(1.0))
        rest = (here - q[:, of_level]).clamp_min(0.0)
        # In floating point a node can be rejected although p and q are equal to rounding: nothing is left, so then p.
        goes_on = is_drawn[..., None] & (rest.sum(-1, keepdim=True) > 0.0)
        left = left.scatter(1, above, torch.where(goes_on, rest, here))
    return torch.stack(chances, dim=-1).flatten(1), left


def stands_sampled(parents: Tensor, chances: Tensor, uniform: Tensor) -> Tensor:
    """Which nodes `[texts, n]` are accepted if their parents are: the first of siblings that passes its test, whose
    `chances` are of `tree_tests` and `uniform` numbers `[texts, n]`."""
    passes = uniform < chances
    are_siblings = parents[:, :, None] == parents[:, None]
    earlier = torch.ones_like(are_siblings).tril(-1)
    return passes & ~(are_siblings & earlier & passes[:, None]).any(-1)


# Chains --------------------------------------------------------------------------------------------------------------


def outcomes(
    candidates: Tensor, count: Tensor, p: Tensor, q: Tensor, verification: Verification
) -> tuple[Tensor, Tensor]:
    """The tests of the number of accepted candidates, from the last to the first, and what follows each number.

    Args:
        candidates: `[..., k]`, the i-th drawn from `q[i]`.
        count: `[...]`, how many of them there are.
        p, q: `[..., k + 1, vocab]` and `[..., k, vocab]`, probabilities of the target and of the draft.

    Returns:
        `[..., k + 1]` chances that each test passes, where none passes the first counts; and `[..., k + 1, vocab]`
        weights of the token that follows.
    """
    drawn = torch.arange(candidates.shape[-1], device=q.device) < count[..., None]
    ratios = torch.where(drawn, chain_ratios(candidates, p, q), 0.0)
    # Without q nothing is left out of p after the last candidate: the token there is the bonus token.
    q = q * drawn[..., None]
    is_block = verification == "block"
    carries = carried(ratios) if is_block else torch.ones_like(functional.pad(ratios, (1, 0)))
    left = leftovers(carries, p, q)
    tests = block_tests(carries, left) if is_block else as_tests(token_weights(ratios))
    # In floating point a candidate can be rejected although p and q are equal to rounding: nothing is left, so then p.
    return tests, torch.where(left.sum(-1, keepdim=True) > 0.0, left, p)


def first_passing(tests: Tensor, chances: Tensor) -> Tensor:
    """The last of `tests` `[..., n]` that passes, `[...]`: 0 where none does. `chances`: `[..., n]`, uniform."""
    return (chances < tests).cumsum(-1).argmax(-1)  # the sum grows for the last time there
