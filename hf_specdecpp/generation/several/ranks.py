"""A target that is spread over several processes (tensor parallelism): its first rank decides, and the others follow.

All ranks make the target's passes together, so all must feed the same tokens. The draft is small and runs on the first
rank alone; what it proposed, and what of it stands, is told to the others, twice a round some numbers. They neither
draft nor draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.decoding import Drafts, RoundTarget
from hf_specdecpp.generation.text import Text
from hf_specdecpp.models.causal_lm import CausalLM, num_processes
from hf_specdecpp.models.checks import WITHOUT
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.trees.tree import Chain, DraftTree

FAILED = -1


def check_ranks(target: CausalLM, speculation: SpeculationConfig, processing: Processing, rows: int) -> None:
    """Raise `ValueError` for what a target that is spread over processes cannot be given. Before any work."""
    reason = None
    if rows > 1:
        reason = "batches are for targets in one process"
    elif speculation.draws_trees:
        reason = "trees are for targets in one process: set tree=False"
    elif processing.in_order:
        reason = "a logits processor that must be called in order would be called on one rank only"
    if reason is not None:
        raise ValueError(
            f"{type(target).__name__} is spread over {num_processes(target)} processes (tensor parallelism), and "
            f"{reason}. {WITHOUT}, if that cannot be changed."
        )


class Ranks:
    """The processes of a target; messages between them have at most `most` numbers."""

    def __init__(self, target: CausalLM, most: int) -> None:
        mesh: Any = next(each.device_mesh for each in target.parameters() if isinstance(each, DTensor))
        self.group = (mesh if mesh.ndim == 1 else mesh["tp"]).get_group()
        self.is_first = dist.get_rank(self.group) == 0
        self.device, self.size = target.device, most + 1
        self.told: tuple[int, bool] = (0, False)  # of the round: tokens that stay, and whether they end the text

    def tell(self, numbers: list[int]) -> None:
        """To all other ranks, which have to `listen`."""
        padding = [0] * (self.size - 1 - len(numbers))
        self._broadcast(torch.tensor([len(numbers), *numbers, *padding], device=self.device))

    def listen(self) -> list[int]:
        """What the first rank tells; `RuntimeError` if it has failed, or is gone."""
        count, *numbers = self._broadcast(torch.empty(self.size, dtype=torch.long, device=self.device)).tolist()
        if count == FAILED:
            raise RuntimeError("The first rank of the target has failed, so this one cannot go on; see its error.")
        return numbers[:count]

    @contextmanager
    def telling_of_failure(self) -> Iterator[None]:
        """What the first rank does alone, while the others wait for what comes of it."""
        try:
            yield
        except Exception:
            self._broadcast(torch.full((self.size,), FAILED, device=self.device))
            raise

    def share(self, state: Tensor) -> Tensor:
        """The first rank's tensor, of the same size on all."""
        return self._broadcast(state.to(self.device)).to(state.device)

    def _broadcast(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor


class RankText(Text):
    """A text on one of the ranks: the first decides what stands and where the text ends, the others do as it says.

    Example: the first rank drafts 7 8 9 and tells them. All read the text with 7 8 9. The first finds that 7 and 8
    stand and that 5 follows, and tells that the text goes on with these three tokens. All take 9 out of the cache.
    """

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ranks = ranks

    # All ranks process the scores of a round, and the first alone decides: before that none knows the way down.
    _verify_on_the_way = Text._verify_chain

    def _accept_chain(self, tree: DraftTree, scores: Tensor) -> tuple[list[int], int]:
        if self.ranks.is_first:
            with self.ranks.telling_of_failure():
                return super()._accept_chain(tree, scores)
        finished, kept, *emitted = self.ranks.listen()
        self.ranks.told = kept, bool(finished)
        return list(range(1, len(emitted))), emitted[-1]

    def first_stop(self, ids: Tensor, emitted: list[int], scores: Tensor, raw: Tensor) -> tuple[int, bool]:
        if self.ranks.is_first:
            with self.ranks.telling_of_failure():
                kept, finished = super().first_stop(ids, emitted, scores, raw)
            self.ranks.tell([int(finished), kept, *emitted])
            return kept, finished
        kept, finished = self.ranks.told
        self.records.add_scores(scores, raw, kept)
        return kept, finished

    def end(self) -> None:
        super().end()
        if self.generator.randomness is not None:
            # Plain sampling, of which each rank draws the same by itself, goes on from one state.
            torch.set_rng_state(self.ranks.share(torch.get_rng_state()))
            if self.ids.device.type == "cuda":
                state = self.ranks.share(torch.cuda.get_rng_state(self.ids.device))
                torch.cuda.set_rng_state(state.cpu(), self.ids.device)


class DraftOfRanks(Drafts):
    """Drafting on the first rank, which tells the others what it proposes."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def propose(self, texts: Sequence[Text], target: RoundTarget) -> list[DraftTree]:
        if self.ranks.is_first:
            with self.ranks.telling_of_failure():
                (tree,) = super().propose(texts, target)
            self.ranks.tell(tree.candidates)
            return [tree]
        tokens = self.ranks.listen()
        # Whose q nobody asks for here.
        return [Chain(tokens, [torch.empty(0)] * len(tokens))]
