"""What an assistant brings to one generation, and the stopping rule that its settings name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from transformers import GenerationConfig
from transformers.utils import logging

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.draft import Draft
from hf_specdecpp.drafting.stopping import FixedLength, StoppingRule, Threshold
from hf_specdecpp.estimation.acceptance_rates import AcceptanceRates
from hf_specdecpp.estimation.estimators import DraftProbability, Estimator, lag_of
from hf_specdecpp.estimation.head import AcceptanceHead
from hf_specdecpp.lookup.choice import Choice
from hf_specdecpp.lookup.looking_up import LookingUp
from hf_specdecpp.lookup.text import TextLookup
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu_products import FasterProducts, Part, can_be_packed, large_layers
from hf_specdecpp.models.products import PackedWeights, has_int8, quantise
from hf_specdecpp.models.vocabulary import special_ids
from hf_specdecpp.throughput.chains import ChainPlan
from hf_specdecpp.throughput.known_costs import KnownCosts, Rounds
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.throughput.plan import Plan
from hf_specdecpp.throughput.target_passes import parts_of

logger = logging.get_logger("hf_specdecpp")


@dataclass(frozen=True)
class DraftSetup:
    """The parts that draft for a target; `SpecDecPPAssistant.setup()` makes it. A generation reads it only.

    Attributes:
        drafter: the draft.
        head: the acceptance head, or `None`: then the draft's own probability takes its place.
        speculation: the settings of a run.
        memory: what was learned of targets, which generations add to.
        packed: packed copies of weights, which a generation renews.
        int8: int8 copies of the draft's, likewise.
        rates: `SpecDecPPConfig.acceptance_by_rank`, for static trees without a shape.
        rows: sequences in the batch, which share the target's passes.
        vocab_size: width of the target's logits, where no target says it.
        trainable: what could be trained and is not, of "training" (the draft) and "head".
    """

    drafter: Draft
    head: AcceptanceHead | None = None
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    memory: Memory = field(default_factory=Memory)
    packed: PackedWeights = field(default_factory=PackedWeights)
    int8: PackedWeights = field(default_factory=lambda: PackedWeights(quantise))
    rates: Mapping[str, Sequence[float]] = field(default_factory=dict)
    rows: int = 1
    vocab_size: int | None = None
    trainable: frozenset[str] = frozenset()

    def remedies(self, target: CausalLM | None) -> frozenset[str]:
        """What could still be done for the speed (`SpeculationStats.verdict`): `trainable`; "draft", where nothing
        drafts; and settings that are not used and could be, of "throughput", "int8_draft" and "pack_weights".
        """
        if target is None:
            return self.trainable
        config, drafter, shared = self.speculation, self.drafter, set(target.modules())
        large = [] if drafter.is_captured else large_layers(drafter.parts)
        packs = config.cpu_products == "auto" and any(map(can_be_packed, large_layers([target])))
        is_open = {
            "draft": not drafter.places,
            "throughput": config.rule != "throughput",
            "int8_draft": not config.int8_draft and has_int8() and any(layer not in shared for layer in large),
            "pack_weights": not config.pack_weights and packs,
        }
        return self.trainable | {name for name, value in is_open.items() if value}

    def products(self, target: CausalLM | None) -> FasterProducts:
        """The context in which target and draft compute as `cpu_products`, `pack_weights` and `int8_draft` say.

        Copies of weights are made, checked or dropped now. Where no target is given, which is the unattached door,
        there are none: nothing would say when they are no longer needed.
        """
        config = self.speculation
        packs = config.cpu_products == "auto" and config.pack_weights and target is not None
        in_int8 = config.int8_draft and target is not None and not self.drafter.is_captured
        if in_int8 and not has_int8():
            logger.warning_once("int8_draft=True: this PyTorch has no int8 products, so the draft runs in float32.")
            in_int8 = False
        if not in_int8:
            self.int8.clear()
        packed, int8 = self.packed if packs else None, self.int8 if in_int8 else None
        parts: list[Part] = []
        if config.cpu_products == "auto":
            parts = parts_of(target, None if in_int8 or self.drafter.is_captured else self.drafter, config)
        if not any("packed" in part.ways.products for part in parts):
            self.packed.clear()
        draft = [] if self.drafter.is_captured else self.drafter.parts
        return FasterProducts(*parts, packed=packed, draft=draft, target=target, int8=int8)


def looking_up(
    setup: DraftSetup,
    target: CausalLM | None,
    generation: GenerationConfig,
    plan: Plan | None,
) -> LookingUp | None:
    """The lookups of one generation, if it has any.

    Args:
        plan: of `rule="throughput"`.
    """
    config, drafter, memory = setup.speculation, setup.drafter, setup.memory
    if not config.lookup:
        return None
    models = [] if target is None else [target.config, target.config.get_text_config()]
    width = setup.vocab_size if target is None else target.config.get_text_config().vocab_size
    memory.answers.most = config.lookup_memory
    text = TextLookup(special_ids(generation, *models), width, memory.answers.seen if config.lookup_memory else None)
    learned = memory.recall_lookups(drafter if target is None else target, generation)
    draws, choice = drafter.places > 0, None
    if plan is not None:
        key = config.tree, setup.rows, draws, plan.known.is_assumed
        if key not in learned.choices:
            learned.choices[key] = Choice(plan.plain, plan.price if draws else None)
        choice = learned.choices[key]
    most = config.tree_budget if config.tree is not None and target is not None else config.lookup_tokens
    return LookingUp(text, learned.rates, most, draws, plan, choice)


def plan_of(setup: DraftSetup, target: CausalLM | None, generation: GenerationConfig, captures: bool) -> Plan | None:
    """What `rule="throughput"` knows of the rounds of one generation; `None` for other rules.

    Args:
        captures: whether the target's passes are captured, as far as they can be.

    Raises:
        ValueError: nothing says what a round costs.
    """
    config, drafter = setup.speculation, setup.drafter
    trees = config.tree is not None and target is not None
    if config.rule != "throughput" or (trees and config.tree != "dyspec"):
        return None
    if trees:
        most = config.tree_budget
    else:
        most = int(min(config.max_tokens, drafter.places))
        most = max(most, config.lookup_tokens) if config.lookup else most
    is_static = generation.cache_implementation == "static"
    passes = "captured" if captures else "static" if is_static and setup.rows == 1 else "growing"
    mixes = config.mixes(not generation.do_sample, drafter.reads is not None)
    estimator = setup.head or DraftProbability()
    rounds = Rounds(target, drafter, estimator, most, trees, setup.rows, passes, mixes, config.products)
    return setup.memory.plan(config, rounds, generation)


def make_rule(
    config: SpeculationConfig,
    estimator: Estimator,
    plan: ChainPlan | None = None,
    rates: AcceptanceRates | None = None,
) -> StoppingRule:
    """The stopping rule that `config` names, fresh for one generation.

    Args:
        plan: what `rule="throughput"` has learned; by default nothing, and then `config.costs` must be given.
        rates: what calibrates the estimates of `rule="threshold"`, and learns from its rounds; by default nothing does.

    Raises:
        ValueError: from `config.validate()`.
    """
    config.validate()
    if config.rule == "throughput":
        return (plan or plan_for(config, estimator)).rule(estimator)
    if config.rule == "fixed":
        return FixedLength(config.num_tokens)
    return Threshold(config, estimator, rates)


def plan_for(config: SpeculationConfig, estimator: Estimator) -> ChainPlan:
    """A plan of chains that has learned nothing yet, with costs that are given."""
    return ChainPlan(KnownCosts.given(config.costs), config.max_tokens, lag_of(estimator))


def rule_of(
    setup: DraftSetup, target: CausalLM | None, generation_config: GenerationConfig, plan: Plan | None
) -> StoppingRule:
    """The rule for the chains of one generation; `target` is `None` in transformers' own loop."""
    config, estimator = setup.speculation, setup.head or DraftProbability()
    if config.tree is not None:
        logger.warning_once(
            f"tree={config.tree!r}: transformers' own loop verifies chains only, so this assistant drafts chains. "
            "Attach it to the target for trees: assistant.attach(model)."
        )
    if config.rule == "threshold" and setup.head is None and not config.adapt:
        logger.warning_once(
            "No trained acceptance head: rule='threshold' takes the draft's own probability as the chance of "
            "acceptance, which is usually too optimistic. A head trained for this draft stops at better places."
        )
    if plan is not None:
        return plan.rule(estimator)
    if not (config.adapt and config.rule == "threshold"):
        return make_rule(config, estimator)
    learned = setup.memory.recall(config, setup.drafter if target is None else target, estimator, generation_config)
    return make_rule(config, estimator, rates=learned.rates)
