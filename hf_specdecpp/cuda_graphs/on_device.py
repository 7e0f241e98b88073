"""Drawing, and the verification of trees, as functions of tensors alone: nothing is read, so that a device can run them
in one graph.

All functions work on several texts at once. A text has n nodes, level by level and as many at each level; a chain has
one. Of a chain only the first `count` nodes are candidates that were drafted before a stopping rule ended the draft:
what stands in the others was drawn and is never looked at. `verification.outcomes` has the tests of chains.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.trees.verification import Verification, acceptance_of, or_p, sibling_tests


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


def last_on_path(stands: Tensor, ancestors: Tensor) -> Tensor:
    """The deepest node all of whose ancestors stand `[texts]`. At most one child of each node `stands`; `ancestors`
    `[texts, n + 1, n + 1]` have the root and each node itself."""
    fails = functional.pad(~stands, (1, 0), value=False)
    on_path = ~(ancestors & fails[:, None]).any(-1)
    return (on_path * torch.arange(on_path.shape[1], device=stands.device)).amax(-1)


def tree_tests(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, width: int, verification: Verification
) -> tuple[Tensor, Tensor]:
    """The tests of nodes (`sibling_tests`), and what follows each node if it is the last one that is accepted.

    As a block the chance with which a node has to be accepted depends on its parent's, so levels are tested one after
    another; token by token all parents are tested together.

    Args:
        tokens, parents: `[texts, n]`, as in `stands_greedily`, `width` nodes at each level. Siblings are in the order
            in which they were drawn.
        p: `[texts, n + 1, vocab]`, the target's probabilities after the root and after each node.
        q: `[texts, m, vocab]`, what the first child was drawn from, of the root and of each node above the last level;
            further rows are not looked at. A node to which q gives 0 could not be drawn, and is not accepted.

    Returns:
        As a block `[texts, n + 1]`, the chance that the root and each node passes once all nodes below it have failed;
        token by token `[texts, n]`, the chance that each node is accepted once its parent was and its earlier siblings
        were not. And `[texts, n + 1, vocab]` weights.
    """
    texts, nodes = tokens.shape
    inner = nodes + 1 - width
    q, slots = q[:, :inner].nan_to_num(0.0), parents * width + sibling_ranks(parents)  # as many for each parent
    children = tokens.new_zeros((texts, inner * width)).scatter(1, slots, tokens).unflatten(1, (inner, width))
    exist = torch.zeros_like(children, dtype=torch.bool).flatten(1).scatter(1, slots, True).view_as(children)
    of_q = q.gather(-1, children)
    exist = exist & (of_q > 0.0)

    def test(above: slice, owed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        columns, ones = children[:, above].unbind(-1), exist[:, above].unbind(-1)
        *found, (own, rest) = sibling_tests(p[:, above], q[:, above], columns, owed, ones)
        masses, shares = (torch.stack(each, dim=-1) for each in zip(*found, strict=True))
        chances = torch.where(exist[:, above], acceptance_of(masses, shares, of_q[:, above]), 0.0)
        return chances.flatten(1), own, rest

    if verification == "token":
        chances, _, rest = test(slice(inner), p.new_ones((texts, inner)))
        tests, left = [chances.gather(1, slots)], [rest]
    else:
        tests, left, owed = [], [], p.new_ones((texts, 1))
        for level in range(0, nodes, width):
            above = slice(max(level - width + 1, 0), level + 1)
            chances, own, rest = test(above, owed)
            owed = chances.gather(1, slots[:, level : level + width] - above.start * width)
            tests, left = [*tests, own], [*left, rest]
        tests.append(owed)
    weights = torch.cat((*left, p[:, inner:]), dim=1)
    return torch.cat(tests, dim=1), or_p(weights, p)


def sibling_ranks(parents: Tensor) -> Tensor:
    """How many siblings before each node there are, `[texts, n]`. For [0, 0, 1, 0]: [0, 1, 0, 2]."""
    return (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)


def stands_sampled(parents: Tensor, chances: Tensor, uniform: Tensor) -> Tensor:
    """Token by token: which nodes `[texts, n]` are accepted if their parents are, the first of siblings that passes.
    `chances` are of `tree_tests`, `uniform` numbers `[texts, n]`."""
    passes = uniform < chances
    are_siblings = parents[:, :, None] == parents[:, None]
    earlier = torch.ones_like(are_siblings).tril(-1)
    return passes & ~(are_siblings & earlier & passes[:, None]).any(-1)


def accepted_node(parents: Tensor, ancestors: Tensor, tests: Tensor, uniform: Tensor, width: int) -> Tensor:
    """The last node that is accepted, `[texts]`, by what `tree_tests` returned and as many numbers `uniform`;
    `ancestors` as in `last_on_path`. As a block it is the first node that passes, if all nodes below another one are
    asked before it, and those below an earlier sibling before a later sibling; the root passes."""
    nodes = parents.shape[1]
    if tests.shape[1] == nodes:
        return last_on_path(stands_sampled(parents, tests, uniform), ancestors)
    heights = (nodes - 1 - torch.arange(nodes, device=parents.device)) // width
    # Ranks along a path are the digits of a number, and below a node there are the largest digits.
    digits = (sibling_ranks(parents) - width) * (width + 1) ** heights
    order = (ancestors[:, :, 1:] * digits[:, None]).sum(-1)
    return torch.where(uniform < tests, order, 1).argmin(-1)


# Chains --------------------------------------------------------------------------------------------------------------


def first_passing(tests: Tensor, chances: Tensor) -> Tensor:
    """The last of `tests` `[..., n]` that passes, `[...]`: 0 where none does. `chances`: `[..., n]`, uniform."""
    return (chances < tests).cumsum(-1).argmax(-1)  # the sum grows for the last time there
