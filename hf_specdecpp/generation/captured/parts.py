"""What plays the parts of a round as CUDA graphs: `GraphDrafts` and `RoundGraphs` those of rounds that are captured
whole, `PassGraphs` the target's part in passes over candidates that the host has proposed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from hf_specdecpp.caches.text import width_of
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_draft import RoundRules, RoundShape
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds, Report
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.decoding import MEMORY, Drafts, GraphsFailedError, RoundTarget, TargetSide, without_cudnn
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.generation.target import OneTarget
from hf_specdecpp.generation.text import NO_SCORES, Round, Text, Verdict
from hf_specdecpp.models.causal_lm import keeping_generators
from hf_specdecpp.sampling.processors import extend
from hf_specdecpp.throughput.tiers import MostTokens, Tiers
from hf_specdecpp.trees.tree import Chain, DraftTree, TreePass
from hf_specdecpp.trees.verification import as_float32

logger: Any = logging.get_logger("hf_specdecpp")
T = TypeVar("T")


class GraphDrafts(Drafts):
    """Proposes candidates by launching a graph, without waiting for it: `RoundGraphs` reads the candidates later.

    Args:
        texts: one, or the rows of a batch.
        rounds: that no other call is using.
        tiers: chooses the shapes of rounds.

    Attributes:
        process: what processors of the target do between the graphs; `None` where the graphs run all of them.
        made: rounds up to now.
        unread: in the place of candidates that were not read yet.
    """

    def __init__(self, texts: Sequence[Text], rounds: CapturedRounds, rules: RoundRules, tiers: Tiers) -> None:
        self.texts, self.unread = list(texts), Chain()
        self.generator, self.rounds, self.rules, self.tiers = texts[0].generator, rounds, rules, tiers
        graphs_run_all = self.generator.processing.does_nothing or not rules.processing.does_nothing
        self.process = None if graphs_run_all else self._process
        self.made, self.longest = 0, min(rounds.passes.longest, self.generator.setup.drafter.max_length)
        self.longest -= max(shape.levels for shape in tiers.shapes)
        self.rates = getattr(self.generator.method.rule, "rates", None)  # calibrates estimates
        if tiers.shapes[-1].width > 1 and self.generator.setup.decisions.adapt:
            self.rates = self.generator.learned_rates(trees=True)

    def begin(self) -> None:
        """The draft reads the prompts; what rounds take is measured where it is not known."""
        read = [text.generator.begin_captured(text.ids, text.states) for text in self.texts]
        tokens = pad_sequence([own[0] for own, _ in read], batch_first=True, padding_side="left")
        padding = tokens.new_tensor([tokens.shape[1] - own.shape[1] for own, _ in read])
        known = [states[0] for _, states in read if states is not None]
        states = pad_sequence(known, batch_first=True, padding_side="left") if known else None
        shown = torch.cat([text.generator.processing.shown(text.ids) for text in self.texts])
        self.rounds.begin(shown, tokens, states, padding)
        if isinstance(self.tiers, MostTokens):
            device = self.rounds.passes.device
            with keeping_generators(device):  # a seed is for the text alone
                self.tiers.seconds.time(self.tiers.shapes, self.time)

    def time(self, shape: RoundShape) -> float:
        """Seconds of a round, which is forgotten."""
        return self.rounds.time(shape, self.rules, self.process)

    def propose(self, texts: Sequence[Text], target: RoundTarget) -> list[DraftTree]:  # noqa: ARG002
        attempt(partial(self._propose, texts), of_draft=True)
        return [self.unread] * len(texts)

    def _propose(self, texts: Sequence[Text]) -> None:
        if not self.made:
            self.begin()
        self.rounds.keep([self.texts.index(text) for text in texts])
        self.shape = self._shape(length := max(text.length for text in texts))
        self._graphs, self._launched = len(self.rounds.graphs), time.perf_counter()
        self.rounds.propose(self.shape, self.rules, length)

    def verify(self) -> list[Report]:
        """Launch the target's pass over the candidates, and wait for the device's verdicts."""
        reports = self.rounds.verify(self.shape, self.rules, self.process)
        if isinstance(self.tiers, MostTokens) and len(self.rounds.graphs) == self._graphs:  # nothing was captured
            self.tiers.seconds.note(self.shape, time.perf_counter() - self._launched)
        self.made += 1
        return reports

    def saw(self, rounds: Sequence[Round]) -> None:
        self.tiers.note(self.shape, [each.outputs for each in rounds])
        for each in rounds:
            generator, tree, path = each.text.generator, each.tree, each.verdict.path
            if self.shape.width > 1 and self.rates is not None:
                self.rates.observe_tree(tree.judged(path))
            generator.note_captured(each.outputs.estimates)
            generator.saw(tree, path, each.text.before)

    def _process(self, place: int, tree: DraftTree, scores: Tensor) -> Tensor:
        """Process scores of one of the texts, as `CapturedRounds` asks."""
        found = self.texts[place].process(TreePass(tree, range(len(tree) + 1)), scores)
        return as_float32(found, self.generator.randomness is None)

    def _shape(self, length: int) -> RoundShape:
        """Of the next round. What does not fit under the longest text is cut off when it is emitted."""
        shape, draft = self.tiers.next() if length <= self.longest else RoundShape(0), self.rounds.draft
        if not shape.levels and draft.pending >= draft.width:  # it has to read what was emitted without it
            shape = next(each for each in self.tiers.shapes if each.levels)
        if shape.levels:
            draft.calibrate(self.rates)
        return shape


class GraphTarget(RoundTarget):
    """The target's part of rounds of the `texts`, which lie in the rooms of captured `passes`, in this order. The
    passes are busy with them until they `leave`. A pass has room for any number of candidates.

    Args:
        drafts, usual: what makes rounds where nothing is captured.
    """

    rounds: Sequence[CapturedRounds] = ()

    def __init__(self, texts: Sequence[Text], passes: CapturedTarget, drafts: Drafts, usual: TargetSide) -> None:
        self.texts, self.passes, self.drafts, self.usual = list(texts), passes, drafts, usual

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
        rooms = [passes.rooms, *(rounds.draft.rooms for rounds in self.rounds)]
        stats.graph_bytes = sum(each.num_bytes for each in made) + sum(each.num_bytes for each in rooms)
        for each in made:
            if each.why_not and stats.uncaptured is None:
                what = "its pass" if each is passes.graphs else "a round"
                stats.uncaptured = f"{what} cannot be captured ({each.why_not})"


class RoundGraphs(GraphTarget):
    """Rounds that are captured whole: the device has drawn their candidates, and verifies them.

    Args:
        own: what launches the draft.
    """

    def __init__(self, own: GraphDrafts, passes: CapturedTarget, drafts: Drafts, usual: TargetSide) -> None:
        super().__init__(own.texts, passes, drafts, usual)
        self.own, self.rounds = own, [own.rounds]

    def read(self, rounds: Sequence[Round]) -> None:
        for each, report in zip(rounds, attempt(self.own.verify), strict=True):
            emitted = [*map(report.tree.tokens.__getitem__, report.path), report.token]
            # Nobody asks for scores, or rounds would not be captured whole.
            each.verdict, each.is_verified = Verdict(report.path, emitted, NO_SCORES, NO_SCORES), True
            each.tree, each.outputs = report.tree, report

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
        elif not are_captured_whole_alone(self.usual):
            self.tell(failure)
            return with_captured_passes(self.texts, self.passes, self.usual)
        return super().instead(failure, texts)


class DraftsBesideGraphs(Drafts):
    """Proposes candidates for one text whose target's passes alone are captured. After a pass that failed the same
    candidates are proposed again, since the draft has taken note of them."""

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
        attempt(partial(self._read, *rounds))

    def _read(self, each: Round) -> None:
        tokens, tree, shape, each.width = each.text.ids[:, -1:], each.tree, None, width_of(len(each.tree) + 1)
        if len(tree) and isinstance(tree, Chain):
            tokens = extend(tokens, tree.ids(tokens.device))
        elif len(tree):
            candidates, *shape = each.rows.upload(tokens.device, each.width)
            tokens = extend(tokens, candidates)
        each.outputs = self.passes.read(tokens, shape)
        each.outputs.logits = each.outputs.logits.clone()  # which the next pass would write over
        self.usual.states.give(each.outputs.states)

    def keep(self, rounds: Sequence[Round]) -> None:
        self.usual.take_states(rounds[0])
        self.passes.keep(*rounds[0].emitted)


def with_captured_passes(
    texts: Sequence[Text], passes: CapturedTarget, usual: TargetSide
) -> tuple[Drafts, RoundTarget]:
    """The parts of rounds of a text of which passes alone are captured."""
    drafts = DraftsBesideGraphs()
    return drafts, PassGraphs(texts, passes, drafts, usual)


def attempt(part: Callable[[], T], of_draft: bool = False) -> T:
    """Run a part of a round; `GraphsFailedError` if it cannot be captured, or finds no memory."""
    why_not_draft = None
    try:
        return part()
    except graphs.CannotCaptureError as error:
        reason = f"a round cannot be captured ({error})"
        why_not_draft = str(error) if of_draft and not error.is_passing else None
    except torch.OutOfMemoryError as error:
        reason = memory_ended(error)
    raise GraphsFailedError(reason, why_not_draft)  # outside of the handlers, which keep what was made last


def memory_ended(error: torch.OutOfMemoryError) -> str:
    """The reason why something is not captured."""
    return f"{MEMORY} ({str(error).partition('. ')[0]})"


def pass_widths(most: int) -> list[int]:
    """Of passes over up to `most` candidates: 1, 2, 4 and 8 for 5."""
    return [1 << power for power in range(width_of(most + 1).bit_length())]


def are_captured_whole_alone(usual: TargetSide) -> bool:
    """Whether passes are captured in whole rounds alone: of a batch, of which one text may be left, and where a draft
    reads the target's cache."""
    return not isinstance(usual, OneTarget) or usual.generator.setup.drafter.shares_cache


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
