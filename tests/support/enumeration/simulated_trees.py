"""Rounds of trees and chains with random distributions, whose tokens are expected ones and whose seconds are given."""

import numpy as np
import torch

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.throughput.plan import ChainPlan, Throughput
from hf_specdecpp.throughput.tree_plan import TreePlan
from hf_specdecpp.trees.growth import Growth, Slots, ThresholdSchedule, grow_by_level
from hf_specdecpp.trees.tree import Chain, DraftTree
from support.enumeration.toy_trees import RandomDraft


def verify(points: dict[int, float]) -> tuple[float, ...]:
    """Seconds of passes over 1 to 65 tokens, straight lines between the points."""
    return tuple(np.interp(np.arange(1, 66), list(points), list(points.values())).tolist())


# Target passes on a CPU with and without packed weights, on a GPU, and in between; a plain pass takes a second.
CPU = Costs(0.1, verify({1: 1.0, 3: 1.0, 4: 1.7, 8: 1.9, 16: 2.6, 33: 5.0, 65: 8.0}), branch=0.02)
STEP = Costs(0.1, verify({1: 1.0, 3: 1.0, 4: 1.7, 65: 2.2}), branch=0.01)
LINE = Costs(0.1, verify({1: 1.0, 65: 4.0}), branch=0.01)
DIP = Costs(
    0.1, verify({1: 1.0, 2: 1.3, 3: 1.5, 4: 0.9, 8: 1.0, 16: 1.4, 65: 4.0}), branch=0.01
)  # wider may be cheaper
GPU = Costs(0.15, verify({1: 1.0, 16: 1.02, 17: 1.08, 32: 1.1, 65: 1.25}), branch=0.002)


class Simulation:
    """Rounds with random distributions. What the target says is drawn from the draft's at another temperature.

    `tokens`, `seconds`: sums over all rounds, the tokens being those expected. `drafted`: number of candidates in each
    round. `branches`: whether trees may have siblings."""

    branches = True

    def __init__(self, kind: str, seconds: Costs, greedy: bool, temperature: float = 1.0) -> None:
        self.kind, self.costs, self.greedy, self.temperature = kind, seconds, greedy, temperature
        self.verify = seconds.verify_seconds(64)
        self.clear()

    def clear(self) -> None:
        self.tokens, self.seconds, self.drafted = 0.0, 0.0, list[int]()

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def run(self, rounds: range, rule: TreePlan | None, budget: int = 64) -> None:
        pace = ThresholdSchedule()
        for seed in rounds:
            torch.manual_seed(seed)
            draft = RandomDraft(self.kind, seed, vocab=100)
            randomness = None if self.greedy else TorchRandomness()
            how = Slots(DraftProbability(), randomness, branches=self.branches)
            if rule is not None:
                how.rates, how.expected = rule.rates, rule.expected
            growth = Growth(draft, how, root=0, max_depth=12)
            if rule is None:
                grow_by_level(growth, budget, pace)
            elif rule.should_draft(unread=1):
                rule.grow(growth)
            self._finish(growth.tree, draft, rule)

    def run_chains(self, rounds: range, plan: ChainPlan) -> None:
        for seed in rounds:
            torch.manual_seed(seed)
            draft, rule = RandomDraft(self.kind, seed, vocab=100), Throughput(DraftProbability(), plan)
            tokens, scores = list[int](), list[torch.Tensor]()
            plan.set_length(0)
            while (rule.should_draft(1) if not tokens else True) and len(tokens) < plan.most:
                scores.append(draft.at(tuple(tokens)))
                q = scores[-1].softmax(-1)
                tokens.append(int(q.argmax()) if self.greedy else int(q.multinomial(1)))
                if rule.stops(float(q[tokens[-1]])):
                    break
            self._finish(tree := Chain(tokens, scores), draft, None)
            says = {node: self._says(draft, tree, node) for node in range(len(tokens))}
            rule.record_outcome(tree, self._accepted(tree, says))

    def _finish(self, tree: DraftTree, draft: RandomDraft, rule: TreePlan | None) -> None:
        further = self.costs.branch * (len(tree.scores) - tree.passes)
        self.seconds += self.costs.draft * tree.passes + further + float(self.verify[len(tree)])
        says = {node: self._says(draft, tree, node) for node in range(len(tree.tokens)) if tree.children[node]}
        chances = [1.0]
        for node in range(1, len(tree.tokens)):
            parent = tree.parents[node]
            chances.append(chances[parent] * float(says[parent][tree.tokens[node]]))
        self.tokens += sum(chances)
        self.drafted.append(len(tree))
        if rule is not None:
            rule.record_outcome(tree, self._accepted(tree, says))

    def _says(self, draft: RandomDraft, tree: DraftTree, node: int) -> torch.Tensor:
        return (draft.at(tuple(tree.path(node))) / self.temperature).softmax(-1)

    def _accepted(self, tree: DraftTree, says: dict[int, torch.Tensor]) -> list[int]:
        path, node = list[int](), 0
        while node in says:
            token = int(says[node].multinomial(1))
            found = [child for child in tree.children[node] if tree.tokens[child] == token]
            if not found:
                break
            node = found[0]
            path.append(node)
        return path
