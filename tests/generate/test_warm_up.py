"""After `assistant.warm_up` nothing is compiled any more, and nothing else has changed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.compiling import graphs
from support.models import assistant_of, prompt, quiet_later_layers, tiny
from transformers import CompileConfig

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput import measuring
from hf_specdecpp.throughput.own_passes import OwnPasses
from hf_specdecpp.warming import passes

pytestmark = [
    pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="drafts are not compiled there"),
    pytest.mark.usefixtures("traced_drafts"),
]

LONGEST = 320  # two sizes of a draft's cache
SHORT = 60  # one
COSTS = {"draft": 0.1, "verify": [1.0, 1.0, 1.05, 1.1, 1.2]}
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 9},
    "throughput": {"rule": "throughput", "costs": COSTS, "max_tokens": 9},
    "lookup": {"rule": "fixed", "num_tokens": 2, "lookup": True, "lookup_tokens": 12},
    "dyspec": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 4},
    "dyspec throughput": {"tree": "dyspec", "rule": "throughput", "costs": COSTS, "tree_budget": 15, "tree_depth": 4},
    "dyspec of 70": {"tree": "dyspec", "tree_budget": 70, "tree_depth": 4},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 7, "tree_depth": 4},
    "static": {"tree": "static", "tree_shape": [3, 2, 1], "lookup": True, "tree_budget": 12},
}
KINDS = ("independent", "early_exit", "conditioned", "eagle3")


def options(config: CompileConfig, **further: Any) -> dict[str, Any]:
    return {"cache_implementation": "static", "compile_config": config, "pad_token_id": 0, **further}


def texts(target: CausalLM, assistant: SpecDecPPAssistant, config: CompileConfig) -> None:
    """Short and long, greedy and sampled, up to the last token that there is room for."""
    for length, further in ((3, 20), (12, 30), (250, 30), (LONGEST - 20, 20)):
        for how in ({"do_sample": False}, {"do_sample": True, "temperature": 1.3}):
            target.generate(prompt(length), assistant_model=assistant, max_new_tokens=further, **options(config), **how)


def warmed(kind: str, name: str, config: CompileConfig, longest: int = LONGEST) -> tuple[CausalLM, SpecDecPPAssistant]:
    layers = {"independent": 1, "eagle3": 3}.get(kind, 2)  # few are traced in less time
    target = quiet_later_layers(tiny("llama", num_hidden_layers=layers))
    assistant = assistant_of(kind, target, compile=True, **SETTINGS[name])
    assert assistant.warm_up(longest, compile_config=config) > 0.0
    return target, assistant


@pytest.mark.every(23)
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_afterwards(kind: str, name: str, traced_only: CompileConfig) -> None:
    target, assistant = warmed(kind, name, traced_only)
    compiled = graphs()
    assert compiled >= 4
    texts(target, assistant, traced_only)
    assert graphs() == compiled
    assert assistant.stats.accepted > 0


def test_what_is_left_out_is_compiled_later(traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail, by target and draft."""
    for owner, name in ((OwnPasses, "settle"), (passes, "warm_up_steps")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, lambda *_: None)
            target, assistant = warmed("independent", "fixed", traced_only, SHORT)
        compiled = graphs()
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, **options(traced_only))
        assert graphs() > compiled, name


@pytest.mark.usefixtures("untraced")
def test_nothing_is_learned(traced_only: CompileConfig) -> None:
    """What a text finds and leaves is the same with and without; torch's generators stay as they are."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    assistant = assistant_of(
        "conditioned", target, compile=True, lookup=True, lookup_memory=100, **SETTINGS["threshold"]
    )
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=20, **options(traced_only, do_sample=True))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    stats, learned = copy.deepcopy(assistant.stats), assistant.memory.calibrations()
    answers, speculation = len(assistant.memory.answers.seen), assistant.speculation
    assistant.warm_up(SHORT, compile_config=traced_only, do_sample=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert assistant.stats == stats
    assert assistant.memory.calibrations() == learned
    assert assistant.memory.learned[target].keys() == {(False, "DraftProbability", 1.0, 50, 1.0, False, 1.0)}
    assert len(assistant.memory.answers.seen) == answers
    assert assistant.speculation is speculation


@pytest.mark.usefixtures("untraced")
def test_costs_are_measured_and_stay(traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    assistant = assistant_of("conditioned", target, rule="throughput", max_tokens=3, compile=True)
    monkeypatch.setattr(measuring, "_known", {})
    monkeypatch.setattr(measuring, "TARGET_SECONDS", 0.01)
    assistant.warm_up(SHORT, compile_config=traced_only)
    (known,) = measuring._known.values()
    first = known.at(10)
    assistant.warm_up(SHORT, compile_config=traced_only)
    assert list(measuring._known.values()) == [known]
    assert known.at(10) is first
    assert not assistant.memory.learned


@pytest.mark.usefixtures("untraced")
def test_what_cannot_be_warmed_up_is_said(traced_only: CompileConfig) -> None:
    target = tiny("llama", num_hidden_layers=2)
    assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=2)
    with pytest.raises(ValueError, match="Nothing is compiled here"):
        assistant.warm_up(LONGEST)
    with pytest.raises(ValueError, match="Nothing is compiled here"):
        assistant.warm_up(LONGEST, compile_config=traced_only, disable_compile=True)
    for length in (3, 12.5, True):
        with pytest.raises(ValueError, match="whole number of tokens, at least"):
            assistant.warm_up(length)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_beams=2"):
        assistant.warm_up(LONGEST, num_beams=2)
    with pytest.raises(ValueError, match="A batch of 2"):
        assistant.warm_up(LONGEST, num_return_sequences=2, do_sample=True)
    assistant.warm_up(SHORT, compile_config=traced_only)
    assistant.detach()
    with pytest.raises(ValueError, match="attached to 0 targets"):
        assistant.warm_up(LONGEST)
    short = tiny("gpt2", n_positions=64)
    with pytest.raises(ValueError, match="at most 64"):
        assistant_of("early_exit", short, rule="fixed", num_tokens=2, compile=True).warm_up(65)


def test_either_alone(traced_only: CompileConfig) -> None:
    """A target with a draft that runs as ever, and a draft beside a target that does."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers=2))
    assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=3)
    assistant.warm_up(LONGEST, compile_config=traced_only)
    compiled = graphs()
    assert compiled == 3  # over 1, 2 and 4 tokens
    texts(target, assistant, traced_only)
    assert graphs() == compiled
    assistant.speculation = SpeculationConfig("fixed", num_tokens=3, compile=True)
    assistant.warm_up(SHORT, cache_implementation=None)
    assert graphs() > compiled
    compiled = graphs()
    for length in (3, 12):
        target.generate(prompt(length), assistant_model=assistant, max_new_tokens=30, pad_token_id=0, do_sample=False)
    assert graphs() == compiled
