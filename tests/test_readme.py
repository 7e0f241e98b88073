"""What the README shows works: its program, names, commands, and length."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import watchers
from support.models import tiny
from typer.main import get_command

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.config.speculation import RULES, TREES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_program_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With tiny models in the place of those that it names."""
    asked: list[Any] = []
    model = tiny("llama")

    def load(name: str, target: Any) -> SpecDecPPAssistant:
        asked.append(name)
        return SpecDecPPAssistant.from_early_exit(target, layers=1)

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda name: model)
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name: watchers.tokenizer())
    monkeypatch.setattr("hf_specdecpp.SpecDecPPAssistant.from_pretrained", load)
    two_lines, program = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[:2]
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102
    assert (ROOT / asked[0]).is_dir()
    printed = capsys.readouterr().out
    for row in ("tokens per pass", "discard rate", "time", "verdict"):
        assert re.search(rf"^{row} +\S", printed, flags=re.MULTILINE)
    names["assistant"].detach()
    plain = model.generate(**names["inputs"])
    exec(two_lines, names)  # noqa: S102
    assert names["output"].tolist() == plain.tolist()
    assert names["assistant"].stats.generated > 0
    assert asked[0] == asked[1]


def test_names_exist() -> None:
    for name in re.findall(r"SpecDecPPAssistant\.(\w+)", README):
        assert hasattr(SpecDecPPAssistant, name)


def test_commands_exist_with_their_options() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
    commands: Any = get_command(app)
    shown = re.findall(r"^specdecpp (\w+)(.*?)(?:#|$)", README, flags=re.MULTILINE)
    assert {verb for verb, _ in shown} == set(commands.commands)
    for verb, rest in shown:
        options = {name for option in commands.commands[verb].params for name in option.opts}
        assert set(re.findall(r"--[a-z_-]+", rest)) <= options


def test_it_fits_on_three_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


def test_every_rule_and_tree_is_in_the_guide_to_choosing() -> None:
    guide = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for rule in RULES:
        assert f"`{rule}`" in guide
    for tree in TREES:
        assert f'`tree="{tree}"`' in guide
