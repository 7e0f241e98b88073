"""`Drafts` and `RoundTarget` as CUDA graphs: `GraphDrafts` and `RoundGraphs` for whole rounds, `PassGraphs` for target
passes over candidates that were drafted without graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from hf_specdecpp.caches.cached_context import width_of
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_draft import RoundRules, RoundShape
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.decoding import MEMORY, Drafts, GraphsFailedError, RoundTarget, TargetSide, without_cudnn
from hf_specdecpp.generation.output_text import NO_SCORES, OutputText, Round, RoundResult
from hf_specdecpp.generation.single_target import SingleTarget
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.models.causal_lm import keeping_generators
from hf_specdecpp.sampling.processors import extend
from hf_specdecpp.throughput.round_shapes import FastestShapes, ShapeChooser
from hf_specdecpp.trees.tree import Chain, DraftTree, TreePass
from hf_specdecpp.trees.verification import as_float32

logger: Any = logging.get_logger("hf_specdecpp")


class GraphDrafts(Drafts):
    """Launches whole rounds as graphs, from draft to commit, without waiting: `RoundGraphs.read` gets the results.

    Args:
        texts: a single sequence, or the rows of a batch.
        rounds: the captured rounds, which no other call uses meanwhile.
        chooser: chooses the shape of each round.

    Attributes:
        process: runs the target's processors between graphs; `None` if the graphs contain all processors.
        made: number of rounds so far; the first one begins with `begin_texts`.
        longest: length of sequences above which rounds have no candidates, unless the draft's window is full.
        rates: calibrates the device's estimates; `None`: not calibrated. `FastestShapes.rates` are others, of chains.
    """

    def __init__(
        self, texts: Sequence[OutputText], rounds: CapturedRounds, rules: RoundRules, chooser: ShapeChooser
    ) -> None:
        self.texts = list(texts)
        self.generator, self.rounds, self.rules, self.chooser = texts[0].generator, rounds, rules, chooser
        graphs_run_all = self.generator.processing.does_nothing or not rules.processing.does_nothing
        self.process = None if graphs_run_all else self._process
        self.made, self.longest = 0, min(rounds.passes.longest, self.generator.setup.drafter.max_length)
        self.longest -= max(shape.levels for shape in chooser.shapes)
        self.rates = getattr(self.generator.method.rule, "rates", None)
        if chooser.shapes[-1].width > 1 and self.generator.setup.decisions.adapt:
            self.rates = self.generator.learned_rates(trees=True)

    def begin_texts(self) -> None:
        """Called before the first round: lets the draft read the prompts, and times rounds of shapes not yet timed."""
        read = [text.generator.begin_captured(text.ids, text.states) for text in self.texts]
        tokens = pad_sequence([own[0] for own, _ in read], batch_first=True, padding_side="left")
        padding = tokens.new_tensor([tokens.shape[1] - own.shape[1] for own, _ in read])
        known = [states[0] for _, states in read if states is not None]
        states = pad_sequence(known, batch_first=True, padding_side="left") if known else None
        shown = torch.cat([text.generator.processing.shown(text.ids) for text in self.texts])
        self.rounds.begin_texts(self.rules, shown, tokens, states, padding)
        if isinstance(self.chooser, FastestShapes):
            device = self.rounds.passes.device
            with keeping_generators(device):  # timing must not change the random numbers of the generation
                shapes = *self.chooser.shapes, *self.chooser.given
                self.chooser.seconds.time(shapes, partial(self.rounds.time, process=self.process))

    def propose(self, texts: Sequence[OutputText], target: RoundTarget) -> list[DraftTree]:
        attempt(partial(self._propose, texts), "a round")
        return [Chain()] * len(texts)  # without the candidates, which only the device knows yet

    def _propose(self, texts: Sequence[OutputText]) -> None:
        if not self.made:
            self.begin_texts()
        active = [self.texts.index(text) for text in texts]
        lookups = [found for text in texts if (found := text.generator.look_up(text.length)) is not None]
        shape = self._shape(max(text.length for text in texts), lookups)
        if shape.given:
            chains = [each.found.tokens[: shape.given] for each in lookups]
            self.rounds.draft.give(dict(zip(active, chains, strict=True)))
        self.rounds.launch(shape, active, self.process)

    def record_outcome(self, rounds: Sequence[Round]) -> None:
        shape, self.made = self.rounds.shape, self.made + 1
        if isinstance(self.chooser, FastestShapes) and self.rounds.seconds is not None:
            self.chooser.seconds.record_round(shape, self.rounds.seconds)
        self.chooser.record_round(shape, [each.outputs for each in rounds])
        for each in rounds:
            generator, tree, path = each.text.generator, each.tree, each.result.path
            if shape.width > 1 and self.rates is not None:
                self.rates.observe_tree(tree.judged(path))
            generator.record_estimates(each.outputs.estimates)
            generator.record_outcome(tree, path, each.text.before)
            generator.emitted = each.result.emitted[: each.emitted.kept]

    def _process(self, place: int, tree: DraftTree, scores: Tensor) -> Tensor:
        """Process the logits after all nodes of `tree` in the sequence with index `place` (see `Process`)."""
        found = self.texts[place].process(TreePass(tree, range(len(tree) + 1)), scores)
        return as_float32(found, self.generator.randomness is None)

    def _shape(self, length: int, lookups: Sequence[LookingUp]) -> RoundShape:
        """The shape of the next round, after `length` tokens (longest sequence). `emit` cuts at the maximum length."""
        draft, shapes = self.rounds.draft, self.chooser.shapes
        shape = self.chooser.choose_shape(lookups) if length <= self.longest else RoundShape(0)
        if not shape.levels and draft.pending + shape.given >= draft.width and shapes[-1].levels:
            shape = next(each for each in shapes if each.levels)  # the draft must read tokens of rounds without it
        if shape.levels:
            draft.calibrate(self.rates)
        return shape


class GraphTarget(RoundTarget):
    """The target in rounds with CUDA graphs. Row i of the caches of `passes` holds sequence i of `texts`. No other call
    can use `passes` until `leave`.

    Args:
        drafts, usual: the drafts and the target without graphs, which continue after failures.
    """

    def __init__(self, texts: Sequence[OutputText], passes: CapturedTarget, drafts: Drafts, usual: TargetSide) -> None:
        self.texts, self.passes, self.drafts, self.usual = list(texts), passes, drafts, usual

    def after_failure(self, failure: GraphsFailedError, texts: Sequence[OutputText]) -> tuple[Drafts, RoundTarget]:
        record_reason(self.texts, str(failure), f"step by step: {failure}")
        if failure.is_memory:
            self.passes.close()
        self.leave(texts)
        return self.drafts, self.usual

    def leave(self, texts: Sequence[OutputText] = ()) -> None:
        try:
            self.usual.copy_back(self.passes, texts, [self.texts.index(text) for text in texts])
        finally:
            self._count(self.texts[0].stats)
            if not self.passes.context.made:  # closed, because memory ended
                self.passes.context.cache = None
            self.passes.busy = False

    def _count(self, stats: SpeculationStats) -> None:
        """Store the number, seconds and memory of the target's graphs in `stats`."""
        made = self.passes.graphs
        stats.graphs, stats.graph_seconds = len(made), made.seconds
        of_q = [rounds.draft.q.nbytes for rounds, _ in self.passes.rounds.values() if rounds.draft.q is not None]
        stats.graph_bytes = made.num_bytes + sum(of_q) + sum(owner.num_bytes for owner in self.passes.budget.owners)


