"""What an assistant has learned of each target, kept between generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationConfig

from hf_specdecpp.caches.static import width_of
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.acceptance_rates import UNCHANGED, AcceptanceRates
from hf_specdecpp.estimation.estimators import MODES, Estimator
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.chains import ThroughputState, settings_of
from hf_specdecpp.throughput.measuring import costs_of, forget_costs
from hf_specdecpp.throughput.trees import TreeThroughput

MOST_LEARNED = 16  # of a target; that of the way of sampling that was not used for the longest time goes


@dataclass
class Learned:
    """What rounds of one kind have taught.

    Attributes:
        greedy: whether the target was.
        rates: how often estimates came true.
        plan: of `rule="throughput"`, once it was used.
    """

    greedy: bool
    rates: AcceptanceRates
    plan: ThroughputState | TreeThroughput | None = None


class Memory:
    """What was learned by target, and there by chains or trees, who estimates, and how the target samples.

    `clear()` forgets what was learned, `measure_again()` also what was measured.

    Args:
        calibration: for `"sampled"` and `"greedy"` targets, the line that `AcceptanceRates` begins with.
    """

    def __init__(self, calibration: Mapping[str, Sequence[float]] | None = None) -> None:
        self.calibration = dict(calibration or {})
        self.clear()

    def clear(self) -> None:
        """Forget what was learned, so that a seeded run can be repeated."""
        self.learned: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], Learned]] = WeakKeyDictionary()

    def measure_again(self) -> None:
        """Forget what was learned, and all costs that were measured on this machine: they are measured when needed."""
        self.clear()
        forget_costs()

    def calibrations(self) -> dict[str, list[float]]:
        """For each kind of target the line that rests on most candidates, or what was given."""
        found = {mode: list(line) for mode, line in self.calibration.items()}
        everything = [each for of_target in self.learned.values() for each in of_target.values()]
        for each in sorted(everything, key=lambda each: each.rates.judged):
            if each.rates.judged > 0.0:
                found[MODES[each.greedy]] = each.rates.line.tolist()
        return found

    def recall(self, owner: CausalLM, estimator: Estimator, how: GenerationConfig, trees: bool = False) -> Learned:
        """What is known of a target; `owner` is the draft where no target is given."""
        sampling = (how.temperature, how.top_k, how.top_p) if how.do_sample else ()
        key, known = (trees, type(estimator).__name__, *sampling), self.learned.setdefault(owner, {})
        greedy = not how.do_sample
        if key not in known:
            known[key] = Learned(greedy, AcceptanceRates(self.calibration.get(MODES[greedy], UNCHANGED)))
        known[key] = known.pop(key)  # the latest last
        if len(known) > MOST_LEARNED:
            del known[next(iter(known))]
        return known[key]

    def chain_plan(
        self,
        config: SpeculationConfig,
        drafter: Drafter,
        estimator: Estimator,
        target: CausalLM | None,
        generation: GenerationConfig,
        rows: int = 1,
    ) -> ThroughputState:
        """What `rule="throughput"` knows of `target` in chains, its costs measured now if they have to be.

        Costs that rounds have shown to be wrong are measured again before the next greedy text.

        Args:
            rows: sequences in the batch.

        Raises:
            ValueError: costs are neither given nor can be measured.
        """
        learned = self.recall(drafter if target is None else target, estimator, generation)
        known = learned.plan if isinstance(learned.plan, ThroughputState) else None
        again = False
        if config.costs is None and target is not None:
            # For greedy texts only: a sampled one would not repeat with other costs.
            again = known is not None and (known.again or known.check.fails) and learned.greedy
            costs = costs_of(target, drafter, estimator, config.max_tokens, again=again, rows=rows)
            settings = settings_of(replace(config, costs=costs.to_dict()), estimator)
        else:
            costs, max_tokens, lag = settings_of(config, estimator)
            settings = costs if rows == 1 else costs.of_row(rows, max_tokens), max_tokens, lag
        if generation.cache_implementation == "static":
            settings = in_widths(settings[0], settings[1]), *settings[1:]
        if known is None or known.settings != settings:
            known = learned.plan = ThroughputState(*settings, learned.rates)
        known.again = again
        return known

    def tree_plan(
        self,
        config: SpeculationConfig,
        drafter: Drafter,
        estimator: Estimator,
        target: CausalLM,
        generation: GenerationConfig,
    ) -> TreeThroughput:
        """The same for trees."""
        most = config.tree_budget
        if config.costs is not None:
            costs = Costs.from_dict(config.costs)
        else:
            costs = costs_of(target, drafter, estimator, most, trees=True)
        learned = self.recall(target, estimator, generation, trees=True)
        known = learned.plan if isinstance(learned.plan, TreeThroughput) else None
        if known is None or known.settings != (costs, most):
            known = learned.plan = TreeThroughput(costs, most, learned.rates)
        return known


def in_widths(costs: Costs, max_tokens: int) -> Costs:
    """What rounds cost where passes are filled up with dummies, as over static caches (`caches.static`).

    Example: passes over 1, 2, 3, 4 and 5 tokens take 10, 11, 12, 13 and 14 ms, so one over 8 is expected to take 17. A
    pass over 3 tokens then costs 13 ms, and one over 5 to 8 costs 17.
    """
    verify = costs.verify_seconds(width_of(max_tokens + 1) - 1)
    return replace(costs, verify=tuple(float(verify[width_of(n) - 1]) for n in range(1, max_tokens + 2)))
