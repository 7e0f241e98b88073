"""What a text leaves for the next: verification calibrates estimates (`Decisions.adapt`), or nothing is kept."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.targets.models import assistant_for, assistant_of, configured, prompt, tiny
from torch import Tensor

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu import faster_products
from hf_specdecpp.throughput import known_costs
from hf_specdecpp.trees.attention import check_trees

KINDS: dict[str, dict[str, Any]] = {
    "threshold": {"rule": "threshold", "threshold": 0.5},
    "dyspec": {"tree": "dyspec", "tree_budget": 10},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6},
}


def generate(target: Any, assistant: SpecDecPPAssistant | None, seed: int | None = None) -> list[int]:
    arguments = {"max_new_tokens": 80, "do_sample": seed is not None}
    torch.manual_seed(seed or 0)
    text: list[int] = target.generate(prompt(), assistant_model=assistant, **arguments)[0].tolist()
    return text


@pytest.mark.daily("threshold")
@pytest.mark.parametrize("kind", KINDS)
def test_it_learns_from_generation_to_generation_and_the_greedy_text_is_the_same(kind: str) -> None:
    target = tiny("llama")
    assistant, plain = assistant_for(target, **KINDS[kind]), generate(target, None)
    for _ in range(3):
        assert generate(target, assistant) == plain
    (learned,) = assistant.memory.learned[target].values()
    assert learned.rates.rounds > assistant.stats.rounds
    assert learned.rates.line.tolist() != [0.0, 1.0]


def test_a_draft_that_is_better_than_it_says_is_believed_more() -> None:
    target = tiny("llama")
    assistant = assistant_for(target, rule="threshold", threshold=0.5)
    assistant.decisions = Decisions(adapt=False)
    generate(target, assistant)
    before = assistant.stats.drafted / assistant.stats.rounds
    assistant.decisions = Decisions()
    for _ in range(3):
        generate(target, assistant)
    assert assistant.stats.drafted / assistant.stats.rounds > before + 0.5


@pytest.mark.usefixtures("assumed_costs")
def test_a_saved_assistant_keeps_what_was_learned_if_told_to(tmp_path: Path) -> None:
    target, draft = tiny("llama"), tiny("llama", seed=1)
    draft.save_pretrained(tmp_path / "draft")
    assistant = SpecDecPPAssistant.from_draft(tmp_path / "draft", target)
    generate(target, assistant)
    generate(target, assistant, 0)
    learned = assistant.memory.calibrations()
    assert set(learned) == {"greedy", "sampled"}
    for calibration in (False, True):
        assistant.save_pretrained(tmp_path / f"{calibration}", calibration=calibration)
        loaded = SpecDecPPAssistant.from_pretrained(tmp_path / f"{calibration}", tiny("llama"))
        assert loaded.config.calibration == (learned if calibration else {})
        assert loaded.memory.calibrations() == loaded.config.calibration
    assert assistant.config.calibration == {}
    target = tiny("llama")
    loaded.attach(target)
    generate(target, loaded)
    (recalled,) = loaded.memory.learned[target].values()
    assert recalled.rates.prior.tolist() == learned["greedy"]


@pytest.mark.parametrize("calibration", [{"greedy": [1.0]}, {"greedy": [0.0, 1.0, 2.0]}, {"warm": [0.0, 1.0]}])
def test_a_calibration_that_makes_no_sense_is_refused(calibration: dict[str, list[float]]) -> None:
    with pytest.raises(ValueError, match="intercept and slope"):
        SpecDecPPAssistant.config_class.from_dict({"calibration": calibration})


# `SpeculationConfig(reproducible=True)`: a seed repeats a sampled text, whatever was generated or measured before. ----


WAYS: dict[str, dict[str, Any]] = {
    "chain": {"rule": "throughput"},
    "threshold": {"rule": "threshold", "threshold": 0.5},
    "corrected": {"rule": "throughput", "draft_successors": True},
    "tree": {"rule": "throughput", "tree": "dyspec", "tree_budget": 8},
    "tree of a budget": {"tree": "dyspec", "tree_budget": 8},
    "lookup": {"rule": "throughput", "lookup": True},
    "history": {"rule": "fixed", "lookup": "history"},
    "tree and history": {"rule": "throughput", "tree": "dyspec", "tree_budget": 8, "lookup": "history"},
}


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> CausalLM:
    monkeypatch.setattr(faster_products, "LEAST_ELEMENTS", 1)  # else the tiny model's products have no choice
    return tiny("llama", initializer_range=0.05).float()


def said(target: CausalLM, assistant: Any, ids: Tensor, seed: int) -> list[list[int]]:
    torch.manual_seed(seed)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "pad_token_id": 0}
    text: Tensor = target.generate(ids, assistant_model=assistant, attention_mask=torch.ones_like(ids), **options)
    return text.tolist()


@pytest.mark.daily("chain-1")
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("way", WAYS)
def test_a_seed_repeats_a_text_whatever_was_before(target: CausalLM, way: str, rows: int) -> None:
    settings = WAYS[way]
    if rows > 1 and "tree" in settings:
        pytest.skip("batches draft chains")
    ids = torch.cat([prompt(12, seed) for seed in range(rows)])
    assistant = assistant_of("conditioned", target, **settings, reproducible=True)
    first, drafted = said(target, assistant, ids, seed=1), assistant.stats.drafted
    configured(assistant, **settings)
    for seed in (2, 3):
        said(target, assistant, ids, seed)  # learns costs, estimates, successors and answers
    if rows == 1:
        check_trees(assistant.setup().tree_readers(target))  # as an earlier text may have done
    configured(assistant, **settings, reproducible=True)
    assert (said(target, assistant, ids, seed=1), assistant.stats.drafted) == (first, drafted)
    assert said(target, assistant_of("conditioned", target, **settings, reproducible=True), ids, seed=1) == first


def test_a_draft_of_its_own_without_a_target(target: CausalLM) -> None:
    assistant = assistant_of("independent", target, **WAYS["threshold"], reproducible=True)
    assistant.detach()
    first = said(target, assistant, prompt(), seed=1)
    said(target, assistant, prompt(seed=2), seed=2)
    assert said(target, assistant, prompt(), seed=1) == first


def test_nothing_is_kept_and_nothing_timed(target: CausalLM) -> None:
    assistant = assistant_of("independent", target, rule="throughput", lookup="history", reproducible=True)
    before = dict(known_costs._known)
    said(target, assistant, prompt(), seed=1)
    assert assistant.stats.decided["costs"] == "assumed"
    assert (assistant.stats.decided["products"], known_costs._known) == ("own, draft in int8", before)
    assert not len(assistant.memory.learned)
    assert not len(assistant.memory.answers.seen)
