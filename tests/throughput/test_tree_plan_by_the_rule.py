"""`tree="auto"`: where rounds draft trees, what rules trees out, and how much faster than chains they are."""

from typing import Any

import numpy as np
import pytest
import torch
from support.enumeration.plans import chain_plan, tree_plan
from support.enumeration.simulated_trees import DIP, LINE, Simulation, verify
from support.targets.models import assistant_for, prompt, tiny
from support.targets.zoo import tiny_of
from torch import Tensor
from transformers import LogitsProcessor

from hf_specdecpp.choosing import assist
from hf_specdecpp.config.costs import Costs
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.generation import setup
from hf_specdecpp.throughput.plan import ChainPlan
from hf_specdecpp.trees import attention

# Of SmolLM2 with 16-bit products, and where each further token costs much.
CPU = Costs(0.12, verify({1: 1.0, 4: 1.25, 8: 1.37, 16: 1.79, 32: 3.0, 64: 5.5}), branch=0.012)
STEEP = Costs(0.12, verify({1: 1.0, 2: 1.6, 4: 2.0, 8: 2.9, 16: 5.0, 64: 18.0}), branch=0.05)
FLAT: dict[str, Any] = {"rule": "throughput", "costs": {"draft": 0.05, "verify": [1.0, 1.01, 1.02], "branch": 0.01}}
OPTIONS: dict[str, Any] = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}


def rate_over_chains(kind: str, costs: Costs, greedy: bool, most: int, tested: range, branches: bool = True) -> float:
    """Tokens per second of trees relative to chains in the rounds `tested`, after 100 rounds of learning."""
    chains, plan = Simulation(kind, costs, greedy, 1.0), chain_plan(costs, most)
    trees, rule = Simulation(kind, costs, greedy, 1.0), tree_plan(costs, most)
    trees.branches = branches
    for rounds in (range(300, 400), tested):
        chains.clear()
        trees.clear()
        chains.run_chains(rounds, plan)
        trees.run(rounds, rule)
    return trees.rate / chains.rate


@pytest.mark.daily("costs1-sharp-greedy", takes=5)
@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", ["mixed", "sharp", "unsure"])
@pytest.mark.parametrize("costs", [CPU, STEEP, LINE, DIP])
def test_trees_by_the_rule_are_never_behind_chains(costs: Costs, kind: str, greedy: bool) -> None:
    """On the very rounds of the chains, once both have learned; a quarter faster at most of these costs."""
    assert rate_over_chains(kind, costs, greedy, 20, range(1000, 1150)) > 0.98


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_growth_crosses_a_step_of_the_costs(greedy: bool) -> None:
    """The third candidate alone is not worth its pass; with those after it, it is. No tree has siblings."""
    costs = Costs(0.2, verify({1: 1.0, 2: 1.1, 3: 1.6, 64: 1.8}), branch=0.02)
    assert rate_over_chains("sharp", costs, greedy, 12, range(1000, 1100), branches=False) > 0.97


# In generations. ------------------------------------------------------------------------------------------------------


@pytest.mark.daily("False-True", takes=3)
@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("steep", [False, True])
def test_siblings_come_once_they_promise_to_save_what_trying_the_models_takes(steep: bool, lookup: bool) -> None:
    target = tiny("llama")
    settings = {**FLAT, "costs": {"draft": 0.05, "verify": [1.0, 1.9, 2.8]}} if steep else FLAT
    assistant = assistant_for(target, mix=0.9, **settings, lookup=lookup)
    plain, trees = target.generate(prompt(), **OPTIONS), []
    for _ in range(4):
        assert torch.equal(target.generate(prompt(), assistant_model=assistant, **OPTIONS), plain)
        trees.append((sum(assistant.stats.tree_depths), target in attention._passed))
    assert assistant.stats.decided["tree"] == "where siblings are worth their time"
    assistant.speculation = SpeculationConfig(tree=[2, 1])
    target.generate(prompt(), assistant_model=assistant, **OPTIONS)
    assert assistant.stats.decided["tree"] == "in every round"
    assert trees[0] == (0, False), "a chain is a tree of one branch, with lookups too"
    assert (trees[-1][0] > 0, trees[-1][1]) == ((False, False) if steep else (True, True))


