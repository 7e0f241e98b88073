"""What one round runs of the package: counted in functions and files, which no clock disturbs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from support.models import assistant_for, prompt, tiny

import hf_specdecpp
from hf_specdecpp.generation.decoding import AssistedDecoding

OURS = str(Path(hf_specdecpp.__file__).parent)
# Frames of their own until Python 3.12.
COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>")
CHAINS: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 3},
    "threshold": {"rule": "threshold"},
}
TREE: dict[str, Any] = {"rule": "fixed", "tree": "dyspec", "tree_budget": 8}


def run_by_rounds(monkeypatch: pytest.MonkeyPatch, speculation: dict[str, Any]) -> list[set[tuple[str, str]]]:
    """The files and functions of each round but the first two of the second text of an assistant."""
    found: list[set[tuple[str, str]]] = []
    original = AssistedDecoding.round

    def watched(self: AssistedDecoding) -> None:
        seen: set[tuple[str, str]] = set()

        def note(frame: Any, event: str, _: object) -> None:
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(OURS) and code.co_name not in COMPREHENSIONS:
                seen.add((code.co_filename, f"{code.co_name} at line {code.co_firstlineno}"))

        sys.setprofile(note)
        try:
            original(self)
        finally:
            sys.setprofile(None)
        found.append(seen)

    target = tiny("llama").float()
    assistant = assistant_for(target, mix=0.9, **speculation)
    monkeypatch.setattr(AssistedDecoding, "round", watched)
    for _ in range(2):
        found.clear()
        target.generate(prompt(9), assistant_model=assistant, max_new_tokens=30, do_sample=False)
    return found[2:]


def check(rounds: list[set[tuple[str, str]]], functions: int, files: int) -> None:
    assert len(rounds) > 3
    # Some rounds learn, which takes a few functions more.
    usual = sorted(rounds, key=len)[len(rounds) // 2]
    assert len(usual) <= functions, sorted(usual)
    assert len({file for file, _ in usual}) <= files


@pytest.mark.parametrize("rule", CHAINS)
def test_a_chain_is_few_functions(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check(run_by_rounds(monkeypatch, CHAINS[rule]), functions=60, files=10)


def test_a_tree_is_few_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    check(run_by_rounds(monkeypatch, TREE), functions=110, files=14)
