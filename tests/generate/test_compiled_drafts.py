"""Compiled draft steps draft what uncompiled ones do, and are compiled once.

The fast tests trace with dynamo and run the traced operations as they are; the slow one generates code, too, which
needs a C++ compiler.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from hf_specdecpp.drafting.compiled import CompiledSession
from packaging.version import Version
from support.compiling import generate, graphs
from support.models import Rounds, assistant_for, assistant_of, prompt, quiet_later_layers, tiny

from hf_specdecpp.drafting import compiled
from hf_specdecpp.drafting.session import DraftSession
from hf_specdecpp.models.causal_lm import CausalLM

pytestmark = [
    pytest.mark.skipif(
        Version(transformers.__version__) < Version("5.23"),
        reason="makes masks that dynamo cannot trace, so nothing compiles",
    ),
    pytest.mark.usefixtures("traced_drafts"),
]

FAMILIES = ("llama", "gemma3_text", "mistral", "gpt2", "granite")
KINDS = ("independent", "early_exit", "conditioned", "eagle3")
LENGTHS = (3, 40, 230)


def outcomes(
    target: CausalLM,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
    lengths: Sequence[int] = LENGTHS,
    **speculation: Any,
) -> list[Any]:
    """Texts, and what each round drafted and accepted."""
    assistant, found = assistant_of(kind, target, **speculation), []
    for length in lengths:
        with monkeypatch.context() as patch:
            rounds = Rounds(patch)
            text = generate(target, assistant, length)
            sampled = generate(target, assistant, length, do_sample=True)
        found.append((text.tolist(), sampled.tolist(), rounds.outcomes))
    steps = assistant.ready_drafter().steps
    assert (steps is not None and steps.works) == speculation["compile"]
    return found


@pytest.mark.every(23)
@pytest.mark.parametrize("rule", ["fixed", "threshold"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_candidates_as_uncompiled(family: str, kind: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts from 3 tokens to almost a cache's room, which the texts outgrow; some, all or no candidates accepted."""
    target = quiet_later_layers(tiny(family))
    settings: dict[str, Any] = {"rule": rule, "num_tokens": 4, "threshold": 0.9}
    plain = [generate(target, None, length).tolist() for length in LENGTHS]
    ours = outcomes(target, kind, monkeypatch, compile=True, **settings)
    assert [text for text, _, _ in ours] == plain
    assert ours == outcomes(target, kind, monkeypatch, compile=False, **settings)


def test_a_roll_back_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama"))
    settings: dict[str, Any] = {"rule": "fixed", "num_tokens": 4}
    expected = outcomes(target, "early_exit", monkeypatch, LENGTHS[:1], compile=False, **settings)

    def wrong(session: CompiledSession, count: int) -> None:
        session._length -= count

    monkeypatch.setattr(CompiledSession, "_forget", wrong)
    found = outcomes(target, "early_exit", monkeypatch, LENGTHS[:1], compile=True, **settings)
    assert [text for text, _, _ in found] == [text for text, _, _ in expected], "greedy texts are verified"
    assert found != expected


@pytest.mark.parametrize(
    "kind", ["conditioned", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("independent", "eagle3"))]
)
def test_nothing_is_compiled_again(kind: str) -> None:
    """After one text of each size, whatever the lengths, the numbers of rejected candidates and the sampling."""
    target = quiet_later_layers(tiny("llama", num_hidden_layers={"independent": 1, "eagle3": 3}.get(kind, 2)))
    assistant = assistant_of(kind, target, rule="threshold", threshold=0.8, compile=True)
    for length in (5, 260, 300):
        generate(target, assistant, length)
    before = graphs()
    assert 2 <= before <= 4  # one token and several, in a cache of 256 and in any other
    for length in (1, 2, 17, 100, 249, 300, 600):
        generate(target, assistant, length)
        generate(target, assistant, length, do_sample=True, temperature=1.3)
    assert graphs() == before


def test_one_draft_for_two_targets() -> None:
    first, second = (tiny("llama", seed, num_hidden_layers=1) for seed in (0, 3))
    assistant = assistant_for(first, attached=False, mix=0.9, rule="fixed", num_tokens=3, compile=True)
    for target in (first, second, first):
        assert generate(target, assistant, 9).tolist() == generate(target, None, 9).tolist()
    known = graphs()
    assistant.attach(second)
    assert generate(second, assistant, 9).tolist() == generate(second, None, 9).tolist()
    assert graphs() == known


