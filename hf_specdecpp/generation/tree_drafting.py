"""Draws the token trees of one generation: the algorithms of `trees` on the draft model."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor
from transformers import GenerationConfig

from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import MODES, DraftProbability
from hf_specdecpp.generation.refusals import LateRefusalError
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import TreeRandomness
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.trees import TreePlan
from hf_specdecpp.trees import algorithms
from hf_specdecpp.trees.attention import check_trees, has_read_tree
from hf_specdecpp.trees.slots import Growth, Level, Slots, SlotValuation, SoftmaxBuffer, check_estimator
from hf_specdecpp.trees.tree import DraftTree

# Plain passes that siblings promise to save before it is tried, once, whether target and draft read trees: that takes
# about six, and what would grow below siblings is not reckoned with.
CHECK = 3.0


class TreeDrafting:
    """What stays the same from round to round, and the pace of growth, which learns; `ValueError` if the estimator
    cannot value slots, or a static tree has neither shape nor rates.

    Args:
        setup: its settings say which algorithm; its estimator values slots, but for static trees.
        session, processing, randomness, eos_token_ids: as in `SpecDecPPCandidateGenerator`.
        decided: what was decided for the generation (`SpeculationStats.decided`).

    Attributes:
        most, room: nodes that a tree may have, and that of the next round, if it grows by costs.
        throughput: for `"dyspec"`: decides how far trees grow, and learns from them. `None` uses up the budget.
        rates: calibrates the estimates of a budget's trees; `None` takes them as they are.
    """

    def __init__(
        self,
        setup: DraftSetup,
        session: Reading,
        processing: Processing,
        randomness: TreeRandomness | None,
        eos_token_ids: Collection[int],
        decided: dict[str, str],
    ) -> None:
        self.decided = decided
        self.setup, self.config, self.session = setup, setup.speculation, session
        self.shape = _static_shape(setup, greedy=randomness is None)
        estimator = setup.estimator if self.shape is None else DraftProbability()  # for the records only
        check_estimator(estimator)
        self.most = self.room = self.config.most_drafted if self.shape is None else algorithms.size(self.shape)
        self.slots = Slots(estimator, randomness, eos_token_ids, buffer=SoftmaxBuffer(self.most))
        self.processing = processing
        self.pace, self.unread = algorithms.ThresholdSchedule(), 0
        self.throughput: TreePlan | None = None
        self.rates: AcceptanceRates | None = None

    def follow(self, plan: Plan | None, target: CausalLM, generation: GenerationConfig) -> None:
        """Let trees grow as `rule="throughput"` says, if there is a plan, else by what is known of the target.

        That target and draft read trees is tried once siblings promise to save what this takes: only then they branch.
        """
        decisions, memory = self.setup.decisions, self.setup.memory
        if plan is not None:
            self.slots.valuation = self.throughput = rule = plan.rule(self.slots.estimator)
            if self.config.tree == "auto":
                readers = self.setup.tree_readers(target)
                if rule.saved >= CHECK and not rule.refused:
                    try:
                        check_trees(readers)
                    except ValueError as reason:
                        rule.refused = str(reason)
                self.slots.branches = all(map(has_read_tree, readers.values()))
                if rule.refused:
                    self.refuse(rule.refused)
        elif decisions.adapt and self.shape is None:
            self.rates = memory.recall(decisions, target, self.slots.estimator, generation, trees=True).rates
            self.slots.valuation = SlotValuation(self.rates)

    def refuse(self, reason: str) -> None:
        """Draft chains in this text; `LateRefusalError` where a kind of tree is asked for."""
        if self.config.draws_trees:
            raise LateRefusalError(reason)
        self.slots.branches, self.decided["tree"] = False, f"chains: {reason}"

    def draft(self, input_ids: Tensor, max_depth: int) -> DraftTree:
        """A tree below the last token of `input_ids` (`[1, length]`), no deeper than `max_depth`."""

        def expand(tree: DraftTree, nodes: list[int]) -> Level:
            passes = self.session.passes
            scores, hidden = self.session.expand(tree, nodes)
            if not self.processing.does_nothing:
                paths = [tree.path(node) for node in nodes]
                scores = self.processing.after_each(input_ids, paths, scores).to(scores)
            return Level(scores, hidden, self.session.embed, self.session.passes - passes)

        config, threshold = self.config, self.setup.decisions.tree_threshold
        depth = min(max_depth, self.setup.decisions.tree_depth) if self.shape is None else max_depth
        root, rule, self.unread = int(input_ids[0, -1]), self.throughput, self.session.unread
        if rule is not None and not (depth and rule.starts(self.unread)):
            return DraftTree(root)
        growth = Growth(expand, self.slots, root, depth)
        if rule is not None:
            rule.room = self.room
            rule.grow(growth, threshold)
        elif self.shape is not None:
            algorithms.grow_shape(growth, self.shape)
        elif config.tree == "dyspec":
            algorithms.grow_by_level(growth, config.tree_budget, self.pace, threshold)
        else:
            algorithms.grow_exactly(growth, config.tree_budget, threshold)
        return growth.tree

    def survival(self, tree: DraftTree) -> float:
        """The chance that all candidates of a chain stand."""
        return tree.values[-1] * self.slots.valuation.calibrated(tree.estimates[-1])

    def saw(self, tree: DraftTree, path: list[int]) -> None:
        self.session.keep(path)
        if self.throughput is not None:
            self.throughput.saw(tree, path)
        elif self.rates is not None:
            self.rates.observe_tree(tree.judged(path))


def _static_shape(setup: DraftSetup, greedy: bool) -> algorithms.Shape | None:
    """The shape of all trees; `None` where they are dynamic."""
    config, rates = setup.speculation, setup.rates.get(MODES[greedy])
    if config.tree != "static":
        return config.shape
    if not rates:
        raise ValueError(
            "tree='static' is the best shape for measured rates of acceptance, which this assistant comes without. "
            "Give a shape: tree=[4, 2, 1, 1] has four children, two for each of them, and so on."
        )
    return algorithms.best_shape(rates, config.tree_budget, setup.decisions.tree_depth)