class InOrder(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


@pytest.mark.parametrize(("settings", "options", "reason"), [
    ({**FLAT, "tree": False}, {}, "tree=False"),
    ({"rule": "fixed"}, {}, "rule='fixed' drafts none"),
    ({"rule": "threshold"}, {}, "rule='threshold' drafts none"),
    (FLAT, {"logits_processor": [InOrder()]}, "token by token"),
    (FLAT, {"input_ids": prompt().expand(2, -1)}, "rows of a batch"),
])  # fmt: skip
def test_what_rules_trees_out(
    settings: dict[str, Any], options: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "CHECK", 0.0)
    assistant = assistant_for(target := tiny("llama"), **settings)
    options = {"input_ids": prompt(), **OPTIONS, "max_new_tokens": 12, **options}
    text = target.generate(assistant_model=assistant, **options)
    assert torch.equal(text, target.generate(**options))
    assert reason in assistant.stats.decided["tree"]
    assert not assistant.stats.tree_depths


def test_lookups_alone_draft_no_trees() -> None:
    lookups = assist(target := tiny("llama"), "lookup", default=False)
    target.generate(prompt(), assistant_model=lookups, **OPTIONS)
    assert lookups.stats.decided["tree"] == "chains: nothing drafts"


@pytest.mark.parametrize("why", ["hook", "head", "family", "misread", "held"])
def test_who_cannot_read_trees_drafts_chains_in_silence(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second text on the chains are those of `tree=False`, wherever the reason is known before."""
    monkeypatch.setattr(setup, "CHECK", 0.0)
    target = tiny_of("bloom") if why == "family" else tiny("llama")
    assistant, options = assistant_for(target, **FLAT), OPTIONS | {"max_new_tokens": 24}
    if why == "hook":
        target.register_forward_hook(lambda *_: None)
    elif why == "head":
        monkeypatch.setattr(DraftProbability, "inputs", "after")
    elif why == "misread":
        monkeypatch.setattr(attention, "tree_error", lambda _: 1.0)
    ids = prompt() % target.config.vocab_size
    if why == "held":  # the last token, too, which the prompt reads again
        options |= {"past_key_values": target(ids).past_key_values}
    for _ in range(1 if why == "held" else 2):
        target.generate(ids, assistant_model=assistant, **options)
    assert assistant.stats.decided["tree"].startswith("chains: ")
    assert not assistant.stats.tree_depths
    assert assistant.stats.drafted > 0
    learned = next(reversed(assistant.memory.learned[target].values()))
    assert isinstance(learned.plan, ChainPlan) is (why not in ("held", "misread"))


def test_the_setting() -> None:
    assert SpeculationConfig().tree == SpeculationConfig(tree=None).tree == "auto"
    assert SpeculationConfig.from_dict({"tree": None}).tree == "auto", "as earlier versions stored it"
    assert SpeculationConfig.from_dict(SpeculationConfig(tree=False).to_dict()).tree is False
    kinds: list[Any] = ["auto", False, "dyspec", [2, 1]]
    assert [SpeculationConfig(tree=each).draws_trees for each in kinds] == [False, False, True, True]
    assert "tree=False" in repr(assistant_for(tiny("llama"), tree=False))


def test_a_trial_is_a_chain_of_its_length() -> None:
    """With what was learned of wrong costs, as in chains."""
    plan = tree_plan(CPU, 20)
    plan.trials = [3, 0, 1]
    simulation = Simulation("mixed", CPU, greedy=True)
    simulation.run(range(3), plan)
    assert simulation.drafted == [3, 0, 1], "the second round drafts nothing"
    assert np.isfinite(plan.rate)
