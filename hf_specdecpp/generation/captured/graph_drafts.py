"""The draft's part of rounds that are captured whole (`GraphDrafts`), and why rounds are not (`why_not_whole`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.cuda_graphs.captured_draft import CapturedDraft, RoundRules, RoundShape
from hf_specdecpp.cuda_graphs.captured_rounds import CapturedRounds, Report
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.cuda_graphs.graphs import CannotCaptureError
from hf_specdecpp.generation.target import Drafts, GraphsFailedError, RoundTarget
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.models.causal_lm import keeping_generators
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.throughput.tiers import SPARE, TREES, Always, Followed, MostTokens, RoundSeconds, Tiers, chains_up_to
from hf_specdecpp.trees.tree import DraftTree, TreePass

MOST_KEPT = 4  # of a target: drafts and ways of drawing
MOST_TEXTS = 8  # rows of a batch
T = TypeVar("T")


class GraphDrafts(Drafts):
    """Proposes candidates by a graph. Nobody waits for it: the target's part (`RoundGraphs`) reads which they are.

    Args:
        texts: one, or the rows of a batch.
        rounds: that no other call is using.
        tiers: chooses the shapes of rounds.

    Attributes:
        process: what processors of the target do between the graphs; `None` where the graphs run all of them.
        made: rounds up to now.
    """

    def __init__(self, texts: Sequence[Text], rounds: CapturedRounds, rules: RoundRules, tiers: Tiers) -> None:
        self.texts, self.places = list(texts), {id(text): place for place, text in enumerate(texts)}
        self.generator, self.rounds, self.rules, self.tiers = texts[0].generator, rounds, rules, tiers
        graphs_run_all = self.generator.processing.does_nothing or not rules.processing.does_nothing
        self.process = None if graphs_run_all else self._process
        self.made, self.longest = 0, min(rounds.passes.longest, self.generator.setup.drafter.max_length)
        self.longest -= max(shape.levels for shape in tiers.shapes)
        self.rates = getattr(self.generator.rule, "rates", None)  # calibrates estimates
        if tiers.shapes[-1].width > 1 and self.generator.setup.decisions.adapt:
            self.rates = self.generator.learned_rates(trees=True)

    def begin(self) -> None:
        """The draft reads the prompts; what rounds take is measured where it is not known."""
        read = [text.generator.begin_captured(text.ids, text.states) for text in self.texts]
        lengths = [tokens.shape[1] for tokens, _ in read]
        further = [max(lengths) - length for length in lengths]
        tokens = [functional.pad(tokens, (count, 0)) for (tokens, _), count in zip(read, further, strict=True)]
        states = [functional.pad(each, (0, 0, count, 0)) for (_, each), count in zip(read, further, strict=True)
                  if each is not None]  # fmt: skip
        self.rounds.begin(
            torch.cat([text.generator.processing.shown(text.ids) for text in self.texts]),
            torch.cat(tokens),
            torch.cat(states) if states else None,
            torch.tensor(further, device=tokens[0].device),
        )
        if isinstance(self.tiers, MostTokens):
            device = self.rounds.passes.device
            with keeping_generators(device):  # a seed is for the text alone
                self.tiers.seconds.time(self.tiers.shapes, self.time)

    def time(self, shape: RoundShape) -> float:
        """Seconds of a round, which is forgotten."""
        return self.rounds.time(shape, self.rules, self.process)

    def propose(self, texts: Sequence[Text], target: RoundTarget) -> list[DraftTree]:  # noqa: ARG002
        attempt(partial(self._propose, texts), of_draft=True)
        return [DraftTree.chain() for _ in texts]

    def _propose(self, texts: Sequence[Text]) -> None:
        if not self.made:
            self.begin()
        self.rounds.keep([self.places[id(text)] for text in texts])
        self.shape = self._shape(max(text.length for text in texts))
        self._graphs, self._launched = len(self.rounds.graphs), time.perf_counter()
        self.rounds.propose(self.shape, self.rules)

    def verify(self, texts: Sequence[Text]) -> list[Report]:
        """The target's pass over what was proposed, and what the device says of it; the only wait of a round."""
        found = self.rounds.verify(self.shape, self.rules, self.process)
        if isinstance(self.tiers, MostTokens) and len(self.rounds.graphs) == self._graphs:  # nothing was captured
            self.tiers.seconds.note(self.shape, time.perf_counter() - self._launched)
        self.made += 1
        return [found[self.places[id(text)]] for text in texts]

    def saw(self, rounds: Sequence[Round]) -> None:
        self.tiers.note(self.shape, [each.outputs for each in rounds])
        for each in rounds:
            generator, tree, path = each.text.generator, each.tree, each.verdict.path
            if self.shape.width > 1 and self.rates is not None:
                self.rates.observe_tree(tree.judged(path))
            generator.note_captured(tree, each.outputs.estimates)
            generator.saw(tree, path, each.length)

    def _process(self, place: int, tree: DraftTree, scores: Tensor) -> Tensor:
        """Process scores of one of the texts, as `CapturedRounds` asks."""
        return self.texts[place].process(TreePass(tree, range(len(tree) + 1)), scores)

    def _shape(self, length: int) -> RoundShape:
        """Of the next round. What does not fit under the longest text is cut off when it is emitted."""
        shape = self.tiers.next()
        if shape.levels:
            self.rounds.draft.calibrate(self.rates)
        return shape if length <= self.longest else RoundShape(0)


