"""The drafting of trees (`TreeDrafting`). `drafting/chain.py` drafts chains."""

from __future__ import annotations

from typing import cast

from torch import Tensor
from transformers import GenerationConfig

from hf_specdecpp.drafting.draft import DraftingSession
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation.refusals import LateRefusalError
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.randomness import Randomness
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.tree_plan import TreePlan
from hf_specdecpp.trees import growth
from hf_specdecpp.trees.growth import Growth, Slots, check_estimator
from hf_specdecpp.trees.shapes import size
from hf_specdecpp.trees.tree import DraftTree


class TreeDrafting:
    """Drafts the token trees of one sequence, with the interface of `ChainDrafting`. `ValueError` if the estimator
    cannot estimate a candidate's acceptance before it is drawn, or `tree="static"` has no measured rates.

    Args:
        decided: `SpeculationStats.decided`; `refuse` stores its reason there.

    Attributes:
        most, limit: the largest number of nodes of any tree, and of the next one if `throughput` is set.
        throughput: decides how far trees grow, and learns from rounds (`rule="throughput"`). `None`: a fixed budget.
    """

    for_trees, rule = True, None

    def __init__(
        self, setup: DraftSetup, session: DraftingSession, processing: Processing, randomness: Randomness | None,
        eos_token_ids: frozenset[int], decided: dict[str, str],
    ) -> None:  # fmt: skip
        self.setup, self.config, self.session, self.decided = setup, setup.speculation, session, decided
        self.shape = setup.static_shape(greedy=randomness is None)
        estimator = setup.estimator if self.shape is None else DraftProbability()  # for statistics only
        check_estimator(estimator)
        self.most = self.limit = self.config.most_drafted if self.shape is None else size(self.shape)
        self.slots = Slots(estimator, randomness, eos_token_ids, embed=session.embed)
        self.processing, self.pace = processing, growth.ThresholdSchedule()
        self.makes_chains = self.config.tree == "auto"
        self.throughput: TreePlan | None = None

    def set_plan(self, plan: Plan | None, target: CausalLM, generation: GenerationConfig) -> None:
        """Called once: lets `plan` decide how trees grow or, without one, calibrates estimates (`Decisions.adapt`)."""
        if plan is not None:
            self.throughput = rule = cast(TreePlan, plan)
            self.slots.rates, self.slots.expected = rule.rates, rule.expected
            if self.config.tree == "auto":
                self.slots.branches = self.setup.tries_trees(target, rule)
                if rule.refused:
                    self.refuse(rule.refused)
        elif self.setup.decisions.adapt and self.shape is None:
            self.slots.rates = self.setup.learned_rates(target, generation, trees=True)

    def refuse(self, reason: str) -> None:
        """Draft only chains from now on, because of `reason`; `LateRefusalError` if the settings require trees."""
        if self.config.draws_trees:
            raise LateRefusalError(reason)
        self.slots.branches, self.decided["tree"] = False, f"chains: {reason}"

    @property
    def observers(self) -> list[TreeDrafting]:
        return [self]

    @property
    def branches(self) -> bool:
        return self.slots.branches

    def longest(self, room: int, most: int) -> int:
        # Removing nodes would depend on the drawn candidates, so a tree that could have too many nodes is left empty.
        # Trees of `rule="throughput"` stop at `room`.
        self.limit = min(most, self.most)
        return room if most >= (self.most if self.throughput is None else 1) else 0

    def draft(self, input_ids: Tensor, longest: int) -> DraftTree:
        """Draft a tree with at most `longest` levels of candidates after the sequence `input_ids` `[1, length]`."""

        def expand(tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
            scores, hidden = self.session.expand(tree, nodes)
            if not self.processing.does_nothing:
                paths = [tree.path(node) for node in nodes]
                scores = self.processing.after_each(input_ids, paths, scores).to(scores)
            return scores, hidden

        config, threshold = self.config, self.setup.decisions.tree_threshold
        depth = min(longest, self.setup.decisions.tree_depth) if self.shape is None else longest
        root, rule = int(input_ids[0, -1]), self.throughput
        if not depth or (rule is not None and not rule.should_draft(self.session.unread)):
            return DraftTree(root)
        grown = Growth(expand, self.slots, root, depth)
        if rule is not None:
            rule.limit = self.limit
            rule.grow(grown, threshold)
        elif self.shape is not None:
            growth.grow_shape(grown, self.shape)
        elif config.tree == "dyspec":
            growth.grow_by_level(grown, config.tree_budget, self.pace, threshold)
        else:
            growth.grow_exactly(grown, config.tree_budget, threshold)
        grown.tree.passes = self.session.passes
        return grown.tree

    def survival(self, tree: DraftTree) -> float | None:
        if not set(tree.candidates).isdisjoint(self.slots.eos_token_ids):
            return None
        return tree.values[-1] * self.slots.calibrated(tree.estimates[-1])

    def record_outcome(self, tree: DraftTree, path: list[int]) -> None:
        self.session.commit_path(path)
        if self.throughput is not None:
            self.throughput.record_outcome(tree, path)
        elif self.slots.rates is not None:
            self.slots.rates.observe_tree(tree.judged(path))
