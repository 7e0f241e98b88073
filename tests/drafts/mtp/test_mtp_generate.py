"""Generations with multi-token layers: the target's own text, whatever rule, tree, batch, processor or cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import prompt
from support.mtp_files import DEPTH, FAMILIES, HIDDEN, HYBRID, VOCAB, Files
from support.pretend_devices import on_device, pretend_devices
from transformers import DynamicCache
from transformers.generation import candidate_generator

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.mtp.drafter import MtpDraft
from hf_specdecpp.models.causal_lm import CACHE, CausalLM
from hf_specdecpp.throughput.measuring import Rounds, conditions, measure

TEXT = 1 + prompt(9) % (VOCAB - 1)
COSTS = {"draft": 0.1, "verify": [1.0]}
CHAINS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 5},
    "threshold": {"rule": "threshold", "threshold": 0.9},
    "throughput": {"rule": "throughput", "costs": COSTS},
}
TREES: dict[str, dict[str, Any]] = {
    "dyspec": {"tree": "dyspec", "tree_budget": 8},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6},
    "static": {"tree": "static", "tree_shape": [3, 1, 1]},
    "dyspec, throughput": {"tree": "dyspec", "rule": "throughput", "tree_budget": 8, "costs": COSTS},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "processors": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "a token that ends": {"eos_token_id": 3, "pad_token_id": 0},
}


def dense(num_layers: int = 1, seed: int = 7, **more: Any) -> Files:
    """Without experts, which are slow."""
    return Files("glm4_moe", num_layers, seed, overrides={"first_k_dense_replace": DEPTH}, **more)


def check_equal(target: CausalLM, assistant: SpecDecPPAssistant, **options: Any) -> None:
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, **options}
    if "eos_token_id" in how:  # one that stands late in the text
        text = target.generate(TEXT, max_new_tokens=24, do_sample=False)[0, TEXT.shape[1] :].tolist()
        how["eos_token_id"] = max(text, key=text.index)
    expected = target.generate(TEXT, **how)
    assert torch.equal(target.generate(TEXT, assistant_model=assistant, **how), expected)
    assert assistant.stats.drafted > 0


def assisted(target: CausalLM, **settings: Any) -> SpecDecPPAssistant:
    return SpecDecPPAssistant.from_mtp(target, speculation=SpeculationConfig(**(settings or CHAINS["fixed"])))


@pytest.mark.parametrize("num_layers", [1, 3])
def test_greedy_text_with_every_rule(num_layers: int, tmp_path: Path) -> None:
    target = dense(num_layers).load(tmp_path)
    assistant = assisted(target)
    assert type(assistant.drafter) is (Drafter if num_layers == 1 else MtpDraft)
    for settings in CHAINS.values():
        assistant.speculation = SpeculationConfig(**settings)
        check_equal(target, assistant)
    assistant.speculation = SpeculationConfig(**CHAINS["fixed"])
    for options in OPTIONS.values():
        check_equal(target, assistant, **options)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0
    assert len(assistant.stats.drafted_at) == 5, "further than there are layers"


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_every_family(family: str, tmp_path: Path) -> None:
    """In chains; and in trees, where the target reads trees."""
    target = Files(family, seed=1).load(tmp_path)
    assistant = assisted(target)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0
    if family not in HYBRID:
        assistant.speculation = SpeculationConfig(**TREES["dyspec"])
        check_equal(target, assistant)
        assert assistant.stats.accepted > 0


@pytest.mark.every(3)
@pytest.mark.parametrize("settings", TREES)
def test_trees(settings: str, tmp_path: Path) -> None:
    target = dense().load(tmp_path)
    assistant = assisted(target, **TREES[settings])
    for options in OPTIONS.values():
        check_equal(target, assistant, **options)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize(("num_layers", "family"), [(1, "glm4_moe"), (2, "glm4_moe"), (1, "qwen3_next")])
def test_sampled_text_has_its_length(num_layers: int, family: str, tmp_path: Path) -> None:
    """Its distribution is enumerated in `tests/exactness/test_mtp_rounds.py`."""
    target = Files(family, num_layers).load(tmp_path)
    assistant = assisted(target)
    torch.manual_seed(0)
    output = target.generate(TEXT, assistant_model=assistant, max_new_tokens=40, do_sample=True, top_k=6)
    assert output.shape[1] == TEXT.shape[1] + 40
    assert 0 < assistant.stats.accepted < assistant.stats.drafted


@pytest.mark.parametrize(("num_layers", "settings"), [(1, CHAINS["fixed"]), (1, TREES["dyspec"]), (3, CHAINS["fixed"])])
def test_a_cache_that_is_carried_on(num_layers: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """The layers have no states of the turn before, and begin anew."""
    target = dense(num_layers).load(tmp_path)
    assistant = assisted(target, **settings)
    how: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "return_dict_in_generate": True}
    cache = {CACHE: DynamicCache(config=target.config)}
    first = target.generate(TEXT, assistant_model=assistant, **how, **cache)
    assert torch.equal(first.sequences, target.generate(TEXT, **how).sequences)
    further = torch.cat((first.sequences, TEXT), dim=1)
    second = target.generate(further, assistant_model=assistant, **how, **{CACHE: first[CACHE]})
    assert torch.equal(second.sequences, target.generate(further, **how).sequences)
    assert assistant.stats.drafted > 0


@pytest.mark.parametrize("num_layers", [1, 2])
def test_batches(num_layers: int, tmp_path: Path) -> None:
    target = dense(num_layers).load(tmp_path)
    assistant = assisted(target)
    ids = torch.cat((TEXT, torch.cat((torch.zeros(1, 4, dtype=torch.long), TEXT[:, :5]), dim=1)))
    mask = (ids > 0).long()
    how: dict[str, Any] = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "attention_mask": mask}
    output = target.generate(ids, assistant_model=assistant, **how)
    assert torch.equal(output, target.generate(ids, **how))
    assert assistant.stats.accepted > 0


@pytest.mark.parametrize("num_layers", [1, 2])
def test_a_lookup_beside_them(num_layers: int, tmp_path: Path) -> None:
    """Rounds in which nothing is drafted, and candidates that no layer has read."""
    target = dense(num_layers).load(tmp_path)
    assistant = assisted(target, rule="throughput", costs=COSTS, lookup=True)
    repeated = TEXT.repeat(1, 3)
    output = target.generate(repeated, assistant_model=assistant, max_new_tokens=30, do_sample=False)
    assert torch.equal(output, target.generate(repeated, max_new_tokens=30, do_sample=False))


@pytest.mark.parametrize("num_layers", [1, 2])
def test_costs_are_measured(num_layers: int, tmp_path: Path) -> None:
    target = dense(num_layers, dtype=torch.float32).load(tmp_path)
    assistant = SpecDecPPAssistant.from_mtp(target)
    assert assistant.speculation.rule == "throughput"
    check_equal(target, assistant)
    costs = measure(Rounds(target, assistant.drafter, assistant.estimator, 4))
    assert costs is not None
    assert costs.draft > 0
    assert costs.block == 1
    described = conditions(Rounds(target, assistant.drafter, assistant.estimator, 4, trees=False))
    assert described["reads"] == {"multi_token": True, "hidden_size": HIDDEN}
    assert described.get("multi_token_layers", 1) == num_layers


@pytest.mark.parametrize("num_layers", [1, 2])
def test_on_a_pretended_device(num_layers: int, tmp_path: Path) -> None:
    plain = dense(num_layers).load(tmp_path)
    expected = plain.generate(TEXT, max_new_tokens=20, do_sample=False)
    with pretend_devices():
        target = on_device(plain)
        assistant = assisted(target)
        output = target.generate(on_device(TEXT), assistant_model=assistant, max_new_tokens=20, do_sample=False)
        assert assistant.ready_drafter().device.type == "cuda"
        assert output.tolist() == expected.tolist()


# Refused, and left alone. ---------------------------------------------------------------------------------------------


def test_several_layers_draft_no_trees(tmp_path: Path) -> None:
    target = dense(2).load(tmp_path)
    assistant = assisted(target, **TREES["dyspec"])
    with pytest.raises(ValueError, match="has 2 multi-token layers.*differ from path to path.*tree=None"):
        target.generate(TEXT, assistant_model=assistant, max_new_tokens=4)


def test_a_hybrid_target_reads_no_trees(tmp_path: Path) -> None:
    target = Files("qwen3_next").load(tmp_path)
    assistant = assisted(target, **TREES["dyspec"])
    with pytest.raises(ValueError, match="cannot read a token tree"):
        target.generate(TEXT, assistant_model=assistant, max_new_tokens=4)


@pytest.mark.skipif(
    not hasattr(candidate_generator, "MTPCandidateGenerator"), reason="this transformers has no use_mtp to refuse"
)
def test_transformers_own_is_left_alone_but_not_mixed_in(tmp_path: Path) -> None:
    target = Files("glm4_moe", seed=1).load(tmp_path)
    assistant = assisted(target)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ValueError, match="use_mtp=True is transformers' own speculation.*from_mtp"):
        target.generate(TEXT, assistant_model=assistant, use_mtp=True, **how)
    assert torch.equal(target.generate(TEXT, use_mtp=True, **how), target.generate(TEXT, **how))
    assert assistant.stats.rounds == 0
