"""`rule="throughput"` with `tree="dyspec"`: its trees in simulated rounds, its generations."""

from typing import Any

import numpy as np
import pytest
from support.enumeration.plans import tree_plan
from support.enumeration.simulated_trees import CPU, DIP, GPU, LINE, STEP, Simulation
from support.enumeration.toy_trees import RandomDraft
from support.targets.models import assistant_for, tiny
from support.targets.tree_generation import PROMPT, sharp

from hf_specdecpp.config.costs import Costs
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.sampling.randomness import TorchRandomness
from hf_specdecpp.trees.growth import Growth, Slots


@pytest.mark.daily("mixed-seconds1-1.0-sampled", takes=2)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("kind", "seconds", "temperature"), [
    ("mixed", CPU, 1.0),
    ("mixed", DIP, 1.0),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in [("mixed", STEP, 1.6), ("sharp", LINE, 1.0), ("sharp", GPU, 1.6), ("mixed", GPU, 1.0)]
    ),
])  # fmt: skip
def test_it_is_as_fast_as_the_best_budget(kind: str, seconds: Costs, temperature: float, greedy: bool) -> None:
    best = 0.0
    for budget in (2, 8, 32):
        fixed = Simulation(kind, seconds, greedy, temperature)
        fixed.run(range(100, 250), None, budget)
        best = max(best, fixed.rate)
    ours, rule = Simulation(kind, seconds, greedy, temperature), tree_plan(seconds, 64)
    ours.run(range(300, 400), rule)
    ours.clear()
    ours.run(range(100, 250), rule)
    assert ours.rate > 0.97 * best


def test_where_verifying_costs_nothing_the_budget_is_used_up_and_where_it_costs_much_little_is_drafted() -> None:
    free, dear = Costs(0.0, (1.0,)), Costs(0.0, (1.0, 1.7, 2.4))
    sizes = []
    for seconds in (free, dear):
        simulation = Simulation("mixed", seconds, greedy=True)
        simulation.run(range(100), tree_plan(seconds, 64))
        sizes.append(simulation.drafted)
    assert sizes[0][:5] == [6, 12, 24, 48, 64], "mistakes are small before anything is known"
    assert min(sizes[0][20:]) == 64
    assert np.mean(sizes[1][20:]) < 2.0


@pytest.mark.daily("seconds1-sampled")
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("seconds", [CPU, STEP, Costs(1.5, (1.0,), read=0.01)])
def test_a_useless_draft_costs_little(seconds: Costs, greedy: bool) -> None:
    """The target says what the draft thinks unlikely."""
    simulation, rule = Simulation("sharp", seconds, greedy, temperature=-1.0), tree_plan(seconds, 64)
    simulation.run(range(500), rule)
    assert simulation.rate > 0.96
    simulation.clear()
    simulation.run(range(500), rule)
    assert simulation.rate > 0.985
    assert 0 < np.count_nonzero(simulation.drafted) < 100
    assert not rule.pays


@pytest.mark.daily("greedy")
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_bad_luck_does_not_end_speculation_and_a_draft_may_become_good(greedy: bool) -> None:
    simulation, rule = Simulation("sharp", GPU, greedy, temperature=-1.0), tree_plan(GPU, 64)
    simulation.run(range(200), rule)
    assert not rule.pays
    simulation.temperature = 1.0
    simulation.run(range(200), rule)
    assert rule.pays
    simulation.clear()
    simulation.run(range(100), rule)
    assert simulation.rate > 2.0


def test_a_threshold_is_a_lower_bound() -> None:
    rule = tree_plan(GPU, 64)
    how = Slots(DraftProbability(), TorchRandomness(), rates=rule.rates, expected=rule.expected)
    growth = Growth(RandomDraft("mixed", seed=0), how, 0, 12)
    rule.grow(growth, threshold=0.2)
    assert 0 < len(growth.tree) < 20
    assert min(growth.tree.values) >= 0.2


def test_a_round_that_has_asked_the_draft_draws_while_little_is_known() -> None:
    """Estimates of next to nothing may be wrong, which no round without candidates would show: of a greedy draft they
    are 0.001 each, and a draw has the price of 0.05."""
    draft = RandomDraft("mixed", seed=0, vocab=1000)
    draft.bounds = (0.0, 0.0)
    rule = tree_plan(Costs(0.05, tuple(1.0 + 0.05 * n for n in range(65))), 64)
    assert rule.pays

    def drawn() -> int:
        growth = Growth(draft, Slots(DraftProbability(), rates=rule.rates, expected=rule.expected), 0, 12)
        rule.grow(growth)
        return len(growth.tree)

    assert drawn() == 1
    rule.rounds = 33
    assert rule.pays
    assert drawn() == 0


@pytest.mark.parametrize("tree", ["dyspec-exact", [2, 1]], ids=str)
def test_other_trees_do_not_ask_the_rule(tree: Any) -> None:
    target = sharp(tiny("llama"))
    costs = {"draft": 0.05, "verify": [1.0, 1.0, 1.0, 1.2, 1.25]}
    assistant = assistant_for(target, mix=0.9, rule="throughput", costs=costs, tree=tree, tree_budget=5)
    target.generate(PROMPT, assistant_model=assistant, max_new_tokens=20, do_sample=False)
    assert all(learned.plan is None for learned in assistant.memory.learned.get(target, {}).values())
    assert assistant.stats.drafted >= 3 * (assistant.stats.rounds - 2)
