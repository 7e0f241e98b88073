"""The target's part of rounds in CUDA graphs (`GraphTarget`): of rounds that are captured whole (`RoundGraphs`), or of
passes over candidates that the host has proposed (`PassGraphs`)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.caches.text import num_in_place, width_of
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.captured.graph_drafts import GraphDrafts, attempt
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.generation.target import Drafts, GraphsFailedError, OneTarget, RoundTarget, TargetSide, without_cudnn
from hf_specdecpp.generation.text import NO_SCORES, Round, Text, Verdict
from hf_specdecpp.sampling.processors import extend
from hf_specdecpp.trees.tree import DraftTree, TreePass

logger: Any = logging.get_logger("hf_specdecpp")


class GraphTarget(RoundTarget):
    """The target's part of rounds of the `texts`, which lie in the rooms of captured `passes`, in this order. The
    passes are busy with them until they `leave`. A pass has room for any number of candidates.

    Args:
        drafts, usual: what makes rounds where nothing is captured.
    """

    rounds: Sequence[CapturedRounds] = ()

    def __init__(self, texts: Sequence[Text], passes: CapturedTarget, drafts: Drafts, usual: TargetSide) -> None:
        self.texts, self.passes, self.drafts, self.usual = list(texts), passes, drafts, usual

    def prepare(self, texts: Sequence[Text]) -> None:
        """A round needs nothing more."""

    def stays(self, texts: Sequence[Text]) -> list[bool]:
        return self.usual.stays(texts)

    def instead(self, failure: GraphsFailedError, texts: Sequence[Text]) -> tuple[Drafts, RoundTarget]:
        self.tell(failure)
        if failure.is_memory:
            self.passes.close()
        self.leave(texts)
        if failure.is_memory:
            del self.passes.text
        return self.drafts, self.usual

    def tell(self, failure: GraphsFailedError) -> None:
        """Note why rounds are made in another way, and say so once."""
        note(self.texts, str(failure), f"step by step: {failure}")
        if failure.why_not_draft is not None:
            self.usual.generator.setup.drafter.give_up(failure.why_not_draft)
        else:
            warn(self.usual, str(failure))

    def leave(self, texts: Sequence[Text] = ()) -> None:
        try:
            self.usual.take_back(self.passes, texts, [self.texts.index(text) for text in texts])
        finally:
            self._count(self.texts[0].stats)
            self.passes.busy = False

    def _count(self, stats: SpeculationStats) -> None:
        """Note the graphs of these rounds up to now, and what they take."""
        passes = self.passes
        made = [passes.graphs, *(rounds.graphs for rounds in self.rounds)]
        stats.graphs, stats.graph_seconds = sum(map(len, made)), sum(each.seconds for each in made)
        places = [*made, passes.rooms, *(rounds.draft.rooms for rounds in self.rounds)]
        stats.graph_bytes = sum(each.num_bytes for each in places)
        for each in made:
            if each.why_not and stats.uncaptured is None:
                what = "its pass" if each is passes.graphs else "a round"
                stats.uncaptured = f"{what} cannot be captured ({each.why_not})"


class RoundGraphs(GraphTarget):
    """Rounds that are captured whole: the device has drawn their candidates, and verifies them.

    Args:
        own: what launches the draft.
    """

    def __init__(self, own: GraphDrafts, *parts: Any) -> None:
        super().__init__(*parts)
        self.own, self.rounds = own, [own.rounds]

    def read(self, rounds: Sequence[Round]) -> None:
        reports = attempt(partial(self.own.verify, [each.text for each in rounds]))
        for each, report in zip(rounds, reports, strict=True):
            tree, path = report.tree, report.path
            emitted = [*(tree.tokens[node] for node in path), report.token]
            # Nobody asks for scores, or rounds would not be captured whole.
            each.verdict, each.is_verified = Verdict(path, emitted, NO_SCORES, NO_SCORES), True
            each.tree, each.outputs = tree, report

    def keep(self, rounds: Sequence[Round]) -> None:
        """Both models have read everything; the cache that one text gives back ends at what was emitted."""
        self.passes.text.held += rounds[0].emitted.kept

    def select(self, texts: Sequence[Text], places: Sequence[int]) -> None:
        for place in set(range(len(texts))) - set(places):
            row, length = self.texts.index(texts[place]), texts[place].length - 1
            self.usual.hold(texts[place], partial(self.passes.text.cache.held_of, row, length))

    def instead(self, failure: GraphsFailedError, texts: Sequence[Text]) -> tuple[Drafts, RoundTarget]:
        for text in texts:
            if failure.is_memory:  # and with it go the caches in which the draft has read the text
                text.generator.stop()
            else:
                text.generator.begin_again()
        if failure.is_memory:
            self.own.rounds.draft.close()
        elif not are_captured_whole_alone(self.texts):
            self.tell(failure)
            return with_captured_passes(self.texts, self.passes, self.usual)
        return super().instead(failure, texts)


class DraftsBesideGraphs(Drafts):
    """Proposes candidates for one text whose target's passes alone are captured: the same once more after a pass that
    failed."""

    def __init__(self) -> None:
        self.proposed: list[DraftTree] = []

    def propose(self, texts: Sequence[Text], target: RoundTarget) -> list[DraftTree]:
        if not self.proposed:
            with without_cudnn(texts[0].ids.device):
                self.proposed = super().propose(texts, target)
        return self.proposed

    def saw(self, rounds: Sequence[Round]) -> None:
        self.proposed = []
        super().saw(rounds)


class PassGraphs(GraphTarget):
    """Passes of one text that are captured. What a pass wrote is not held before it is kept."""

    usual: OneTarget

    def read(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        each.outputs = attempt(partial(self._pass, each.text.ids, each.rows))
        each.width = width_of(len(each.tree) + 1)
        self.usual.states.give(each.outputs.states)

    def _pass(self, ids: Tensor, tree_pass: TreePass) -> Any:
        """A pass over the last of the tokens `[1, length]` and a tree."""
        tree, shape = tree_pass.tree, None
        if tree.is_chain or not len(tree):
            candidates = tree.ids(ids.device) if len(tree) else None
        else:
            candidates, *shape = tree_pass.upload(ids.device, width_of(len(tree) + 1))
        tokens = ids[:, -1:] if candidates is None else extend(ids[:, -1:], candidates)
        outputs = self.passes.read(tokens, shape)
        outputs.logits = outputs.logits.clone()  # which the next pass would write over
        return outputs

    def keep(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        kept, path = each.emitted
        self.usual.take_states(each)
        moves = path is not None and num_in_place(path.rows[:kept]) < kept
        self.passes.keep(kept, path.on_device[:kept] if moves and path is not None else None)

    def try_pass(self, count: int, as_tree: bool) -> None:
        """Make a pass over the last token and so many candidates, all alike, and keep nothing; only to capture it."""
        text = self.texts[0]
        tree = DraftTree(int(text.ids[0, -1]))
        for _ in range(count):
            tree.add(0, tree.tokens[0])
        if not as_tree:
            tree = DraftTree.chain(tree.candidates, [NO_SCORES] * count)
        self._pass(text.ids, TreePass(tree))
        if as_tree:
            self.passes.keep(0, torch.arange(count + 1, device=self.passes.device))


def with_captured_passes(
    texts: Sequence[Text], passes: CapturedTarget, usual: TargetSide
) -> tuple[Drafts, RoundTarget]:
    """What makes rounds of a text of which passes alone are captured."""
    drafts = DraftsBesideGraphs()
    return drafts, PassGraphs(texts, passes, drafts, usual)


def are_captured_whole_alone(texts: Sequence[Text]) -> bool:
    """Whether passes are captured in whole rounds alone: of several texts, and where a draft reads the cache."""
    return len(texts) > 1 or texts[0].generator.setup.drafter.shares_cache


def note(texts: Sequence[Text], reason: str | None, made: str) -> None:
    """Why passes are not captured, and how rounds are made."""
    for text in texts:
        text.stats.uncaptured, text.stats.decided["rounds"] = reason, made


def warn(usual: TargetSide, reason: str) -> None:
    """Say once that passes are not captured, where a user may expect graphs."""
    if graphs.can_capture(usual.device):
        logger.warning_once(
            f"Passes of {type(usual.model).__name__} are not captured as CUDA graphs ({reason}), so they run "
            "one kernel after another: the same texts, more slowly."
        )
