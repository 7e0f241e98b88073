"""The examples: their imports exist, they say how to run them, and the quick ones run."""

from __future__ import annotations

import ast
import importlib
import runpy
import sys
from pathlib import Path

import pytest
from support.models import tiny
from support.repos import save_model

from hf_specdecpp import SpecDecPPAssistant

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_imports_exist_and_the_docstring_says_how_to_run_it(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_specdecpp"):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)
    assert f"python examples/{file.name}" in (ast.get_docstring(tree) or "")


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama")
    target = save_model(model, tmp_path / "target")
    SpecDecPPAssistant.from_early_exit(model, 1).save_pretrained(tmp_path / "assistant")
    monkeypatch.setattr(sys, "argv", ["generate.py", target, str(tmp_path / "assistant")])
    runpy.run_path(str(FOLDER / "generate.py"))
    text, *statistics = capsys.readouterr().out.splitlines()
    assert len(text.split()) == 37  # of them 5 are the prompt's
    assert statistics[-1].startswith("verdict")


def test_round_overhead(capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(FOLDER / "round_overhead.py"))["main"]
    main.__globals__.update(NEW_TOKENS=4, REPETITIONS=1, LENGTHS=(2,))
    main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:3] == ["attached", "unattached", "stock"]
    assert [row.split(",")[0] for row in rows] == ["greedy", "sampled"]
