"""What an assistant has learned of each target, kept between generations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from transformers import GenerationConfig

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.estimation.estimators import (
    BIN_COUNT,
    MODES,
    PRIOR_COUNT,
    UNCHANGED,
    AcceptanceRates,
    Estimator,
    lag_of,
)
from hf_specdecpp.lookup.looking_up import Choice
from hf_specdecpp.lookup.text import Answers, LookupRates
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.products import forget_product_times
from hf_specdecpp.sampling.successors import Successors
from hf_specdecpp.throughput.known_costs import KnownCosts, Rounds, costs_of, forget_costs
from hf_specdecpp.throughput.pass_times import forget_pass_times
from hf_specdecpp.throughput.plan import BatchPlan, ChainPlan, Plan
from hf_specdecpp.throughput.trees import TreePlan

T = TypeVar("T")
MOST_LEARNED = 16  # of a target; that of the way of sampling that was not used for the longest time goes


@dataclass
class Learned:
    """What rounds of one kind have taught: how often estimates came true, and the plan of `rule="throughput"`, once it
    was used, and what it was made for."""

    greedy: bool
    rates: AcceptanceRates
    plan: Plan | None = None
    settings: tuple[Any, ...] = ()


@dataclass
class LearnedOfLookups:
    """How often candidates that were looked up were right, and what looking up and drafting have brought, by the kind
    of tree, the rows of the batch, whether anything drafts, and whether costs are assumed, in passes."""

    rates: LookupRates = field(default_factory=LookupRates)
    choices: dict[tuple[str, int, bool, bool], Choice] = field(default_factory=dict)


class Memory:
    """What was learned by target, and there by chains or trees, who estimates, and how the target samples.

    `clear()` forgets what was learned, what targets said lately and earlier answers, `measure_again()` also what rounds
    have shown of costs and products.

    Args:
        calibration: for `"sampled"` and `"greedy"` targets, the line that `AcceptanceRates` begins with.

    Attributes:
        answers: earlier ones, in which lookups search (`lookup="history"`).
        successors: by target what it said lately after each token (`Decisions.draft_successors`).
    """

    def __init__(self, calibration: Mapping[str, Sequence[float]] | None = None) -> None:
        self.calibration = dict(calibration or {})
        self.answers = Answers()
        self.clear()

    def clear(self) -> None:
        """Forget what was learned and said, so that a seeded run can be repeated, and earlier answers."""
        self.successors: WeakKeyDictionary[CausalLM, Successors] = WeakKeyDictionary()
        self.lookups: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], LearnedOfLookups]] = WeakKeyDictionary()
        self.learned: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], Learned]] = WeakKeyDictionary()
        self.answers.clear()

    def measure_again(self) -> None:
        """Forget what was learned, and costs and fastest products of this machine: rounds say them again."""
        self.clear()
        forget_costs()
        forget_pass_times()
        forget_product_times()

    def calibrations(self) -> dict[str, list[float]]:
        """For each kind of target the line that rests on most candidates, or what was given."""
        found = {mode: list(line) for mode, line in self.calibration.items()}
        everything = [each for of_target in self.learned.values() for each in of_target.values()]
        for each in sorted(everything, key=lambda each: each.rates.judged):
            if each.rates.judged > 0.0:
                found[MODES[each.greedy]] = each.rates.line.tolist()
        return found

    def recall(
        self,
        decisions: Decisions,
        owner: CausalLM,
        estimator: Estimator,
        how: GenerationConfig,
        trees: bool = False,
    ) -> Learned:
        """What is known of an `owner`, a target or the draft where none is given, and of one way of drawing."""
        greedy = not how.do_sample

        def new() -> Learned:
            count = PRIOR_COUNT if trees else BIN_COUNT
            return Learned(greedy, AcceptanceRates(self.calibration.get(MODES[greedy], UNCHANGED), count))

        temperature = decisions.draft_temperature if how.do_sample else 1.0
        key = trees, type(estimator).__name__, *_sampling(how), decisions.draft_successors, temperature
        return _latest(self.learned.setdefault(owner, {}), key, new)

    def recall_lookups(self, owner: CausalLM, how: GenerationConfig) -> LearnedOfLookups:
        """The same of candidates that were looked up."""
        return _latest(self.lookups.setdefault(owner, {}), _sampling(how), LearnedOfLookups)

    def recall_successors(self, target: CausalLM, num_ids: int, device: torch.device) -> Successors:
        """What a target said lately after each of its `num_ids` tokens, on the draft's device."""
        known = self.successors.get(target)
        if known is None or known.made_for != (num_ids, device):
            known = self.successors[target] = Successors(num_ids, device)
        return known

    def plan(self, config: SpeculationConfig, decisions: Decisions, rounds: Rounds, how: GenerationConfig) -> Plan:
        """What `rule="throughput"` knows of these rounds; `ValueError` if nothing says what they cost. `rounds`: chains
        of up to `rounds.most` candidates with those that are looked up, or trees."""
        learned = self.recall(decisions, rounds.target, rounds.estimator, how, rounds.trees)
        known = self._costs(config, rounds)
        most = rounds.most if rounds.trees else int(min(config.max_tokens, rounds.drafter.places))
        settings = known.first if not known.follows else known, most, rounds.rows
        if learned.plan is None or learned.settings != settings:
            learned.settings = settings
            if rounds.trees:
                learned.plan = TreePlan(known, most, learned.rates)
            else:
                kind = ChainPlan if rounds.rows == 1 else BatchPlan
                learned.plan = kind(known, most, lag_of(rounds.estimator), learned.rates)
        return learned.plan

    def _costs(self, config: SpeculationConfig, rounds: Rounds) -> KnownCosts:
        """What the rounds cost, which is what rounds say but where costs are given or may not follow the clock."""
        if config.costs is not None:
            given, rows = Costs.from_dict(config.costs), rounds.rows
            return KnownCosts(given if rows == 1 else given.of_row(rows, rounds.most), follows=False)
        if config.reproducible:
            return KnownCosts(rounds.formed()(rounds.assumed()), follows=False)
        return costs_of(rounds)


def _sampling(how: GenerationConfig) -> tuple[Any, ...]:
    return (how.temperature, how.top_k, how.top_p) if how.do_sample else ()


def _latest(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], new: Callable[[], T]) -> T:
    """What is known under a key, else `new`; of too many others the one goes that was not used for longest."""
    known[key] = known.pop(key) if key in known else new()
    if len(known) > MOST_LEARNED:
        del known[next(iter(known))]
    return known[key]
