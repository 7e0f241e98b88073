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
from hf_specdecpp.throughput.measuring import costs_of
from hf_specdecpp.throughput.trees import TreeThroughput

State = TypeVar("State")


class ThroughputMemory:
    """The states of one assistant, by target and by how the target samples. `clear()` forgets all of them."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget what was learned, so that a seeded run can be repeated."""
        self.states: WeakKeyDictionary[CausalLM, dict[tuple[Any, ...], Any]] = WeakKeyDictionary()

    def state(
        self,
        config: SpeculationConfig,
        drafter: Drafter,
        estimator: Estimator,
        target: CausalLM | None,
        generation: GenerationConfig,
    ) -> ThroughputState:
        """What is known of `target` in chains, its costs measured now if they have to be.

        Raises:
            ValueError: costs are neither given nor can be measured.
        """
        if config.costs is None and target is not None:
            costs = costs_of(target, drafter, estimator, config.max_tokens)
            config = replace(config, costs=costs.to_dict())
        owner = drafter if target is None else target
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
        key = (make, how.temperature, how.top_k, how.top_p) if how.do_sample else (make,)
        states = self.states.setdefault(owner, {})
        known = states.get(key)
        if known is None or known.settings != settings:
            known = states[key] = make(*settings, known.rates if known is not None else None)
        return known
