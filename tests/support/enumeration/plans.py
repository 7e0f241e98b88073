"""What `rule="throughput"` reckons with in tests."""

import torch

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.drafting.chain import StoppingRule
from hf_specdecpp.throughput.known_costs import KnownCosts
from hf_specdecpp.throughput.plan import ChainPlan
from hf_specdecpp.throughput.trees import TreePlan
from hf_specdecpp.trees.tree import Chain

NO_SCORES = torch.empty(0)


def chain_plan(costs: Costs, most: int, lag: int = 0) -> ChainPlan:
    """Of chains, with costs that stay."""
    return ChainPlan(KnownCosts(costs, follows=False), most, lag)


def tree_plan(costs: Costs, most: int) -> TreePlan:
    return TreePlan(KnownCosts(costs, follows=False), most)


def tell(rule: StoppingRule, drafted: int, accepted: int) -> None:
    """The round is over."""
    rule.saw(Chain([0] * drafted, [NO_SCORES] * drafted), range(accepted))