class RoundGraphs(GraphTarget):
    """The target in whole rounds as graphs, which `graph_drafts` launches: the device also verifies and commits."""

    def __init__(self, graph_drafts: GraphDrafts, passes: CapturedTarget, drafts: Drafts, usual: TargetSide) -> None:
        super().__init__(graph_drafts.texts, passes, drafts, usual)
        self.graph_drafts = graph_drafts

    def prepare(self, texts: Sequence[OutputText]) -> None:
        if any(text.is_rewritten for text in texts):
            raise GraphsFailedError("a stopping criterion replaces tokens, and graphs go on from their own")

    def read(self, rounds: Sequence[Round]) -> None:
        for each, report in zip(rounds, self.graph_drafts.rounds.read_reports(), strict=True):
            emitted = [*map(report.tree.tokens.__getitem__, report.path), report.token]
            # No scores: with requested scores rounds are not captured whole.
            each.result, each.is_verified = RoundResult(report.path, emitted, NO_SCORES, NO_SCORES), True
            each.tree, each.outputs = report.tree, report

    def commit(self, rounds: Sequence[Round]) -> None:
        """Count the emitted tokens as cached; the graphs have updated the caches of both models."""
        longest = max(each.text.length for each in rounds)
        self.passes.context.num_tokens = longest - self.graph_drafts.rounds.ahead

    def select(self, texts: Sequence[OutputText], places: Sequence[int]) -> None:
        for place in set(range(len(texts))) - set(places):
            row, length = self.texts.index(texts[place]), texts[place].length - 1
            self.usual.save_row(texts[place], partial(self.passes.context.cache.keys_values_of, row, length))

    def after_failure(self, failure: GraphsFailedError, texts: Sequence[OutputText]) -> tuple[Drafts, RoundTarget]:
        drafter = self.usual.generator.setup.drafter
        # The draft's caches are freed, or the target's states of tokens since the prompt are not known.
        is_lost = failure.is_memory or (drafter.reads is not None and self.graph_drafts.made > 0)
        for text in texts:
            if is_lost:
                text.generator.stop_drafting()
            else:
                text.generator.restart_draft()
        if failure.lasting is not None:
            drafter.give_up(failure.lasting)  # which warns
        else:
            warn(self.usual, str(failure))
        return super().after_failure(failure, texts)


