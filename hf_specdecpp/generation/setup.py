"""What an assistant brings to one generation, and the stopping rule that its settings name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.config.speculation import Decisions, Rule, SpeculationConfig
from hf_specdecpp.drafting.chain import FixedLength, StoppingRule, Threshold
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.estimation.acceptance_head import AcceptanceHead
from hf_specdecpp.estimation.estimators import MODES, AcceptanceRates, DraftProbability, Estimator, lag_of
from hf_specdecpp.lookup.looking_up import Choice, LookingUp
from hf_specdecpp.lookup.text import TextLookup
from hf_specdecpp.models.causal_lm import CausalLM, input_device, num_logits, num_processes
from hf_specdecpp.models.cpu.faster_products import FasterProducts, large_layers
from hf_specdecpp.models.cpu.products import ProductTimes, has_int8, int8_copy, measured_copy, product_times
from hf_specdecpp.models.cpu.weight_copies import WeightCopies
from hf_specdecpp.models.foreign import foreign_code
from hf_specdecpp.models.loading import special_ids
from hf_specdecpp.sampling.processors import Processing
from hf_specdecpp.sampling.successors import MixedProcessing, Successors
from hf_specdecpp.throughput.known_costs import KnownCosts, Rounds
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.throughput.plan import ChainPlan, Plan
from hf_specdecpp.throughput.trees import TreePlan
from hf_specdecpp.trees.attention import check_trees, has_read_tree, refuse_tree
from hf_specdecpp.trees.growth import check_estimator
from hf_specdecpp.trees.shapes import Shape, best_shape

logger = logging.get_logger("hf_specdecpp")
# Plain passes that siblings promise to save before it is tried, once, whether target and draft read trees: that takes
# about six, and what would grow below siblings is not reckoned with.
CHECK = 3.0
HISTORY = 50_000  # tokens of earlier answers, which `lookup="history"` searches


@dataclass(frozen=True)
class DraftSetup:
    """The parts that draft for a target; `SpecDecPPAssistant.setup()` makes it. A generation reads it only.

    Attributes:
        head: `None` lets the draft's own probability judge candidates.
        memory: what was learned of targets, which generations add to.
        copies, int8: exact copies of weights and int8 copies of the draft's, which a generation renews.
        rates: `SpecDecPPConfig.acceptance_by_rank`, for the best static tree.
        rows: sequences in the batch, which share the target's passes.
        is_independent: whether the draft is a model of its own.
        trainable: what could be trained and is not, of "training" (the draft) and "head".
    """

    drafter: Draft
    head: AcceptanceHead | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    decisions: Decisions = field(default_factory=Decisions)
    memory: Memory = field(default_factory=Memory)
    copies: WeightCopies = field(default_factory=lambda: WeightCopies(measured_copy))
    int8: WeightCopies = field(default_factory=lambda: WeightCopies(int8_copy))
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rows: int = 1
    is_independent: bool = False
    trainable: frozenset[str] = frozenset()
    _found: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)  # of one target

    def check(self) -> None:
        """Raise `ValueError` if the settings cannot be used, or the draft cannot do what they ask for."""
        self.speculation.validate()
        for asked, what in ((self.rows > 1, "batches"), (self.speculation.draws_trees, "trees")):
            if asked and (reason := self.drafter.cannot.get(what)) is not None:
                raise ValueError(reason)

    @property
    def estimator(self) -> Estimator:
        return self.head or DraftProbability()

    @property
    def most_tokens(self) -> int:
        return self.decisions.most_tokens(self.speculation)

    def tree_readers(self, target: CausalLM) -> dict[str, CausalLM]:
        """The models that read a round's token tree and have to be tried on one first, by their roles in messages."""
        draft = self.drafter.tree_reader
        return {"target": target} if draft is None else {"target": target, "draft": draft}

    def tries_trees(self, target: CausalLM, rule: TreePlan) -> bool:
        """Whether target and draft are known to read trees. That is tried once siblings promise to save what it takes;
        the rule is told where they do not."""
        readers = self.tree_readers(target)
        if rule.saved >= CHECK and not rule.refused:
            try:
                check_trees(readers)
            except ValueError as reason:
                rule.refused = str(reason)
        return all(map(has_read_tree, readers.values()))

    def learned_rates(self, target: CausalLM, generation: GenerationConfig, trees: bool = False) -> AcceptanceRates:
        """What rounds of a target, drawn in this way, have said of estimates."""
        return self.memory.recall(self.decisions, target, self.estimator, generation, trees).rates

    def draft_processing(
        self, processing: Processing, target: CausalLM, greedy: bool, captures: bool
    ) -> tuple[Processing, Successors | None]:
        """What makes q of the draft's logits, and what the target said lately, if it is mixed in.

        Args:
            processing: the logits processors that the draft sees.
            captures: whether rounds may be captured whole, which successors, looked up on the host, would prevent. On a
                GPU they are left out of other rounds, too: they add 12 % of launches, and 43 % in batches of four.
        """
        decisions, temperature = self.decisions, 1.0 if greedy else self.decisions.draft_temperature
        mixes = decisions.mixes(greedy, self.drafter.reads is not None)
        fits = not captures and input_device(target).type == "cpu"
        mixes = mixes and (fits or decisions.draft_successors is not None)
        if mixes and self.drafter.places:
            successors = self.memory.recall_successors(target, num_logits(target), self.drafter.device)
            return MixedProcessing(processing, successors, greedy, temperature), successors
        return processing if temperature == 1.0 else processing.cooled(temperature), None

    @property
    def remedies(self) -> frozenset[str]:
        """What could still be done for the speed (`SpeculationStats.verdict`): `trainable`; "draft", where nothing
        drafts; "throughput", where another rule decides.
        """
        is_open = {"draft": not self.drafter.places, "throughput": self.speculation.rule != "throughput"}
        return self.trainable | {name for name, value in is_open.items() if value}

    def static_shape(self, greedy: bool) -> Shape | None:
        """The shape of all trees; `None` where they are dynamic."""
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
        """Whether large layers may use copies of their weights: several processes would have to take them up in
        step."""
        config = self.speculation
        return config.cpu_products != "off" and not config.reproducible and num_processes(target) == 1

    def product_times(self, target: CausalLM) -> ProductTimes | None:
        """What products of the target's large layers take here, where they may use copies of their weights."""
        if not self.uses_copies(target):
            return None
        layer = next(large_layers([target]), None)
        return None if layer is None else product_times(layer.weight)

    @property
    def drafts_in_int8(self) -> bool:
        """Whether the draft reads a few tokens in int8: a model of its own (`docs/using.md`)."""
        wanted = self.decisions.int8_draft
        if wanted is None:
            wanted = self.is_independent and self.speculation.cpu_products == "auto"
        if not wanted or not has_int8():
            return False
        if "int8" not in self._found:
            self._found["int8"] = any(True for _ in large_layers(self.drafter.parts))
        return bool(self._found["int8"])

    def rule(self, target: CausalLM) -> Rule:
        """The stopping rule of a generation. `"throughput"` becomes `"threshold"` where costs are not given and the
        target is spread over several processes, which would have to time their passes in step."""
        if self.speculation.rule != "throughput" or self.speculation.costs is not None:
            return self.speculation.rule
        return "threshold" if num_processes(target) > 1 else "throughput"

    def decided(self, target: CausalLM, verification: str, corrects: bool, chains: str | None) -> dict[str, str]:
        """What was decided for a generation (`SpeculationStats.decided`); `chains`: why no trees are drafted."""
        config = self.speculation
        costs = "given" if config.costs is not None else "assumed" if config.reproducible else "followed"
        return {
            "rule": self.rule(target),
            "costs": costs if self.rule(target) == "throughput" else "not asked",
            "products": self.described_products(target),
            "verification": verification,
            "corrections": "on" if corrects else "off",
            "tree": "where siblings pay" if chains is None else f"chains: {chains}",
        }

    def described_products(self, target: CausalLM) -> str:
        """Which matrix products passes may take, on which their costs depend: "own", "copies", "copies int8"."""
        copies = "copies" if self.uses_copies(target) else "own"
        return f"{copies} int8" if self.drafts_in_int8 else copies

    def products(self, target: CausalLM) -> FasterProducts:
        """The context in which target and draft compute as the settings say.

        int8 copies of weights are made now, exact ones in the background; those of changed weights are dropped.
        """
        in_int8, uses_copies = self.drafts_in_int8, self.uses_copies(target)
        if not in_int8:
            self.int8.clear()
        if not uses_copies:
            self.copies.clear()
        models = [target]
        if not in_int8 and self.drafter.model is not None:
            models += self.drafter.parts
        return FasterProducts(
            *(models if self.speculation.cpu_products == "auto" else []),
            copies=self.copies if uses_copies else None,
            draft=self.drafter.parts,
            target=target,
            int8=self.int8 if in_int8 else None,
        )


