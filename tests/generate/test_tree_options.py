"""Dynamic trees on more families, and stop strings with each kind of tree. The rest is in `test_tree_generate.py`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.models import NEWER, assistant_for
from support.tree_generation import ARGUMENTS, PROMPT, TREES, assert_trees_mattered, generate, plain_text, target_of
from support.watchers import tokenizer

from hf_specdecpp.generation import setup


@pytest.mark.every(5)
@pytest.mark.parametrize("kind", ["dyspec", "dyspec-exact"])
@pytest.mark.parametrize("family", NEWER)
def test_dynamic_trees_on_more_families(family: str, kind: str) -> None:
    target = target_of(family)
    arguments = {**ARGUMENTS, "max_new_tokens": 60}
    assistant = assistant_for(target, mix=0.9, **TREES[kind])
    assert torch.equal(generate(target, assistant, **arguments), generate(target, **arguments))
    assert_trees_mattered(assistant.stats)


@pytest.mark.every(5)
@pytest.mark.parametrize("index", [5, 18])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("kind", TREES)
def test_stop_strings(kind: str, family: str, index: int) -> None:
    """Two tokens long, so that they may end within a path, at its end or at the token after it."""
    target = target_of(family)
    string = tokenizer().decode(plain_text(family)[0, 20 + index : 22 + index])
    arguments = {**ARGUMENTS, "stop_strings": [string], "tokenizer": tokenizer()}
    expected = generate(target, **arguments)
    assert PROMPT.shape[1] < expected.shape[1] < plain_text(family).shape[1]
    assistant = assistant_for(target, mix=0.95, **TREES[kind])
    assert torch.equal(generate(target, assistant, **arguments), expected)


@pytest.mark.every(5)
@pytest.mark.parametrize("processors", [
    {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}, {"bad_words_ids": [[3, 5], [7]]},
    {"min_length": 45, "eos_token_id": list(range(0, 48, 3)), "pad_token_id": 0},
])  # fmt: skip
@pytest.mark.parametrize("family", ["gemma3_text", "gpt2"])
@pytest.mark.parametrize("kind", TREES)
def test_processors_on_more_families(kind: str, family: str, processors: dict[str, Any]) -> None:
    target = target_of(family)
    assistant = assistant_for(target, mix=0.9, **TREES[kind])
    assert torch.equal(generate(target, assistant, **processors), generate(target, **processors))
    assert assistant.stats.accepted > 0


def test_an_unattached_assistant_says_why_it_drafts_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings: list[str] = []
    monkeypatch.setattr(setup.logger, "warning_once", warnings.append)
    target = target_of("llama")
    assistant = assistant_for(target, attached=False, mix=0.9, rule="fixed", **TREES["static"])
    generate(target, assistant)
    assert len(warnings) == 1
    assert "tree=[3, 2, 1]" in warnings[0]
    assert "chains only" in warnings[0]
    assert "assistant.attach(model)" in warnings[0]
    warnings.clear()
    assistant.attach(target)
    generate(target, assistant)
    assert warnings == []
