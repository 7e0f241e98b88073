"""Generations with Gemma 4 assistants: the target's own text, and in each round what is drafted after reading anew."""

from typing import Any

import pytest
import torch
from support.gemma4_files import VARIANTS, VOCAB, WITH_GENERATOR, other_pairs, target_for
from support.models import prompt
from support.pretend_graph import pretend_graphs
from support.rounds_anew import Ear, check_rounds
from transformers import DynamicCache

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.causal_lm import CACHE, CausalLM

TEXT = 1 + prompt(9) % (VOCAB - 1)
SETTINGS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 5},
    "throughput": {"rule": "throughput", "costs": {"draft": 0.1, "verify": [1.0]}},
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
    "static": {"tree": [3, 2, 1]},
}


def assisted(target: CausalLM, name: str = "plain", **settings: Any) -> SpecDecPPAssistant:
    speculation = SpeculationConfig(**{"rule": "threshold", **(settings or SETTINGS["fixed"])})
    return SpecDecPPAssistant.from_draft(VARIANTS[name].theirs(), target=target, speculation=speculation)


def test_a_text_whose_cache_the_draft_reads_is_captured_in_whole_rounds_alone() -> None:
    target = target_for()
    assistant = assisted(target, rule="fixed", num_tokens=5, lookup=True)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16, "pad_token_id": 0}
    plain = target.generate(TEXT, **options)
    with pretend_graphs() as counts:
        assert torch.equal(target.generate(TEXT, assistant_model=assistant, **options), plain)
        assert assistant.stats.uncaptured == "lookups are made on the host"
        assert not counts
        assistant.speculation.lookup = False
        assert torch.equal(target.generate(TEXT, assistant_model=assistant, **options), plain)
        assert assistant.stats.uncaptured is None
        assert counts["replayed"] == 2 * assistant.stats.rounds + 1  # a pass that is compared with the target's own


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", ["fixed", "throughput", "dyspec", "static"])
@pytest.mark.parametrize("name", VARIANTS)
def test_sampled_rounds_draft_what_they_say(name: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_for(VARIANTS[name].of)
    assistant = assisted(target, name, **SETTINGS[settings])
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    torch.manual_seed(0)
    target.generate(TEXT, assistant_model=assistant, max_new_tokens=16, do_sample=True, temperature=1.5)
    assert 0 < assistant.stats.accepted < assistant.stats.drafted
    ear.check(target)


@pytest.mark.parametrize("settings", ["fixed", "dyspec"])
@pytest.mark.parametrize("name", ["unified", "images"])
def test_other_classes(name: str, settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, theirs = other_pairs()[name]
    speculation = SpeculationConfig(**{"rule": "threshold", **SETTINGS[settings]})
    assistant = SpecDecPPAssistant.from_draft(theirs, target=target, speculation=speculation)
    check_rounds(target, assistant, TEXT, monkeypatch, max_new_tokens=16)


def test_a_cache_without_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made without the target's config it holds every token, of which the draft sees a window."""
    target = target_for()
    assistant = assisted(target)
    ear = Ear(assistant.ready_drafter(), monkeypatch)
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
    output = target.generate(TEXT, assistant_model=assistant, **how, **{CACHE: DynamicCache()})
    assert torch.equal(output, target.generate(TEXT, **how))
    ear.check(target)


# Refused. -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["static", "offloaded"])
def test_caches_in_another_order(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = target_for()
    assistant = assisted(target)
    monkeypatch.setattr(DynamicCache, "offload", lambda *_: None)
    with pytest.raises(ValueError, match="reads the keys and values in the target's cache.*cache_implementation unset"):
        target.generate(TEXT, assistant_model=assistant, max_new_tokens=4, cache_implementation=implementation)


def test_together_with_transformers_own() -> None:
    target = target_for()
    with pytest.raises(ValueError, match="speculation_type='dflash' is transformers' own"):
        target.generate(TEXT, assistant_model=assisted(target), max_new_tokens=4, speculation_type="dflash")


@WITH_GENERATOR
@pytest.mark.parametrize("is_attached", [False, True])
def test_transformers_own_is_left_alone(is_attached: bool) -> None:
    theirs, target = VARIANTS["plain"].theirs(), target_for()
    assistant = assisted(target) if is_attached else None
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    output = target.generate(TEXT, assistant_model=theirs, **how)
    assert torch.equal(output, target.generate(TEXT, **how))
    assert assistant is None or assistant.stats.rounds == 0
