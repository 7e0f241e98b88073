"""What `rule="throughput"` has learned of each target, kept between generations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import GenerationConfig

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import Estimator
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.chains import ThroughputState, settings_of
from hf_specdecpp.throughput.measuring import costs_of, forget_costs
from hf_specdecpp.throughput.trees import TreeThroughput

State = TypeVar("State")

MOST_STATES = 16  # of a target; that of the way of sampling that was not used for the longest time goes


class ThroughputMemory:
    """The states of one assistant, by target and by how the target samples.

    `clear()` forgets what was learned, `measure_again()` also what was measured.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was learned, so that a seeded run can be repeated."""
        self.states: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    def measure_again(self) -> None:
        """Forget what was learned, and all costs that were measured on this machine: they are measured when needed."""
        self.clear()
        forget_costs()

    def state(
        self,
        config: SpeculationConfig,
        drafter: Drafter,
        estimator: Estimator,
        target: CausalLM | None,
        generation: GenerationConfig,
    ) -> ThroughputState:
        """What is known of `target` in chains, its costs measured now if they have to be.

        Costs that rounds have shown to be wrong are measured again before the next greedy text.

        Raises:
            ValueError: costs are neither given nor can be measured.
        """
        owner = drafter if target is None else target
        if config.costs is None and target is not None:
            known = self.states.get(target, {}).get(_key(ThroughputState, generation))
            # For greedy texts only: a sampled one would not repeat with other costs.
            again = known is not None and (known.again or known.check.fails) and not generation.do_sample
            costs = costs_of(target, drafter, estimator, config.max_tokens, again=again)
            config = replace(config, costs=costs.to_dict())
            state = self._recall(ThroughputState, settings_of(config, estimator), owner, generation)
            state.again = again
            return state
        return self._recall(ThroughputState, settings_of(config, estimator), owner, generation)

    def tree_state(
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
        return self._recall(TreeThroughput, (costs, most), target, generation)

    def _recall(
        self, make: Callable[..., State], settings: tuple[Any, ...], owner: CausalLM, how: GenerationConfig
    ) -> State:
        key, states = _key(make, how), self.states.setdefault(owner, {})
        known = states.pop(key, None)
        if known is None or known.settings != settings:
            known = make(*settings, known.rates if known is not None else None)
        states[key] = known  # the latest last
        if len(states) > MOST_STATES:
            del states[next(iter(states))]
        return known


def _key(make: Callable[..., Any], how: GenerationConfig) -> tuple[Any, ...]:
    return (make, how.temperature, how.top_k, how.top_p) if how.do_sample else (make,)
