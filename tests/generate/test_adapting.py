"""`Decisions.adapt`: verification calibrates estimates, and the text stays the target's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, prompt, tiny, told

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.config.speculation import Decisions

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


@pytest.mark.every(3)
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


@pytest.mark.every(3, takes=3)
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_repeats_a_text_without_it_or_after_clearing_the_memory(kind: str) -> None:
    target = tiny("llama")
    assistant = assistant_for(target, **KINDS[kind])
    texts = [generate(target, assistant, seed) for seed in (0, 1)]
    assistant.memory.clear()
    assert [generate(target, assistant, seed) for seed in (0, 1)] == texts
    told(assistant, **KINDS[kind], adapt=False)
    assert generate(target, assistant, 0) == generate(target, assistant, 0)


def test_unattached_assistants_learn_too() -> None:
    target = tiny("llama")
    assistant = assistant_for(target, attached=False, **KINDS["threshold"])
    assert generate(target, assistant) == generate(target, None)
    (learned,) = assistant.memory.learned[assistant.drafter].values()
    assert learned.rates.rounds > 5


@pytest.mark.parametrize("kind", [{"tree": [2, 1]}, {"rule": "fixed"}])
def test_where_nothing_is_estimated_nothing_is_learned(kind: dict[str, Any]) -> None:
    target = tiny("llama")
    assistant = assistant_for(target, **kind)
    generate(target, assistant)
    assert all(each.rates.rounds == 0 for each in assistant.memory.learned.get(target, {}).values())


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
