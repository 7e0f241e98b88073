"""Shapes of static token trees: given (SpecInfer), or the best for measured acceptance rates (Sequoia)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Shape = dict[tuple[int, ...], int]  # number of children by node; a node is the ranks on the way to it, the root is ()
MOST_IN_A_LEVEL = 1024


def from_expansions(counts: Sequence[int]) -> Shape:
    """Return a shape in which every node of depth i has `counts[i]` children (SpecInfer, arXiv 2305.09781). `[1, 1, 1]`
    is a chain of three. `ValueError` if a number is not positive, or a level has more than 1024 nodes."""
    shape: Shape = {}
    level: list[tuple[int, ...]] = [()]
    for count in counts:
        if count < 1 or len(level) * count > MOST_IN_A_LEVEL:
            raise ValueError(
                f"tree={list(counts)} must hold whole numbers of at least 1, and no level more than "
                f"{MOST_IN_A_LEVEL} nodes: it says how many children every node of each depth gets."
            )
        shape |= dict.fromkeys(level, count)
        level = [(*node, rank) for node in level for rank in range(count)]
    return shape


def from_nodes(nodes: Sequence[Sequence[int]]) -> Shape:
    """Return the shape with these nodes, each named by the ranks on the way to it: `[0, 1]` is the second child of the
    root's first child. `ValueError` if a parent or an earlier sibling is missing."""
    listed = {tuple(node) for node in nodes}
    shape: Shape = {}
    for node in listed:
        *parent, rank = node
        if (parent and tuple(parent) not in listed) or (rank and (*parent, rank - 1) not in listed) or rank < 0:
            raise ValueError(
                f"tree lists node {list(node)} without its parent or the sibling before it. A node is named by "
                "the ranks of the siblings on the way to it: [0] is the root's first child, [0, 1] its second child."
            )
        shape[tuple(parent)] = max(shape.get(tuple(parent), 0), rank + 1)
    return shape


def size(shape: Shape) -> int:
    """Number of candidates of a tree of this shape."""
    return sum(shape.values())


def make_shape(description: Sequence[int] | Sequence[Sequence[int]]) -> Shape:
    """Make a shape from numbers of children by depth (`from_expansions`) or from a list of nodes (`from_nodes`)."""
    if all(isinstance(item, int) for item in description):
        return from_expansions(description)  # type: ignore[arg-type]
    return from_nodes(description)  # type: ignore[arg-type]


def best_shape(rates: Sequence[float], budget: int, max_depth: int) -> Shape:
    """Return the shape with the most expected accepted candidates (Sequoia, arXiv 2402.12374, section 3.1).

    Args:
        rates: probability that a node's first, second, ... child is the accepted one, as measured
            (`SpeculationStats.acceptance_by_rank`), assumed equal at every node.
        budget: the most candidates of the tree; `max_depth`: the most on a path.

    Let F_d(n) be the most expected accepted candidates from n candidates in d levels below an accepted node, and G_k(n)
    the part of the children from rank k on, with n candidates in total:
        G_k(n) = max(0, max_m rates[k] (1 + F_{d-1}(m - 1)) + G_{k+1}(n - m)),    F_d = G_0,    F_0 = 0.
    """
    below = np.zeros(budget + 1)
    choices: list[list[np.ndarray]] = []  # by level from the lowest up, by rank: the best m for every n
    for _ in range(max_depth):
        best, chosen = np.zeros(budget + 1), []
        for rate in reversed(rates):
            gain = rate * (1.0 + below)  # gain[m - 1] of m candidates at and below this child
            improved, counts = np.zeros(budget + 1), np.zeros(budget + 1, dtype=int)
            for n in range(1, budget + 1):
                totals = gain[:n] + best[n - 1 :: -1]
                m = int(totals.argmax())
                if totals[m] > improved[n]:
                    improved[n], counts[n] = totals[m], m + 1
            best = improved
            chosen.append(counts)
        below = best
        choices.append(chosen[::-1])
    shape: Shape = {}
    todo: list[tuple[tuple[int, ...], int]] = [((), budget)]
    while todo:
        node, n = todo.pop()
        if len(node) == max_depth:
            continue
        for rank, counts in enumerate(choices[max_depth - 1 - len(node)]):
            if (m := int(counts[n])) == 0:
                break
            shape[node] = rank + 1
            todo.append(((*node, rank), m - 1))
            n -= m
    return shape
