"""A token tree that is drafted with captured passes over its levels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hf_specdecpp.caches.static import width_of
from hf_specdecpp.captured.rooms import RoomCache
from hf_specdecpp.drafting.captured import CapturedSession, hidden_states
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.models.causal_lm import upload
from hf_specdecpp.trees.attention import inputs_in_place
from hf_specdecpp.trees.tree import DraftTree, Lineage

LEAST_WIDTH, LEAST_NODES = 4, 64  # of the passes; that the masks of all passes have room for


def read_level(
    drafter: DraftModel,
    cache: RoomCache,
    tokens: Tensor,
    states: Tensor | None,
    ancestors: Tensor,
    depths: Tensor,
    counts: Tensor,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Read nodes of a tree, `tokens` `[1, w]`; dummies after them are not kept.

    Args:
        cache: holds a text, then the nodes that were read before.
        states: `[1, w, size]` before each node, for a draft that reads them.
        ancestors: bool `[w, n]`: which of up to n nodes each sees.
        depths: `[n + w]`, of all nodes, then of these.
        counts: `[2]`: how many nodes were read before, and how many of `tokens` are nodes.

    Returns:
        Logits `[w, vocab_size]` and hidden states `[w, hidden_size]`.
    """
    room = ancestors.shape[1]
    num_prefix = cache.length - counts[0]
    inputs = inputs_in_place(drafter.model, cache.room, ancestors, depths[:room], depths[room:], num_prefix)
    hidden = hidden_states(drafter, cache, tokens, states, inputs)
    cache.length.add_(counts[1])
    return drafter.logits(hidden, vocab_size), hidden


class CapturedTreeSession(CapturedSession):
    """The draft's side of one generation of trees, with captured passes.

    The root is read with all that is pending, as in chains, and each level in a pass of its own, filled up with dummies
    to 4, 8, 16 or another power of two of nodes. After the round all nodes but the root are forgotten: those that were
    accepted are read again with the next root, in a pass that is made anyway.
    """

    @property
    def reads_again(self) -> bool:
        return True

    def _expand(
        self, lineage: Lineage, tree: DraftTree, nodes: list[int], states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        count = len(nodes)
        width = max(width_of(count), LEAST_WIDTH)
        tokens, ancestors, depths, counts = self._level(lineage, tree, nodes, width)
        cache = self.with_room(self._length + width)
        arguments = [tokens, states, ancestors, depths, counts]
        logits, hidden = self.steps.call(read_level, width, cache, arguments, self.vocab_size)
        self._length += count
        return logits[:count], hidden[:count]

    def _level(self, lineage: Lineage, tree: DraftTree, nodes: list[int], width: int) -> list[Tensor]:
        """What a pass over nodes is told beside the draft's states (`read_level`), with one upload."""
        before, count = len(lineage.nodes), len(nodes)
        ancestors, depths = lineage.feed(tree, nodes)
        room = max(width_of(len(depths)), LEAST_NODES)
        tokens = torch.tensor([[tree.tokens[node] for node in nodes] + [0] * (width - count)])
        seen = F.pad(ancestors, (0, room - len(depths), 0, width - count))
        seen[count:, 0] = True  # dummies see the root, so that none of them sees nothing
        places = F.pad(depths, (0, room - len(depths))), F.pad(depths[before:], (0, width - count))
        parts = upload([tokens, seen, torch.cat(places), torch.tensor([before, count])], self.device)
        return [parts[0] if self.knows_all else self.drafter.known(parts[0]), *parts[1:]]

    def keep(self, path: list[int]) -> None:  # noqa: ARG002 - all are read again
        if self._lineage is None:  # nothing was drafted
            return
        self._forget(len(self._lineage.nodes) - 1)
        self._lineage = None
