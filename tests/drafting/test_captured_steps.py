"""A draft's steps in captured rounds: passes that are wrong would be noticed, a changed draft is seen."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.capturing import CHAIN, drawn, generate
from support.models import assistant_for, assistant_of, quiet_later_layers, tiny
from support.whole_rounds import TREE

from hf_specdecpp.drafting import round_steps
from hf_specdecpp.drafting.captured_draft import CapturedDraft
from hf_specdecpp.trees.attention import inputs_in_place

pytestmark = pytest.mark.usefixtures("pretended")


def forgets_nothing(draft: CapturedDraft, read: Any, tokens: torch.Tensor, states: Any) -> None:
    """What was emitted is read behind what the draft has read of candidates."""
    draft.text.cache.length.add_(1)
    FORGET(draft, read, tokens, states)


FORGET = CapturedDraft._forget


def sees_siblings(model: Any, room: Any, ancestors: Any, *rest: Any) -> dict[str, Any]:
    return inputs_in_place(model, room, ancestors.cummax(dim=1).values, *rest)


def stands_behind_all(*args: Any) -> dict[str, Any]:
    found = inputs_in_place(*args)
    ids = found["position_ids"]
    return found | {"position_ids": ids + torch.arange(ids.shape[1])}


@pytest.mark.parametrize(("settings", "owner", "name", "mutant"), [
    (CHAIN, CapturedDraft, "_forget", forgets_nothing),
    (TREE, round_steps, "inputs_in_place", sees_siblings),
    (TREE, round_steps, "inputs_in_place", stands_behind_all),
], ids=["forgets nothing", "sees siblings", "stands behind all"])  # fmt: skip
def test_passes_that_are_wrong_are_noticed(
    settings: dict[str, Any], owner: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In what is drafted: texts are verified."""
    target = quiet_later_layers(tiny("llama"))
    assistant = assistant_of("independent", target, adapt=False, **settings)
    monkeypatch.setattr("support.capturing.LENGTHS", (3, 12))
    expected, rounds = drawn(target, assistant, sampled=False)
    monkeypatch.setattr(owner, name, mutant)
    assistant.ready_drafter().captured = None  # what is captured knows nothing of the mutant
    found, other_rounds = drawn(target, assistant, sampled=False)
    assert assistant.stats.decided["rounds"] == "captured"
    assert all(map(torch.equal, found, expected))
    assert other_rounds != rounds


def test_a_changed_draft_gets_other_steps() -> None:
    """A graph does not look again at the modules that it was captured of."""
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_of("independent", target, **CHAIN)
    generate(target, assistant)
    for layer in assistant.ready_drafter().model.model.layers:
        layer.mlp = torch.nn.Identity()
    assert torch.equal(generate(target, assistant), generate(target, None))
    found = []
    for graphs in ("auto", "off"):
        assistant.speculation.graphs = graphs
        found.append(generate(target, assistant))
        found.append(assistant.stats.accepted)
    assert torch.equal(found[0], found[2])
    assert found[1] == found[3] > 0


def test_one_draft_for_two_targets(pretended: Counter[str]) -> None:
    first, second = (tiny("llama", seed, num_hidden_layers=1) for seed in (0, 3))
    assistant = assistant_for(first, attached=False, mix=0.9, **CHAIN)
    for turn in range(2):
        before = pretended["captured"]
        for target in (first, second):
            assistant.attach(target)
            assert torch.equal(generate(target, assistant), generate(target, None))
        assert (pretended["captured"] > before) == (turn == 0)
