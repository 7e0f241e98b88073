"""Targets that are spread over several processes (tensor parallelism). Only the first rank drafts and verifies.

All ranks run the target's passes together, over equal tokens. The first rank sends two short messages per round to the
others: the candidates, and the emitted tokens."""

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
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.models.causal_lm import CausalLM, num_processes
from hf_specdecpp.models.checks import WITHOUT_ASSISTANT
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.trees.tree import Chain, DraftTree


def check_ranks(target: CausalLM, speculation: SpeculationConfig, processing: Processing, rows: int) -> None:
    """Called before the prompt's pass, if the target is spread over several processes: raises `ValueError` for several
    `rows` (a batch), for trees, and for logits processors that must be called in order."""
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
            f"{reason}. {WITHOUT_ASSISTANT}, if that cannot be changed."
        )


class Ranks:
    """This process's connection to the other processes (ranks) of a target that is spread over several: `shared` sends
    an object from the first rank to the others."""

    def __init__(self, target: CausalLM) -> None:
        mesh: Any = next(each.device_mesh for each in target.parameters() if isinstance(each, DTensor))
        self.group = (mesh if mesh.ndim == 1 else mesh["tp"]).get_group()
        self.is_first, self.device = dist.get_rank(self.group) == 0, target.device
        self.outcome: tuple[int, bool] = (0, False)  # on other ranks: what `first_stop` returns

    def shared(self, message: Any = None) -> Any:
        """Called on all ranks: returns the first rank's `message`; `RuntimeError` if the first rank has failed."""
        messages = [message]
        dist.broadcast_object_list(messages, group=self.group, group_src=0, device=self.device)
        if messages[0] is None:
            raise RuntimeError("The first rank of the target has failed, so this one cannot go on; see its error.")
        return messages[0]

    @contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """A context for work of the first rank while others wait in `shared`, which raises there if the work fails."""
        try:
            yield
        except Exception:
            dist.broadcast_object_list([None], group=self.group, group_src=0, device=self.device)
            raise


class RankText(OutputText):
    """A sequence on one rank. The first rank verifies and finds the end; the others append the tokens that it sends.

    Example: the first rank drafts and sends 7 8 9. All ranks read 7 8 9. The first rank accepts 7 and 8, draws 5, and
    sends 7 8 5. All ranks append 7 8 5, and remove 9 from the cache."""

    def __init__(self, ranks: Ranks, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.ranks = ranks

    # All ranks process the scores of all candidates, because only the first rank knows which are accepted.
    _verify_in_order = OutputText._verify_chain

    def _accept_chain(self, tree: DraftTree, scores: Tensor) -> tuple[list[int], int]:
        if self.ranks.is_first:
            with self.ranks.reporting_failure():
                return super()._accept_chain(tree, scores)
        self.ranks.outcome, emitted = self.ranks.shared()
        return list(range(1, len(emitted))), emitted[-1]

    def first_stop(
        self, length: int, emitted: list[int], scores: Tensor, raw: Tensor, ids: Tensor | None
    ) -> tuple[int, bool]:
        if self.ranks.is_first:
            with self.ranks.reporting_failure():
                kept, finished = super().first_stop(length, emitted, scores, raw, ids)
                if self.is_rewritten:
                    emitted = [*emitted[: kept - 1], int(self.ids[0, self.before + kept - 1])]
            self.ranks.shared(((kept, finished), emitted))
            return kept, finished
        kept, finished = self.ranks.outcome
        self.records.add_scores(scores, raw, kept)
        return kept, finished

    def end(self) -> None:
        super().end()
        if self.generator.randomness is not None:
            # For later plain sampling, which needs equal generators on all ranks.
            torch.set_rng_state(self.ranks.shared(torch.get_rng_state()))
            if self.ids.device.type == "cuda":
                state = self.ranks.shared(torch.cuda.get_rng_state(self.ids.device))
                torch.cuda.set_rng_state(state, self.ids.device)


class DraftOfRanks(Drafts):
    """Proposes candidates on all ranks: the first rank drafts them, and sends them to the others."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def propose(self, texts: Sequence[OutputText], target: RoundTarget) -> list[DraftTree]:
        if self.ranks.is_first:
            with self.ranks.reporting_failure():
                (tree,) = super().propose(texts, target)
            self.ranks.shared(tree.candidates)
            return [tree]
        tokens = self.ranks.shared()
        # Only the first rank needs q.
        return [Chain(tokens, [torch.empty(0)] * len(tokens))]
