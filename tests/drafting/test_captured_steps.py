"""Captured steps of a draft: passes that are wrong would be noticed, caches are used again, a changed draft is seen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.capturing import CHAIN, SETTINGS, drawn, generate
from support.models import assistant_for, assistant_of, prompt, quiet_later_layers, tiny, told

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.drafting import captured
from hf_specdecpp.drafting.captured import CapturedSession
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.trees.attention import inputs_in_place

pytestmark = pytest.mark.usefixtures("pretended")


def forgets_nothing(session: CapturedSession, count: int, of: int, rows: Any = None) -> None:
    session.text.held -= of - count


def keeps_all(session: CapturedSession, path: list[int]) -> None:
    session._lineage = None


def sees_siblings(model: Any, room: Any, ancestors: Any, *rest: Any) -> dict[str, Any]:
    return inputs_in_place(model, room, ancestors.cummax(dim=1).values, *rest)


def stands_behind_all(*args: Any) -> dict[str, Any]:
    found = inputs_in_place(*args)
    ids = found["position_ids"]
    return found | {"position_ids": ids + torch.arange(ids.shape[1])}


@pytest.mark.takes(3)
@pytest.mark.parametrize(
    ("settings", "owner", "name", "mutant"),
    [
        ("lookup", CapturedSession, "_keep", forgets_nothing),
        ("static", CapturedSession, "keep", keeps_all),
        ("static", captured, "inputs_in_place", sees_siblings),
        ("static", captured, "inputs_in_place", stands_behind_all),
    ],
    ids=["forgets nothing", "keeps all", "sees siblings", "stands behind all"],
)
def test_passes_that_are_wrong_are_noticed(
    settings: str, owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is drafted: texts are verified."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, adapt=False, **SETTINGS[settings])
    monkeypatch.setattr("support.capturing.LENGTHS", (3, 12))
    expected, rounds = drawn(target, assistant, sampled=False)
    monkeypatch.setattr(owner, name, mutant)
    assistant.ready_drafter().steps = None  # what is captured knows nothing of the mutant
    found, other_rounds = drawn(target, assistant, sampled=False)
    assert all(map(torch.equal, found, expected))
    assert other_rounds != rounds


def stepped(session: Any, length: int = 5) -> torch.Tensor:
    session.begin_round(prompt(length), 0)
    with torch.inference_mode():
        logits: torch.Tensor = session.step([])[0]
    return logits


def test_caches_are_used_again() -> None:
    target = tiny("llama")
    assistant = assistant_of("early_exit", target, **CHAIN)
    drafter: Any = assistant.setup().drafter
    sessions = [CapturedSession(drafter, 48, drafter.steps) for _ in range(2)]
    for session in sessions:
        stepped(session)
    first, second = (session.text.cache for session in sessions)
    assert first is not None
    assert first is not second
    layer: Any = first.layers[0]
    layer.keys.fill_(float("nan"))  # an overflow, which a hidden row would hand on
    del sessions[0]
    third = CapturedSession(drafter, 48, drafter.steps)
    assert stepped(third).isfinite().all()
    assert third.text.cache is first


def test_the_latest_cache_is_the_first_to_be_used_again() -> None:
    """Most has been captured for it."""
    target = tiny("llama")
    drafter: Any = assistant_of("early_exit", target, **CHAIN).setup().drafter
    steps = drafter.steps
    owners = [type("Owner", (), {})() for _ in range(3)]
    small, large, last = (steps.lease(count, owner) for count, owner in zip((9, 300, 9), owners, strict=True))
    assert (small.room, large.room, last.room) == (256, 512, 256)
    while owners:
        del owners[0]
    assert steps.lease(20, target) is last
    assert steps.lease(20, target) is small
    assert steps.lease(20, target) is large


@pytest.mark.takes(2)
def test_a_draft_in_another_dtype_gets_other_steps() -> None:
    target = tiny("llama", num_hidden_layers=2)
    assistant = assistant_of("early_exit", target, **CHAIN)
    generate(target, assistant)
    steps = assistant.ready_drafter().steps
    assistant.detach()
    target.float()
    assistant.attach(target)
    assert torch.equal(generate(target, assistant), generate(target, None))
    assert assistant.ready_drafter().steps is not steps
    assert assistant.ready_drafter().steps.works


def test_a_changed_draft_gets_other_steps() -> None:
    """A graph does not look again at the modules that it was captured of."""
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_of("independent", target, **CHAIN)
    drafter: Any = assistant.ready_drafter()
    generate(target, assistant)
    for layer in drafter.model.model.layers:
        layer.mlp = torch.nn.Identity()
    assert torch.equal(generate(target, assistant), generate(target, None))
    found = []
    for session in (DraftSession(drafter, 48), CapturedSession(drafter, 48, drafter.steps)):
        stepped(session)
        with torch.inference_mode():
            found.append(session.step([torch.tensor(7)])[0])
    torch.testing.assert_close(*found)


def test_texts_of_several_threads_do_not_meet() -> None:
    """Each has its own cache, and what its steps read and return."""
    target = quiet_later_layers(tiny("llama"))
    drafter: Any = assistant_of("independent", target, **CHAIN).setup().drafter
    alone, beside, other = (CapturedSession(drafter, 48, drafter.steps) for _ in range(3))
    for session, length in ((alone, 9), (beside, 9), (other, 4)):
        stepped(session, length)
    taken: list[list[torch.Tensor]] = [[], []]
    with torch.inference_mode():
        for count in (1, 2, 3):
            for place, session in enumerate((alone, beside)):
                taken[place].append(session.step([torch.tensor(7)] * count)[0])
            other.step([torch.tensor(3)] * count)
    for ours, theirs in zip(*taken, strict=True):
        torch.testing.assert_close(ours, theirs)
    slots = drafter.steps._slots.values()
    places = [each.data_ptr() for slot in slots for each in (*slot.arguments[:1], *slot.outputs)]
    assert len(places) == len(set(places)) > 6


@pytest.mark.takes(3)
def test_one_draft_for_two_targets(pretended: Counter[str]) -> None:
    first, second = (tiny("llama", seed, num_hidden_layers=1) for seed in (0, 3))
    assistant = assistant_for(first, attached=False, mix=0.9, **CHAIN)
    for turn in range(2):
        before = pretended["captured"]
        for target in (first, second):
            assistant.attach(target)
            assert torch.equal(generate(target, assistant), generate(target, None))
        assert (pretended["captured"] > before) == (turn == 0)


def test_what_rules_captured_steps_out_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(captured.logger, "warning", said.append)
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    draft, target = tiny("llama", rope_parameters=rope), tiny("llama")
    assistant = told(SpecDecPPAssistant.from_draft(draft, target), **CHAIN)
    for _ in range(2):
        assistant.setup()
    assert len(said) == 1
    assert "rotary frequencies change" in said[0]
    assert not assistant.ready_drafter().steps.works
    assert not assistant.ready_drafter().is_captured
