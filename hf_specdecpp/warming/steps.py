"""Compiles the steps of a draft before the first text (`warm_up`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_specdecpp.caches.fixed import LEAST_ROOM, room_for
from hf_specdecpp.caches.static import width_of
from hf_specdecpp.drafting.compiled import SEVERAL, CompiledSession
from hf_specdecpp.drafting.compiled_trees import LEAST_NODES, LEAST_WIDTH, CompiledTreeSession
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.throughput.own_passes import ROUNDS
from hf_specdecpp.trees.tree import DraftTree


@torch.inference_mode()
def warm_up(
    drafter: Drafter, tokens: Tensor, states: Tensor | None, max_length: int, most_in_tree: int, vocab_size: int
) -> None:
    """Take each kind of step that texts may ask of a draft whose steps are compiled, in a cache of each size.

    Args:
        tokens: `[1, n]`, the beginning of a text, at most `SEVERAL`.
        states: of the target before the last of them, `[1, m, size]`, for a draft that reads them.
        max_length (tokens): of the longest text.
        most_in_tree: candidates of the largest tree, 0 where chains are drafted.
    """
    further = max(SEVERAL, most_in_tree and 2 * width_of(most_in_tree + 1))
    room, largest = LEAST_ROOM, room_for(max_length + further)
    while room <= largest and drafter.is_compiled:
        kind = CompiledTreeSession if most_in_tree else CompiledSession
        session = kind(drafter, vocab_size, drafter.steps)
        session.with_room(room)
        session.begin_round(tokens, 0, states)
        session.step([])  # a cache that is new is first read uncompiled
        for count in [2, 1] * ROUNDS:
            session.begin_round(tokens[:, -count:], 0, None if states is None else states[:, -count:])
            if isinstance(session, CompiledTreeSession):
                _grow(session, int(tokens[0, -1]), most_in_tree)
            else:
                _chain(session, tokens)
        room *= 2


def _chain(session: CompiledSession, tokens: Tensor) -> None:
    """A round of two candidates, which are drawn in inference mode."""
    candidate = tokens[0, -1].clone()
    for count in range(3):
        session.step([candidate] * count)


def _grow(session: CompiledTreeSession, token: int, most: int) -> None:
    """Levels of each width that a tree may have, among as many nodes as it may have.

    Example: of a tree of 100 nodes levels of 4, 8, 16 and 32 are read, and of 4, 8, 16 and 32 after one of 64.
    """
    nodes = LEAST_NODES
    first: list[int] = []
    while True:
        tree, width = DraftTree(token), LEAST_WIDTH
        session.expand(tree, [0])
        for each in first:
            _read(session, tree, each)
        while width < nodes // (1 + len(first)) and width < 2 * most:
            _read(session, tree, width)
            width *= 2
        session.keep([])
        if nodes > most:
            return
        nodes, first = 2 * nodes, [nodes]


def _read(session: CompiledTreeSession, tree: DraftTree, width: int) -> None:
    """A level of so many nodes."""
    session.expand(tree, [tree.add(0, tree.tokens[0]) for _ in range(width)])
