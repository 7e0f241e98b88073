"""Drawing, and the verification of trees, as functions of tensors that never wait for the device, for CUDA graphs.

All functions take several sequences (`texts`). Each has n nodes, ordered by level, with an equal number in each level,
one in chains. Of a chain only the first `count` nodes, up to the stop of the rule, are candidates; the others are
ignored. The tests of chains are in `trees.verification.outcomes`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.caches.masks import span
from hf_specdecpp.sampling.randomness import exponential
from hf_specdecpp.trees.verification import Verification, acceptance_of, or_p, sibling_tests


def rows_at(each: Tensor, places: Tensor) -> Tensor:
    """`[texts, m, size]`: the rows of `each` `[texts, n, size]` at the indices `places` `[texts, m]`."""
    return each.gather(1, places[..., None].expand(-1, -1, each.shape[-1]))


def draw_next(weights: Tensor, last: Tensor) -> Tensor:
    """Draw the tokens `[texts]` that follow the last accepted nodes `last` `[texts]`, in proportion to their rows of
    `weights` `[texts, nodes + 1, vocab]`; -1 if these are NaN or all 0."""
    of_last = rows_at(weights, last[:, None])[:, 0]
    first = (of_last / exponential(*of_last.shape, device=of_last.device)).max(-1)
    return torch.where(first.values > 0.0, first.indices, -1)


def num_drawn(weights: Tensor, greedy: bool) -> Tensor:
    """Number `[texts]` of candidates before the first that could not be drawn, because q is NaN or no token is allowed.
    `weights`: `[texts, k]`, for each candidate its own weight, the largest of all tokens; its score if `greedy`."""
    return (weights > (float("-inf") if greedy else 0.0)).cumprod(-1).sum(-1)


def count_until(fires: Tensor) -> Tensor:
    """Number `[...]` of candidates up to the first true position of `fires` `[..., k]`, included; k if there is none.

    Example: 2 for [0, 1, 0, 1], and 2 for [0, 0]."""
    return ((fires.cumsum(-1) == 0).sum(-1) + 1).clamp_max(fires.shape[-1])


# Trees ---------------------------------------------------------------------------------------------------------------


def remaining(q: Tensor, tokens: Tensor) -> Tensor:
    """`[..., c, vocab]`, the distributions that c siblings were drawn from: q `[..., vocab]` without earlier siblings,
    normalised. `tokens`: `[..., c]`, the siblings in the order of drawing."""
    rows = [q]
    for place in range(tokens.shape[-1] - 1):
        q = q.scatter(-1, tokens[..., place : place + 1], 0.0)
        q = q / q.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)
        rows.append(q)
    return torch.stack(rows, dim=-2)


def slot_values(values: Tensor, chances: Tensor) -> Tensor:
    """Values `[texts, m, c]` of the slots for c children below each of m nodes: the probability that verification
    reaches the slot, which is the node's value times the probability that all earlier siblings are rejected.

    Example: for nodes of values 0.9 and 0.1, whose first children have the chances 0.8 and 0.3, the slots below the
    first node have the values 0.9 and 0.18, those below the second 0.1 and 0.07.

    Args:
        values: `[texts, m]`, estimated survival of the nodes.
        chances: `[texts, m, c]`, acceptance of each child if all earlier siblings are rejected.
    """
    return values[..., None] * functional.pad((1.0 - chances[..., :-1]).cumprod(-1), (1, 0), value=1.0)


def best_slots(values: Tensor, chances: Tensor, width: int, greedy: bool = False) -> Tensor:
    """The `width` slots of highest value below the m nodes of a level, `[texts, width]`: slot j of node i has index
    i * c + j. `values` and `chances` are those of `slot_values`.

    The value of a slot does not depend on the slot's own token, and slots whose values do depend on this token have no
    larger values. So the choice of a slot does not depend on its token (invariant of DySpec, section 4.1). If `greedy`,
    nothing is drawn, and a slot's value is multiplied by the acceptance of its own token.

    Example: with the slots of the example of `slot_values` and width 3, returns 0, 1 and 2."""
    slots = slot_values(values, chances)
    if greedy:  # siblings are chosen in order
        slots = (slots * chances).cummin(-1).values
    return slots.flatten(1).sort(descending=True, stable=True).indices[:, :width]


def last_on_path(passing: Tensor, ancestors: Tensor) -> Tensor:
    """The deepest node `[texts]` that passes with all its ancestors, 0 being the root. `passing`: `[texts, n]` bool, at
    most one child of each node; `ancestors`: `[texts, n + 1, n + 1]` bool, those of each node and itself."""
    fails = functional.pad(~passing, (1, 0), value=False)
    on_path = ~(ancestors & fails[:, None]).any(-1)
    return (on_path * span(on_path.shape[1], passing.device)).amax(-1)


def tree_tests(
    tokens: Tensor, parents: Tensor, p: Tensor, q: Tensor, width: int, verification: Verification
) -> tuple[Tensor, Tensor]:
    """The tests that verify a sampled tree: probabilities that nodes pass, and weights of the next token.

    With `verification="block"` the tests of a level depend on the level above; with `"token"` the children of all nodes
    are tested together.

    Args:
        tokens, parents: `[texts, n]`, `width` nodes in each level, siblings in the order of drawing; in `parents` the
            root is number 0, the first node 1.
        p: `[texts, n + 1, vocab]`, the target's probabilities after the root and after each node.
        q: `[texts, m, vocab]`, distributions of the first child of the root and of each node above the last level;
            further rows are ignored. A node of q = 0 is never accepted.

    Returns:
        Tests: for `"token"` `[texts, n]`, the probability that a node is accepted if its parent is and its earlier
        siblings are not; for `"block"` `[texts, n + 1]`, that the root or a node is the last accepted one if no node
        below it is. And weights `[texts, n + 1, vocab]` of the next token if the root or a node is the last one.
    """
    texts, nodes = tokens.shape
    inner = nodes + 1 - width
    q, slots = q[:, :inner].nan_to_num(0.0), parents * width + sibling_ranks(parents)  # `width` slots for each parent
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
    """Number of earlier siblings of each node, `[texts, n]`: [0, 1, 0, 2] for the parents [0, 0, 1, 0]."""
    return (parents[:, :, None] == parents[:, None]).tril(-1).sum(-1)


def pass_first(parents: Tensor, chances: Tensor, uniform: Tensor) -> Tensor:
    """For `verification="token"`: whether each node `[texts, n]` is the first of its siblings that passes, and so
    accepted if its parent is. `chances`: the tests of `tree_tests`; `uniform`: random numbers `[texts, n]`."""
    passes = uniform < chances
    are_siblings = parents[:, :, None] == parents[:, None]
    earlier = torch.ones_like(are_siblings).tril(-1)
    return passes & ~(are_siblings & earlier & passes[:, None]).any(-1)


def accepted_node(parents: Tensor, ancestors: Tensor, tests: Tensor, uniform: Tensor, width: int) -> Tensor:
    """The last accepted node `[texts]` of a sampled tree, by the `tests` of `tree_tests` and `uniform` random numbers
    of that shape. `ancestors`: as in `last_on_path`; `width`: nodes of a level. For `"block"` it is the first passing
    node in an order in which each node follows all nodes below it and its earlier siblings. The root passes."""
    nodes = parents.shape[1]
    if tests.shape[1] == nodes:
        return last_on_path(pass_first(parents, tests, uniform), ancestors)
    heights = (nodes - 1 - span(nodes, parents.device)) // width
    # The order has the digits rank - width along a path, and then 0, larger than the digits of nodes below.
    digits = (sibling_ranks(parents) - width) * (width + 1) ** heights
    order = (ancestors[:, :, 1:] * digits[:, None]).sum(-1)
    return torch.where(uniform < tests, order, 1).argmin(-1)


# Chains --------------------------------------------------------------------------------------------------------------


def last_passing(tests: Tensor, chances: Tensor) -> Tensor:
    """Index `[...]` of the last of n tests that passes, 0 if none. `chances`: uniform random numbers, one per test."""
    return (chances < tests).cumsum(-1).argmax(-1)  # the running sum first reaches its maximum there
