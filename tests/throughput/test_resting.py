"""Texts that drafting does not pay for are left to the target, and nothing is noted for the draft."""

from typing import Any

import pytest
import torch
from support.models import assistant_of, prompt, tiny

from hf_specdecpp.drafting.session import ModelReading
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput import plan

DEAR: dict[str, Any] = {"rule": "throughput", "costs": {"draft": 2.0, "verify": [1.0]}}
OPTIONS: dict[str, Any] = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was done for a draft."""
    seen: list[str] = []
    begin, take = ModelReading.begin_round, TargetStates.take

    def begin_round(self: ModelReading, *args: Any) -> None:
        seen.append("read")
        begin(self, *args)

    def taken(self: TargetStates, *args: Any) -> Any:
        if (found := take(self, *args)) is not None:
            seen.append("states")
        return found

    monkeypatch.setattr(ModelReading, "begin_round", begin_round)
    monkeypatch.setattr(TargetStates, "take", taken)
    return seen


@pytest.mark.takes(3)
@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["independent", "early_exit", "conditioned"])
@pytest.mark.parametrize("tree", [None, "dyspec"])
def test_a_text_rests_until_a_probe_can_be_paid(kind: str, tree: str | None, noted: list[str]) -> None:
    target = tiny("llama")
    assistant = assistant_of(kind, target, **DEAR, tree=tree)
    plain = target.generate(prompt(), **OPTIONS)
    drafted, resting = [], 0
    for _ in range(14):
        noted.clear()
        assert torch.equal(target.generate(prompt(), assistant_model=assistant, **OPTIONS), plain)
        stats = assistant.stats
        drafted.append(stats.drafted)
        if not noted:
            resting += 1
            assert (stats.drafted, stats.idle_rounds, stats.rounds) == (0, 59, 59)
    assert drafted[0] > 0
    assert resting >= 9, "a probe costs two passes and more, which take four hundred rounds to save up"
    assert any(drafted[3:]), "a draft that has become good is found"


def test_a_draft_without_states_begins_in_the_middle(noted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama")
    assistant = assistant_of("independent", target, **DEAR)
    plain = target.generate(prompt(), **OPTIONS)
    for _ in range(2):
        target.generate(prompt(), assistant_model=assistant, **OPTIONS)
    assert assistant.stats.drafted == 0
    monkeypatch.setattr(plan, "PROBE_SHARE", 0.1)
    noted.clear()
    assert torch.equal(target.generate(prompt(), assistant_model=assistant, **OPTIONS), plain)
    assert assistant.stats.drafted > 0
    assert len(noted) < 40, "not from its beginning"