def attempt(part: Callable[[], T], of_draft: bool = False) -> T:
    """Run a part of a round; `GraphsFailedError` if it cannot be captured, or finds no memory."""
    try:
        return part()
    except CannotCaptureError as error:
        why_not_draft = str(error) if of_draft and not error.is_passing else None
        failure = GraphsFailedError(f"a round cannot be captured ({error})", why_not_draft)
    except torch.OutOfMemoryError as error:
        failure = GraphsFailedError.of(error)
    raise failure  # outside of the handler, which keeps what was made last


def graph_drafts(texts: Sequence[Text], passes: CapturedTarget) -> GraphDrafts:
    """What drafts in whole rounds of a call whose passes are captured."""
    generator = texts[0].generator
    speculation, decisions = generator.setup.speculation, generator.setup.decisions
    steps: Any = generator.round_steps  # or there would be no whole rounds
    greedy, processing = generator.randomness is None, generator.processing.together()
    fits = processing.fits_graphs and all(text.processing.can_show(text.length) for text in texts)
    rules = RoundRules(
        greedy, generator.draft_processing.together().for_graphs(),
        processing if fits else Processing([]),
        generator.setup.estimator if speculation.rule != "fixed" or speculation.tree is not None else None,
        speculation.threshold if speculation.rule == "threshold" else None, decisions.min_tokens,
        decisions.verification if generator.processing.answers_all else "token",
    )  # fmt: skip
    shapes = shapes_of(speculation, steps, len(texts))
    key = steps.key, tuple(shapes), greedy, steps.vocab_size, len(texts), fits
    known = passes.rounds
    if key not in known:
        if len(known) >= MOST_KEPT:
            passes.graphs.family.clear()  # of which none can go alone
            known.clear()
        spare = SPARE if speculation.rule == "throughput" else 0
        draft = CapturedDraft(steps, shapes, len(texts), greedy, spare)
        known[key] = CapturedRounds(passes, draft), MostTokens(shapes, RoundSeconds())
    rounds, most = known[key]
    tiers: Tiers = Always(shapes[-1])
    if speculation.rule == "threshold" and speculation.tree is None:
        tiers = Followed(shapes)
    elif speculation.rule == "throughput":
        tiers, most.rates = most, generator.learned_rates()
    return GraphDrafts(texts, rounds, rules, tiers)


def shapes_of(speculation: SpeculationConfig, steps: Any, texts: int) -> list[RoundShape]:
    """The shapes that rounds may have, the largest last."""
    trees = [shape for shape in TREES if shape.levels <= steps.most]
    if speculation.tree is not None:
        trees = [shape for shape in trees if shape.nodes <= speculation.tree_budget]
        return trees[-1:] if speculation.rule != "throughput" else [RoundShape(0), *trees]
    if speculation.rule == "fixed":
        return [RoundShape(int(min(speculation.num_tokens, steps.most)))]
    chains = chains_up_to(int(min(speculation.max_tokens, steps.most)))
    if speculation.rule == "threshold":
        return [shape for shape in chains if shape.levels]
    deepest = chains[-1].levels
    # Rows of a batch fill the passes already.
    return chains + [shape for shape in trees if shape.levels <= deepest and steps.draws_trees and texts == 1]


def why_not_whole(texts: Sequence[Text]) -> str | None:
    """Why something in the rounds of a call has to be decided on the host."""
    generator = texts[0].generator
    speculation = generator.setup.speculation
    if len(texts) > MOST_TEXTS:
        return f"more than {MOST_TEXTS} sequences"
    if generator.lookup is not None:
        return "lookups are made on the host"
    if generator.round_steps is None:
        return "the steps of this draft are not captured"
    if generator.successors is not None:
        return "what the target said lately is looked up on the host"
    if speculation.costs is not None or (speculation.rule == "throughput" and speculation.reproducible):
        return "costs that are given or assumed are reckoned with on the host"
    if any(text.records.logits is not None or text.records.scores is not None for text in texts):
        return "scores or logits are asked for"
    if generator.processing.in_order:
        return "a logits processor has to be called token by token, in order"
    return None if speculation.tree is None else _why_no_tree(generator)


def _why_no_tree(generator: Any) -> str | None:
    """Why trees of these settings are not grown on the device."""
    speculation, decisions = generator.setup.speculation, generator.setup.decisions
    if speculation.tree != "dyspec":
        return "only trees of Algorithm 2 (tree='dyspec') are grown on the device"
    fitting = [shape for shape in TREES if shape.levels <= min(decisions.tree_depth, generator.round_steps.most)]
    budgets = [shape.nodes for shape in fitting]
    if decisions.tree_threshold or speculation.tree_budget not in budgets:
        listed = " or ".join(map(str, budgets)) or "none of this depth"
        return f"trees that are grown on the device have {listed} candidates, and no threshold"
    return None