class DraftsBesideGraphs(Drafts):
    """Drafts without graphs for a single sequence whose target passes are captured. If a pass fails, the repeated round
    gets its candidates again, because the draft's state already includes them."""

    def __init__(self) -> None:
        self.proposed: list[DraftTree] = []

    def propose(self, texts: Sequence[OutputText], target: RoundTarget) -> list[DraftTree]:
        if not self.proposed:
            with without_cudnn(texts[0].ids.device):
                self.proposed = super().propose(texts, target)
        return self.proposed

    def record_outcome(self, rounds: Sequence[Round]) -> None:
        self.proposed = []
        super().record_outcome(rounds)


class PassGraphs(GraphTarget):
    """The target passes of a single sequence as CUDA graphs; tokens of a pass count as cached only after `commit`."""

    usual: SingleTarget

    def read(self, rounds: Sequence[Round]) -> None:
        attempt(partial(self._read, *rounds), "its pass")

    def after_failure(self, failure: GraphsFailedError, texts: Sequence[OutputText]) -> tuple[Drafts, RoundTarget]:
        if failure.lasting is not None:
            self.passes.why_not = str(failure)
        warn(self.usual, str(failure))
        return super().after_failure(failure, texts)

    def _read(self, each: Round) -> None:
        tokens, tree, relations, each.width = each.text.ids[:, -1:], each.tree, None, width_of(len(each.tree) + 1)
        if len(tree) and isinstance(tree, Chain):
            tokens = extend(tokens, tree.candidates)
        elif len(tree):
            candidates, *relations = each.rows.upload(tokens.device, each.width)
            tokens = extend(tokens, candidates)
        each.outputs = self.passes.read(tokens, relations)
        each.outputs.logits = each.outputs.logits.clone()  # the next pass overwrites the original
        self.usual.states.set_states(each.outputs.states)

    def commit(self, rounds: Sequence[Round]) -> None:
        self.usual.take_states(rounds[0])
        self.passes.commit(*rounds[0].emitted)


def attempt(part: Callable[[], None], name: str) -> None:
    """Call `part` of a round; `GraphsFailedError` with its `name` if it cannot be captured or memory runs out."""
    lasting = None
    try:
        return part()
    except graphs.CannotCaptureError as error:
        reason, lasting = f"{name} cannot be captured ({error})", None if error.is_passing else str(error)
    except torch.OutOfMemoryError as error:
        reason = memory_ended(error)
    raise GraphsFailedError(reason, lasting)  # after the handlers, whose exceptions keep memory alive


def memory_ended(error: torch.OutOfMemoryError) -> str:
    """The reason to report for an `error` by running out of memory."""
    return f"{MEMORY} ({str(error).partition('. ')[0]})"


def pass_widths(most: int) -> list[int]:
    """Widths (tokens) of captured passes over up to `most` candidates. Example: 1, 2, 4 and 8 for 5 candidates."""
    return [1 << power for power in range(width_of(most + 1).bit_length())]


def record_reason(texts: Sequence[OutputText], reason: str | None, made: str) -> None:
    """Store in the statistics why passes are not captured (`reason`, or `None`), and how rounds run (`made`)."""
    for text in texts:
        text.stats.uncaptured, text.stats.decided["rounds"] = reason, made


def warn(usual: TargetSide, reason: str) -> None:
    """Warn once that passes are not captured, for this `reason`, if the device supports CUDA graphs at all."""
    if graphs.can_capture(usual.device):
        logger.warning_once(
            f"Passes of {type(usual.model).__name__} are not captured as CUDA graphs ({reason}), so they run "
            "one kernel after another: the same texts, more slowly."
        )
