"""Drafting for the rows of a batch in shared draft passes (`BatchDrafts`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from hf_specdecpp.config.costs import DraftWork
from hf_specdecpp.drafting.chain import Drafting, draft_chains, should_continue
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import Drafts, RoundTarget
from hf_specdecpp.generation.output_text import OutputText, Round
from hf_specdecpp.lookup.looking_up import counts_of
from hf_specdecpp.throughput.plan import BatchPlan
from hf_specdecpp.trees.tree import Chain, DraftTree


class BatchDrafts(Drafts):
    """Proposes chains for the rows of a batch. `generators`: one for each row, in order."""

    def __init__(self, generators: Sequence[SpecDecPPCandidateGenerator]) -> None:
        first = generators[0]
        self.count, self.plan = len(generators), cast("BatchPlan | None", first.plan)
        self.times = first.times
        self.together = first.setup.drafter.batch([each.session for each in generators])

    @torch.inference_mode()
    def propose(self, texts: Sequence[OutputText], target: RoundTarget) -> list[DraftTree]:
        if texts[0].generator.is_paused:
            self.times = None
            return [Chain() for _ in texts]
        if self.plan is not None:
            self.plan.set_length(max(text.length for text in texts))
        # Costs are those of a complete batch, so they are measured only until a row has ended.
        times = self.times if len(texts) == self.count else None
        if times is not None:
            times.begin_round()
        generators = [text.generator for text in texts]
        rows: list[Drafting | Chain]
        rows = [text.generator.draft_step_by_step(text.ids, text.states) for text in texts]
        read = max(each.session.unread for each in generators)
        if self.plan is not None:
            self.plan.begin_batch(read, max(text.generator.left(text.length) for text in texts))
        self._look_up(generators, rows)
        chains = self._draft(generators, rows)
        if times is not None:
            passes = max(each.session.passes for each in generators)
            further = max(max(chain.num_drawn for chain in chains) - passes, 0)
            times.drafted(None if any(chain.looked_up for chain in chains) else DraftWork(passes, read - 1, further))
        for each, chain in zip(generators, chains, strict=True):
            chain.passes = each.session.passes
        return [*chains]

    def _look_up(self, generators: Sequence[SpecDecPPCandidateGenerator], rows: list[Drafting | Chain]) -> None:
        """In `rows`, replace the drafting coroutine of each row that looks up in this round by its looked-up chain."""
        lookups = [each.lookup for each in generators if each.lookup is not None]
        for place, count in enumerate(counts_of(lookups) if lookups else []):
            if count:
                rows[place] = Chain(lookups[place].found.tokens[:count])

    def _draft(self, generators: Sequence[SpecDecPPCandidateGenerator], rows: list[Drafting | Chain]) -> list[Chain]:
        def prepare(asking: dict[int, list[Tensor]]) -> bool:
            rules = [rule for place in asking if (rule := generators[place].method.rule) is not None]
            goes_on = not any(asking.values()) or should_continue(rules, len(generators))
            if goes_on and self.together is not None:
                self.together.run_draft(asking)
            return goes_on

        return draft_chains(rows, prepare)

    def record_outcome(self, rounds: Sequence[Round]) -> None:
        if self.times is not None and len(rounds) == self.count:
            self.times.end(max(each.text.before for each in rounds), rounds[0].width)
        for each in rounds:
            each.text.generator.record_outcome(each.tree, each.result.path, each.text.before)

    def select(self, places: Sequence[int]) -> None:
        if self.together is not None:
            self.together.select(places)