def looking_up(
    setup: DraftSetup, target: CausalLM, generation: GenerationConfig, plan: Plan | None
) -> LookingUp | None:
    """The lookups of one generation, if it has any."""
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
    """Why no round of a generation drafts a tree; `None` where rounds do, where no kind of tree is asked for those in
    which siblings pay. `ValueError` where trees are asked for that a model cannot read."""
    config, drafter = setup.speculation, setup.drafter
    if config.draws_trees:  # tried before products that round more coarsely than the check allows for
        check_trees(setup.tree_readers(target))
        return None
    reasons = {
        "tree=False": config.tree is False,
        f"rule={setup.rule(target)!r} drafts none of its own accord": setup.rule(target) != "throughput",
        "nothing drafts": not drafter.places,
        "captured rounds choose their shapes themselves": captures,
        "rows of a batch share passes": setup.rows > 1,
        "the target is spread over several processes": num_processes(target) > 1,
        "logits processors are asked token by token": not processing.answers_all,
        drafter.cannot.get("trees"): "trees" in drafter.cannot,
    }
    if reason := next((reason for reason, holds in reasons.items() if holds), None):
        return reason
    if any(True for _ in foreign_code(target)):  # asked last: all modules are looked at
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
    """What `rule="throughput"` knows of the rounds of a generation, which are `trees` or chains; `ValueError` if
    nothing says what they cost."""
    config, drafter = setup.speculation, setup.drafter
    if setup.rule(target) != "throughput" or (config.draws_trees and config.tree != "dyspec"):
        return None
    most = config.most_drafted if trees else int(min(config.max_tokens, drafter.places))
    if config.lookup and not config.draws_trees:
        most = max(most, setup.decisions.lookup_tokens)
    passes = "captured" if captures else "growing"
    mixes = setup.decisions.mixes(not generation.do_sample, drafter.reads is not None)
    products = setup.described_products(target)
    times = setup.product_times(target)
    rounds = Rounds(target, drafter, setup.estimator, most, trees, setup.rows, passes, mixes, products, times)
    return setup.memory.plan(config, setup.decisions, rounds, generation)


