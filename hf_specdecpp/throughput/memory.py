"""Statistics that an assistant keeps between generations, for each target (`Memory`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import GenerationConfig

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import Decisions, SpeculationConfig
from hf_specdecpp.estimation import estimators
from hf_specdecpp.estimation.estimators import MODES, AcceptanceRates, Estimator
from hf_specdecpp.lookup.looking_up import Choice
from hf_specdecpp.lookup.token_index import Answers, LookupRates
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.products import forget_product_times
from hf_specdecpp.sampling.ngram_corrections import NgramCorrections
from hf_specdecpp.throughput.known_costs import KnownCosts, Rounds, costs_of, forget_costs
from hf_specdecpp.throughput.pass_times import forget_pass_times
from hf_specdecpp.throughput.plan import BatchPlan, ChainPlan, Plan
from hf_specdecpp.throughput.tree_plan import TreePlan

T = TypeVar("T")
MOST_LEARNED = 16  # entries of a target, by way of sampling and more; the least recently used is dropped


@dataclass
class Learned:
    """Statistics of one kind of rounds: acceptance rates, and with `rule="throughput"` the plan and the settings that
    the plan was made for."""

    greedy: bool
    rates: AcceptanceRates
    plan: Plan | None = None
    settings: tuple[Any, ...] = ()


@dataclass
class LearnedOfLookups:
    """Statistics of lookups: acceptance rates of candidates, and choices between lookup and draft by kind of tree, rows
    of the batch, whether there is a draft, and whether costs are assumed (and so in passes, not in seconds)."""

    rates: LookupRates = field(default_factory=LookupRates)
    choices: dict[tuple[str, int, bool, bool], Choice] = field(default_factory=dict)


class Memory:
    """Statistics by target, and there by chains or trees, estimator and way of sampling.

    Args:
        calibration: for `"sampled"` and `"greedy"` targets the prior `line` of `AcceptanceRates`.

    Attributes:
        answers: earlier answers, in which lookups search (`lookup="history"`).
        corrections: by target, its latest distributions after recent tokens (`Decisions.draft_successors`).
    """

    def __init__(self, calibration: Mapping[str, Sequence[float]] | None = None) -> None:
        self.calibration = dict(calibration or {})
        self.answers = Answers()
        self.clear()

    def clear(self) -> None:
        """Delete statistics, `corrections` and earlier answers, so that a seeded run can be repeated."""
        self.corrections: WeakKeyDictionary[CausalLM, NgramCorrections] = WeakKeyDictionary()
        self.lookups: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], LearnedOfLookups]] = WeakKeyDictionary()
        self.learned: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], Learned]] = WeakKeyDictionary()
        self.answers.clear()

    def measure_again(self) -> None:
        """`clear()`, and delete the measured costs, pass times and matrix multiplication times of this process."""
        self.clear()
        forget_costs()
        forget_pass_times()
        forget_product_times()

    def calibrations(self) -> dict[str, list[float]]:
        """Return for `"sampled"` and `"greedy"` the `line` fitted to most candidates, else that of `calibration`."""
        found = {mode: list(line) for mode, line in self.calibration.items()}
        everything = [each for of_target in self.learned.values() for each in of_target.values()]
        for each in sorted(everything, key=lambda each: each.rates.judged):
            if each.rates.judged > 0.0:
                found[MODES[each.greedy]] = each.rates.line.tolist()
        return found

    def recall(
        self, decisions: Decisions, owner: CausalLM, estimator: Estimator, how: GenerationConfig, trees: bool = False
    ) -> Learned:
        """Return the statistics of an `owner` (the target, or without one the draft) for an estimator, a way of
        sampling (`how`), and chains or trees; new if missing."""
        greedy, count = not how.do_sample, estimators.PRIOR_COUNT if trees else estimators.BIN_COUNT
        line = self.calibration.get(MODES[greedy], estimators.UNCHANGED)
        corrections = decisions.draft_successors, decisions.draft_temperature if how.do_sample else 1.0
        key = trees, type(estimator).__name__, estimator.inputs, *_sampling(how), *corrections
        return _latest(self.learned.setdefault(owner, {}), key, lambda: Learned(greedy, AcceptanceRates(line, count)))

    def recall_lookups(self, owner: CausalLM, how: GenerationConfig) -> LearnedOfLookups:
        """Return the statistics of lookups of an `owner` (as in `recall`) for one way of sampling; new if missing."""
        return _latest(self.lookups.setdefault(owner, {}), _sampling(how), LearnedOfLookups)

    def recall_corrections(self, target: CausalLM, num_ids: int) -> NgramCorrections:
        """Return the `NgramCorrections` of a target with logits for `num_ids` ids; new if missing."""
        known = self.corrections.get(target)
        if known is None or known.num_ids != num_ids:
            known = self.corrections[target] = NgramCorrections(num_ids)
        return known

    def plan(self, config: SpeculationConfig, decisions: Decisions, rounds: Rounds, how: GenerationConfig) -> Plan:
        """Return the plan of `rule="throughput"` for these rounds, new if costs or settings have changed. `ValueError`
        if `config.costs` are invalid. `rounds.most` includes looked-up candidates; a chain plan's `most` does not."""
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
                learned.plan = kind(known, most, estimators.lag_of(rounds.estimator), learned.rates)
        return learned.plan

    def _costs(self, config: SpeculationConfig, rounds: Rounds) -> KnownCosts:
        """Return the measured costs of rounds, or constant ones if they are given or `config.reproducible`."""
        if config.costs is not None:
            given, rows = Costs.from_dict(config.costs), rounds.rows
            return KnownCosts(given if rows == 1 else given.of_row(rows, rounds.most), follows=False)
        if config.reproducible:
            return KnownCosts(rounds.formed()(rounds.assumed()), follows=False)
        return costs_of(rounds)


def _sampling(how: GenerationConfig) -> tuple[Any, ...]:
    return (how.temperature, how.top_k, how.top_p) if how.do_sample else ()


def _latest(known: dict[tuple[Any, ...], T], key: tuple[Any, ...], new: Callable[[], T]) -> T:
    """The value of a key, `new()` if missing; drops the least recently used value if there are more than 16."""
    known[key] = known.pop(key) if key in known else new()
    if len(known) > MOST_LEARNED:
        del known[next(iter(known))]
    return known[key]
