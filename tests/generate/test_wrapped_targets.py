"""Targets inside wrappers, and the knobs of transformers' own assistants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import assistant_for, partly_agreeing, prompt, tiny

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig


def test_a_compiled_target_is_attached_behind_its_wrapper() -> None:
    target = tiny("llama")
    compiled: Any = torch.compile(target)
    draft = partly_agreeing(target)
    assistant = SpecDecPPAssistant.from_draft(draft, compiled, speculation=SpeculationConfig(rule="fixed"))
    plain = target.generate(prompt(), do_sample=False, max_new_tokens=20)
    assert torch.equal(
        compiled.generate(prompt(), assistant_model=assistant, do_sample=False, max_new_tokens=20), plain
    )
    assert assistant.stats.complete, "our own loop ran"
    assistant.detach(compiled)
    assert type(target).__mro__[0].__name__ == type(compiled._orig_mod).__name__
    assert "AttachedMixin" not in {base.__name__ for base in type(target).__mro__}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_assistant_tokens", 5),
        ("num_assistant_tokens_schedule", "heuristic"),
        ("assistant_confidence_threshold", 0.3),
    ],
)
def test_transformers_own_knobs_are_not_ignored_silently(name: str, value: object) -> None:
    assistant = assistant_for(tiny("llama"))
    with pytest.raises(AttributeError, match=rf"{name}.*assistant\.speculation = SpeculationConfig\(rule='fixed'"):
        setattr(assistant.generation_config, name, value)