def make_rule(
    config: SpeculationConfig,
    estimator: Estimator,
    plan: ChainPlan | None = None,
    rates: AcceptanceRates | None = None,
    min_tokens: int = 1,
) -> StoppingRule:
    """The stopping rule that `config` names, fresh for one generation; `ValueError` where `config.validate()` has one.

    Args:
        plan: what `rule="throughput"` has learned; by default nothing, and then `config.costs` must be given.
        rates: what calibrates the estimates of `rule="threshold"`, and learns from its rounds; by default nothing does.
        min_tokens (candidates): the fewest in a round of `rule="threshold"`.
    """
    config.validate()
    if config.rule == "throughput":
        return (plan or plan_for(config, estimator)).rule(estimator)
    if config.rule == "fixed":
        return FixedLength(config.num_tokens)
    return Threshold(config, estimator, rates, min_tokens)


def plan_for(config: SpeculationConfig, estimator: Estimator) -> ChainPlan:
    """A plan of chains that has learned nothing yet, with costs that are given."""
    return ChainPlan(KnownCosts.given(config.costs), config.max_tokens, lag_of(estimator))


def rule_of(
    setup: DraftSetup, target: CausalLM, generation_config: GenerationConfig, plan: Plan | None
) -> StoppingRule:
    """The rule for the chains of one generation."""
    config, rule = setup.speculation, setup.rule(target)
    config = config if config.rule == rule else replace(config, rule=rule)  # which checks all settings
    decisions, estimator = setup.decisions, setup.estimator
    if config.rule == "threshold" and setup.head is None and not decisions.adapt:
        logger.warning_once(
            "No trained acceptance head: rule='threshold' takes the draft's own probability as the chance of "
            "acceptance, which is usually too optimistic. A head trained for this draft stops at better places."
        )
    if plan is not None:
        return plan.rule(estimator)
    rates: AcceptanceRates | None = None
    if config.rule == "threshold" and decisions.adapt:
        rates = setup.learned_rates(target, generation_config)
    return make_rule(config, estimator, rates=rates, min_tokens=decisions.min_tokens)


def without_padding(new: Tensor, states: Tensor | None, mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """A prompt `[1, n]` and the target's states `[1, m, size]` in it without padding, which the target ignores.

    Example: of the prompt `[pad, pad, 5, 6]` with the mask `[0, 0, 1, 1]` 5 and 6 are left. The mask `[1, length]` is
    longer than the prompt where that continues a cache, shorter where tokens follow it.
    """
    if states is not None:
        shown = mask[0, -states.shape[1] :].bool()
        states = states[:, shown.to(states.device)] if bool(shown.any()) else states
    shown = mask[0].bool()[-new.shape[1] :]
    kept = torch.cat((new[:, : shown.shape[0]][:, shown], new[:, shown.shape[0] :]), dim=1)
    return kept if kept.shape[1] else new, states