@torch._dynamo.config.patch(recompile_limit=2)
def test_many_assistants_are_all_compiled() -> None:
    """torch.compile counts how often a function was compiled, and gives up after eight times, here after two."""
    target = tiny("llama", num_hidden_layers=2)
    for seed in range(4):
        assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=2, compile=True)
        generate(target, assistant, 5 + seed, max_new_tokens=6)
        assert assistant.ready_drafter().steps.works


def test_caches_are_used_again() -> None:
    target = tiny("llama")
    assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=2, compile=True)
    assistant.setup()
    drafter = assistant.ready_drafter()
    sessions = [CompiledSession(drafter, 48, drafter.steps) for _ in range(2)]
    for session in sessions:
        session.begin_round(prompt(5), 0)
        with torch.inference_mode():
            session.step([])
    first, second = (session.cache for session in sessions)
    assert first is not None
    assert first is not second
    with torch.inference_mode():
        layer: Any = first.layers[0]
        layer.keys.fill_(float("nan"))  # an overflow, which a hidden row would hand on
    del sessions[0]
    third = CompiledSession(drafter, 48, drafter.steps)
    third.begin_round(prompt(5), 0)
    with torch.inference_mode():
        logits, _ = third.step([])
    assert third.cache is first
    assert logits.isfinite().all()


def test_a_draft_in_another_dtype_gets_other_steps() -> None:
    target = tiny("llama", num_hidden_layers=2)
    assistant = assistant_of("early_exit", target, rule="fixed", num_tokens=2, compile=True)
    generate(target, assistant, 9)
    assistant.detach()
    target.float()
    assistant.attach(target)
    assert generate(target, assistant, 9).tolist() == generate(target, None, 9).tolist()
    assert assistant.ready_drafter().steps.works


def test_a_changed_draft_gets_other_steps() -> None:
    """A step does not look again at the modules that it was compiled for."""
    target = tiny("llama", num_hidden_layers=1)
    assistant = assistant_of("independent", target, rule="fixed", num_tokens=2, compile=True)
    drafter = assistant.ready_drafter()
    generate(target, assistant, 9)
    for layer in drafter.model.model.layers:
        layer.mlp = torch.nn.Identity()
    assert generate(target, assistant, 9).tolist() == generate(target, None, 9).tolist()
    with torch.inference_mode():
        sessions: list[DraftSession | CompiledSession] = [
            DraftSession(drafter, 48),
            CompiledSession(drafter, 48, drafter.steps),
        ]
        for session in sessions:
            session.begin_round(prompt(5), 0)
            session.step([])
        eager, ours = (session.step([torch.tensor(7)])[0] for session in sessions)
    torch.testing.assert_close(ours, eager)


def test_up_to_the_last_position() -> None:
    """Dummies have no positions beyond the table; there the draft reads what it must, and no more."""
    target = tiny("gpt2", n_positions=64)
    assistant = assistant_of("independent", target, rule="fixed", num_tokens=5, compile=True)
    options = {"max_new_tokens": 55}
    assert generate(target, assistant, 9, **options).tolist() == generate(target, None, 9, **options).tolist()
    assert assistant.stats.accepted > 0


def test_what_cannot_be_compiled_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(function: Any, **_: Any) -> Any:
        def call(*_: Any) -> Any:
            raise torch._dynamo.exc.Unsupported("no C++ compiler\nand more", case_name="test")

        return call

    told: list[str] = []
    monkeypatch.setattr(compiled.logger, "warning", told.append)
    monkeypatch.setattr(compiled.torch, "compile", fails)
    target = tiny("llama")
    assistant = assistant_of("independent", target, rule="fixed", num_tokens=3, compile=True)
    for _ in range(2):
        assert generate(target, assistant, 9).tolist() == generate(target, None, 9).tolist()
    assert len(told) == 1
    assert "cannot be compiled here (Unsupported: no C++ compiler)" in told[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_with_generated_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    target = quiet_later_layers(tiny("llama"))
    settings: dict[str, Any] = {"rule": "fixed", "num_tokens": 4}
    expected = outcomes(target, kind, monkeypatch, compile=False, **settings)
    assert outcomes(target, kind, monkeypatch, compile=True, **settings) == expected
