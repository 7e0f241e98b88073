"""The stopping rule that a `SpeculationConfig` names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.estimators import Estimator

if TYPE_CHECKING:
    from hf_specdecpp.throughput.chains import ThroughputState

from hf_specdecpp.drafting.stopping import SVIP, AdaEDL, Confidence, FixedLength, StoppingRule, Threshold


def make_rule(config: SpeculationConfig, estimator: Estimator, state: ThroughputState | None = None) -> StoppingRule:
    """The stopping rule that `config` names, fresh for one generation.

    Args:
        state: what `rule="throughput"` has learned; by default nothing, and then `config.costs` must be given.

    Raises:
        ValueError: from `config.validate()`.
    """
    config.validate()
    if config.rule == "throughput":
        from hf_specdecpp.throughput.chains import Throughput, ThroughputState, settings_of  # they build on this module

        return Throughput(estimator, state or ThroughputState(*settings_of(config, estimator)))
    if config.rule == "fixed":
        return FixedLength(config.num_tokens)
    if config.rule == "threshold":
        return Threshold(config, estimator)
    return {"confidence": Confidence, "svip": SVIP, "adaedl": AdaEDL}[config.rule](config)
