"""The parts of an assistant that a generation uses (`DraftSetup`), and its plan, stopping rule and lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import Decisions, Rule, SpeculationConfig
from hf_specdecpp.drafting.chain import FixedLength, StoppingRule, Threshold
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import MODES, AcceptanceRates, DraftProbability, Estimator, lag_of
from hf_specdecpp.lookup.looking_up import Choice, LookingUp
from hf_specdecpp.lookup.token_index import TextLookup
from hf_specdecpp.models.causal_lm import CausalLM, input_device, num_logits, num_processes
from hf_specdecpp.models.cpu.faster_products import FasterProducts, large_layers
from hf_specdecpp.models.cpu.products import ProductTimes, has_int8, product_times
from hf_specdecpp.models.cpu.weight_copies import WeightCopies
from hf_specdecpp.models.foreign import foreign_code
from hf_specdecpp.models.loading import special_ids
from hf_specdecpp.sampling.ngram_corrections import Mixing, NgramCorrections
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.throughput.known_costs import KnownCosts, Rounds
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.throughput.plan import ChainPlan, Plan, Throughput
from hf_specdecpp.throughput.tree_plan import TreePlan
from hf_specdecpp.trees.attention import check_trees, has_read_tree, refuse_tree
from hf_specdecpp.trees.growth import check_estimator
from hf_specdecpp.trees.shapes import Shape, best_shape

# Plain passes that siblings would have saved before target and draft are tested, once, for reading trees. That test
# takes about five passes; savings by descendants of siblings are not counted.
CHECK = 3.0
HISTORY = 50_000  # tokens of earlier answers that `lookup="history"` searches


@dataclass(frozen=True)
class DraftSetup:
    """References to the parts of an assistant, made by `SpecDecPPAssistant.setup()` for one generation."""

    drafter: Draft
    head: AcceptanceHead | None  # `None`: q of the draft estimates acceptance
    speculation: SpeculationConfig
    decisions: Decisions
    memory: Memory  # what generations have learned; they update it, as well as the copies of weights
    copies: WeightCopies  # exact copies of weights, for faster multiplications on a CPU
    int8: WeightCopies  # int8 copies of the draft's weights
    rates: Mapping[str, Sequence[float]]  # `SpecDecPPConfig.acceptance_by_rank`
    is_independent: bool  # whether the draft is a separate model
    # Unused ways to be faster, for the verdict: "training" of the draft, a "head", with lookups a "draft" model, and
    # with another rule "throughput".
    remedies: frozenset[str]
    rows: int = 1  # number of sequences in the batch

    def check(self) -> None:
        """Raise `ValueError` if settings are invalid, or the draft does not support batches or the configured trees."""
        self.speculation.validate()
        for asked, what in ((self.rows > 1, "batches"), (self.speculation.draws_trees, "trees")):
            if asked and (reason := self.drafter.cannot.get(what)) is not None:
                raise ValueError(reason)

    @property
    def estimator(self) -> Estimator:
        return self.head or DraftProbability()

    def described_estimator(self, target: CausalLM) -> str:
        """Which estimates of acceptance decide how far to draft: "q" (the draft's), a head's name, or "unused"."""
        config = self.speculation
        if config.tree not in ("dyspec", "dyspec-exact") and (config.draws_trees or self.rule(target) == "fixed"):
            return "unused"
        if self.head is None:
            return "q"
        return "confidence head of the draft" if self.head.is_published else f"acceptance head, {self.head.inputs}"

    @property
    def most_tokens(self) -> int:
        return self.decisions.most_tokens(self.speculation)

    def tree_readers(self, target: CausalLM) -> dict[str, CausalLM]:
        """The models that read token trees, and must pass a test first: "target" and, if it does, "draft"."""
        draft = self.drafter.tree_reader
        return {"target": target} if draft is None else {"target": target, "draft": draft}

    def tries_trees(self, target: CausalLM, rule: TreePlan) -> bool:
        """Whether target and draft have passed the test that they read trees correctly. The test runs here, once
        siblings would have saved `CHECK` passes; the reason for a failure is stored in `rule`."""
        readers = self.tree_readers(target)
        if rule.saved >= CHECK and not rule.refused:
            try:
                check_trees(readers)
            except ValueError as reason:
                rule.refused = str(reason)
        return all(map(has_read_tree, readers.values()))

    def learned_rates(self, target: CausalLM, generation: GenerationConfig, trees: bool = False) -> AcceptanceRates:
        """Acceptance rates of earlier rounds with this target and this way of sampling, of chains or `trees`."""
        return self.memory.recall(self.decisions, target, self.estimator, generation, trees).rates

    def draft_processing(
        self, processing: Processing, target: CausalLM, greedy: bool, captures: bool
    ) -> tuple[Processing, NgramCorrections | None]:
        """Returns the processing of the draft's logits: a temperature or mixing with the target's latest choices, then
        `processing`; and these choices, or `None` if they are not mixed in. `captures`: as in `plan_of`."""
        decisions, temperature = self.decisions, 1.0 if greedy else self.decisions.draft_temperature
        corrections = None
        mixes = decisions.mixes(greedy, self.drafter.reads is not None) and self.drafter.places > 0
        # By default for CPUs only: on a GPU mixing adds 12 % of launches, and 43 % in batches of four.
        fits = not captures and input_device(target).type == "cpu"
        if mixes and (fits or decisions.draft_successors is not None):
            corrections = self.memory.recall_corrections(target, num_logits(target))
            processing = Processing([Mixing(corrections, greedy), *processing.processors])
        return processing if temperature == 1.0 else processing.cooled(temperature), corrections

    def static_shape(self, greedy: bool) -> Shape | None:
        """The fixed shape of all trees, if any. `ValueError` if `tree="static"` has no measured rates for a shape."""
        config, rates = self.speculation, self.rates.get(MODES[greedy])
        if config.tree != "static":
            return config.shape
        if not rates:
            raise ValueError(
                "tree='static' is the best shape for measured rates of acceptance, which this assistant comes without. "
                "Give a shape: tree=[4, 2, 1, 1] has four children, two for each of them, and so on."
            )
        return best_shape(rates, config.tree_budget, self.decisions.tree_depth)

    def uses_copies(self, target: CausalLM) -> bool:
        """Whether large layers may use copies of weights: not on several processes, which would not switch together."""
        config = self.speculation
        return config.cpu_products != "off" and not config.reproducible and num_processes(target) == 1

    def product_times(self, target: CausalLM) -> ProductTimes | None:
        """Measured times of the target's large layers with and without copies; `None` if copies are not used."""
        if not self.uses_copies(target):
            return None
        layer = next(large_layers([target]), None)
        return None if layer is None else product_times(layer.weight)

    @cached_property
    def drafts_in_int8(self) -> bool:
        """Whether the draft uses int8 in passes over few tokens: by default separate models do, on CPUs with int8."""
        wanted = self.decisions.int8_draft
        if wanted is None:
            wanted = self.is_independent and self.speculation.cpu_products == "auto"
        return wanted and has_int8() and any(True for _ in large_layers(self.drafter.parts))

    def rule(self, target: CausalLM) -> Rule:
        """The name of a generation's stopping rule: that of the settings, but `"threshold"` for `"throughput"` without
        given costs if the target runs on several processes, which would measure different times."""
        rule, costs = self.speculation.rule, self.speculation.costs
        return "threshold" if rule == "throughput" and costs is None and num_processes(target) > 1 else rule

    def decided(
        self, target: CausalLM, greedy: bool, processing: Processing, corrects: bool, chains: str | None
    ) -> dict[str, str]:
        """The first entries of `SpeculationStats.decided`. `chains`: why no trees are drafted (`why_chains`)."""
        config, sampled = self.speculation, self.decisions.verification if processing.answers_all else "token"
        costs = "given" if config.costs is not None else "assumed" if config.reproducible else "followed"
        trees = "in every round" if config.draws_trees else "where siblings are worth their time"
        return {
            "rule": self.rule(target),
            "costs": costs if self.rule(target) == "throughput" else "unused",
            "estimates": self.described_estimator(target),
            "verification": "equality" if greedy else sampled,
            "corrections": "on" if corrects else "off",
            "tree": trees if chains is None else f"chains: {chains}",
        }

    def described_products(self, target: CausalLM) -> str:
        """The matrix multiplications for which costs hold: "own" or "copies", with " int8" if the draft uses int8."""
        copies = "copies" if self.uses_copies(target) else "own"
        return f"{copies} int8" if self.drafts_in_int8 else copies

    def products(self, target: CausalLM) -> FasterProducts:
        """A context in which target and draft use the configured, faster matrix multiplications. int8 copies of weights
        are made now, exact copies in the background; copies of changed weights are deleted."""
        copies = self.copies if self.uses_copies(target) else None
        int8 = self.int8 if self.drafts_in_int8 else None
        if int8 is None:
            self.int8.clear()
        if copies is None:
            self.copies.clear()
        return FasterProducts(target, self.drafter.parts, copies=copies, int8=int8)


def looking_up(
    setup: DraftSetup, target: CausalLM, generation: GenerationConfig, plan: Plan | None
) -> LookingUp | None:
    """The lookups of one generation, which find candidates in earlier text; `None` if they are off."""
    config, drafter, memory = setup.speculation, setup.drafter, setup.memory
    if not config.lookup:
        return None
    memory.answers.most = HISTORY if config.lookup == "history" else 0
    earlier = memory.answers.seen if config.lookup == "history" else None
    special = special_ids(generation, target.config, target.config.get_text_config())
    text = TextLookup(special, num_logits(target), earlier)
    learned = memory.recall_lookups(target, generation)
    draws, choice = drafter.places > 0, None
    if plan is not None:
        key = str(config.tree), setup.rows, draws, plan.known.is_assumed
        if key not in learned.choices:
            learned.choices[key] = Choice(plan.plain, plan.price if draws else None)
        choice = learned.choices[key]
    most = config.tree_budget if config.draws_trees else setup.decisions.lookup_tokens
    return LookingUp(text, learned.rates, most, draws, plan, choice)


def why_chains(setup: DraftSetup, target: CausalLM, captures: bool, processing: Processing) -> str | None:
    """The reason why a generation drafts chains only; `None` if it may draft trees. With `tree="auto"` a round then has
    siblings only if they are worth their time. `ValueError` if settings require trees that a model cannot read."""
    config, drafter = setup.speculation, setup.drafter
    if config.draws_trees:  # before int8, whose rounding errors are too large for the test
        check_trees(setup.tree_readers(target))
        return None
    reasons = {
        "tree=False": config.tree is False,
        f"rule={setup.rule(target)!r} drafts none of its own accord": setup.rule(target) != "throughput",
        "nothing drafts": not drafter.places,
        "reproducible=True": config.reproducible,  # the test for reading trees is run once earlier texts suggest trees
        "captured rounds choose their shapes themselves": captures,
        "rows of a batch share passes": setup.rows > 1,
        "the target is spread over several processes": num_processes(target) > 1,
        "logits processors are asked token by token": not processing.answers_all,
        drafter.cannot.get("trees"): "trees" in drafter.cannot,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    if any(True for _ in foreign_code(target)):  # last, because this checks all modules
        return "others' code runs in the target's forward"
    try:
        check_estimator(setup.estimator)
        for role, model in setup.tree_readers(target).items():
            refuse_tree(model, role)
    except ValueError as refusal:
        return str(refusal)
    return None


def plan_of(
    setup: DraftSetup, target: CausalLM, generation: GenerationConfig, captures: bool, trees: bool = False
) -> Plan | None:
    """The plan of `rule="throughput"` for a generation with `trees` or chains; `None` for other rules, and for trees
    with a fixed shape or budget. `captures`: whether whole rounds may run as CUDA graphs."""
    config, drafter = setup.speculation, setup.drafter
    if setup.rule(target) != "throughput" or (config.draws_trees and config.tree != "dyspec"):
        return None
    most = config.most_drafted if trees else int(min(config.max_tokens, drafter.places))
    if config.lookup and not config.draws_trees:
        most = max(most, setup.decisions.lookup_tokens)
    mixes = setup.decisions.mixes(not generation.do_sample, drafter.reads is not None)
    products = setup.described_products(target)
    times = setup.product_times(target)
    rounds = Rounds(target, drafter, setup.estimator, most, trees, setup.rows, captures, mixes, products, times)
    return setup.memory.plan(config, setup.decisions, rounds, generation)


def make_rule(
    config: SpeculationConfig,
    estimator: Estimator,
    plan: ChainPlan | None = None,
    rates: AcceptanceRates | None = None,
    min_tokens: int = 1,
) -> StoppingRule:
    """A new stopping rule for one generation, by `config.rule`; `ValueError` for invalid settings.

    Args:
        plan: decides for `rule="throughput"`; by default a new one, which needs `config.costs`.
        rates: calibrates the estimates of `rule="threshold"`, and learns from rounds; by default no calibration.
        min_tokens: least number of candidates in a round of `rule="threshold"`.
    """
    config.validate()
    if config.rule == "throughput":
        return Throughput(estimator, plan_for(config, estimator) if plan is None else plan)
    if config.rule == "fixed":
        return FixedLength(config.num_tokens)
    return Threshold(config, estimator, rates, min_tokens)


def plan_for(config: SpeculationConfig, estimator: Estimator) -> ChainPlan:
    """A new plan of `rule="throughput"` for chains, with `config.costs`; `ValueError` if no costs are given."""
    costs = Costs.from_dict(config.costs or {})
    return ChainPlan(KnownCosts(costs, follows=False), config.max_tokens, lag_of(estimator))


def rule_of(
    setup: DraftSetup, target: CausalLM, generation_config: GenerationConfig, plan: Plan | None
) -> StoppingRule:
    """A new stopping rule for the chains of one generation; `plan` is the result of `plan_of`."""
    config, rule, decisions = setup.speculation, setup.rule(target), setup.decisions
    config = config if config.rule == rule else replace(config, rule=rule)  # which checks all settings
    learns = config.rule == "threshold" and decisions.adapt
    rates = setup.learned_rates(target, generation_config) if learns else None
    return make_rule(config, setup.estimator, cast("ChainPlan | None", plan), rates, decisions.min_tokens)


def without_padding(new: Tensor, states: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """Remove masked tokens from the prompt `new` `[1, n]`, and their states from the target's `states` `[1, m, size]`.
    The `mask` `[1, length]` may be longer, if the prompt continues a cache, or shorter, if later tokens have no mask.

    Example: the prompt `[pad, pad, 5, 6]` with the mask `[0, 0, 1, 1]` becomes `[5, 6]`."""
    if states is not None:
        shown = mask[0, -states.shape[1] :].bool()
        states = states[:, shown.to(states.device)] if bool(shown.any()) else states
    shown = mask[0].bool()[-new.shape[1] :]
    kept = torch.cat((new[:, : shown.shape[0]][:, shown], new[:, shown.shape[0] :]), dim=1)
    return kept if kept.shape[1] else new, states  # a fully masked prompt stays
