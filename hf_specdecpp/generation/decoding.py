"""Assisted decoding: the loop that everything else serves (`AssistedDecoding`).

Differences from transformers' `_assisted_decoding`: the prompt gets a forward of its own as in plain `generate()`, so a
warm cache, chunked prefill and sliding windows behave as they do there. Stopping criteria are asked token by token, and
a stop string ends the output where it ends. Scores, hidden states and attentions belong to the token that they are
returned for. Candidates may be trees, and the rows of a batch keep their own pace.
"""

from __future__ import annotations

import time

from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.generation.captured.entering import on_graphs
from hf_specdecpp.generation.target import Drafts, GraphsFailedError, RoundTarget, TargetSide
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.trees.tree import DraftTree


class AssistedDecoding:
    """One `generate()` call, for a text or the rows of a batch; `active` have not ended.

    Attributes:
        side: the target's side of the call.
        drafts, target: what makes the rounds: at first the side itself, and on a GPU what runs as CUDA graphs.
    """

    def __init__(self, texts: list[Text], drafts: Drafts, side: TargetSide) -> None:
        self.texts, self.drafts, self.side = texts, drafts, side
        self.target: RoundTarget = side
        self.active = list(texts)

    def run(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after `input_ids` `[batch, length]`: what `generate()` returns."""
        try:
            self._generate(input_ids)
        except BaseException:
            self.side.roll_back()
            raise
        finally:
            self.side.end()
        self.texts[0].generator.finish()
        for text in self.texts:
            text.end()
        return self.side.output(self.texts)

    def _generate(self, input_ids: Tensor) -> None:
        """The prompts' pass, then rounds until all texts have ended."""
        products, begin, count = self.texts[0].generator.products, time.perf_counter(), len(self.texts)
        with products:  # making them is no time of the prompt
            self._read_prompt(input_ids)
        for text in self.texts:
            text.stats.plain_passes += 1
            text.stats.prompt_seconds = (time.perf_counter() - begin) / count  # its token has been read
        with self.side.model._optimize_model_for_decode():
            self.side.begin(self.active)
            usual = self.drafts, self.side
            self.drafts, self.target = on_graphs(self.active, *usual)
            try:
                with products:
                    self._make_rounds()
            finally:
                self.target.leave()
                self.drafts, self.target = usual
            self.side.complete(self.texts)
        for text in self.texts:
            passes = self.side.passes.seconds(count, max(text.stats.rounds, 1), products)
            shares = [each and each / count for each in passes]
            text.stats.plain_pass_seconds, text.stats.same_pass_seconds = shares

    def _read_prompt(self, input_ids: Tensor) -> None:
        """The forward over the prompts and the first token of each text, exactly as in plain `generate()`."""
        for text, ids in zip(self.texts, input_ids.split(1), strict=True):
            text.begin(ids)
        rounds = [Round(text, DraftTree.chain(), is_prompt=True) for text in self.texts]
        self.side.read_prompt(rounds, input_ids)
        self._take(rounds)

    def _make_rounds(self) -> None:
        while self.active:
            try:
                with self.target.attention():
                    while self.active:
                        self.target.prepare(self.active)
                        self.round()
            except GraphsFailedError as failure:
                self.drafts, self.target = self.target.instead(failure, self.active)

    def round(self) -> None:
        """Draft, one target pass, verify, emit, keep (SpecDec++, section 3; DySpec, section 4, where trees branch)."""
        begin = time.perf_counter()
        trees = self.drafts.propose(self.active, self.target)  # a chain is a tree of one branch
        drafted = time.perf_counter()
        rounds = list(map(Round, self.active, trees))
        self.target.read(rounds)
        read = time.perf_counter()
        self._take(rounds)
        self._note_seconds(rounds, drafted - begin, read - drafted, time.perf_counter() - read)

    def _take(self, rounds: list[Round]) -> None:
        """Verify, emit what stands, leave both models at it; texts that have ended leave."""
        if not rounds[0].is_verified:
            self.verify(rounds)
        for each in rounds:
            each.emitted = each.text.emit(each.verdict)
        self.target.keep(rounds)
        if not rounds[0].is_prompt:
            self.drafts.saw(rounds)
        for each in rounds:
            each.text.hand_over(each.verdict.emitted[: each.emitted.kept])
        if not all(self.target.stays(self.active)):
            self._leave()

    def verify(self, rounds: list[Round]) -> None:
        """One route: greedy or drawn, token by token or as a block; `emit` cuts what is behind the end of a text."""
        for each in rounds:
            each.verdict = each.text.verify(each.rows, each.outputs.logits[0, -len(each.tree) - 1 :])

    def _leave(self) -> None:
        places = [place for place, stays in enumerate(self.target.stays(self.active)) if stays]
        if len(places) < len(self.active):
            self.drafts.select(places)
            self.target.select(self.active, places)
            self.active = [self.active[place] for place in places]

    def _note_seconds(self, rounds: list[Round], draft: float, target: float, rest: float) -> None:
        """Count the seconds of a round, to equal shares. What verification waits for the device is the pass's."""
        count, waited = len(rounds), 0.0
        for each in rounds:
            waited += each.verdict.waited
        target, rest, draft = (target + waited) / count, (rest - waited) / count, draft / count
        for each in rounds:
            stats = each.text.stats
            stats.target_seconds += target
            if len(each.tree):
                stats.draft_seconds += draft
                stats.overhead_seconds += rest
            else:
                stats.overhead_seconds += rest + draft
