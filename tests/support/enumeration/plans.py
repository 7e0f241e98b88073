"""What `rule="throughput"` reckons with in tests."""

from collections.abc import Sequence
from dataclasses import dataclass

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.stopping import StoppingRule
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.plan import ChainPlan
from hf_specdecpp.throughput.trees import TreePlan


@dataclass
class Drawn:
    """A round's candidates, of which only the number is known."""

    num_drawn: int

    def drawn(self, path: Sequence[int]) -> Sequence[int]:
        return path


def chain_plan(costs: Costs, most: int, lag: int = 0) -> ChainPlan:
    """Of chains, with costs that stay."""
    return ChainPlan(KnownCosts(costs, follows=False), most, lag)


def tree_plan(costs: Costs, most: int) -> TreePlan:
    return TreePlan(KnownCosts(costs, follows=False), most)


def tell(rule: StoppingRule, drafted: int, accepted: int) -> None:
    """The round is over."""
    rule.saw(Drawn(drafted), range(accepted))
