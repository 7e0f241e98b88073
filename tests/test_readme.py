"""What the README shows works: names, commands, files."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import hf_specdecpp
from hf_specdecpp.config.speculation import RULES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_python_uses_what_exists() -> None:
    assert len(blocks("python")) >= 3
    for block in blocks("python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "hf_specdecpp":
                assert {alias.name for alias in node.names} <= set(hf_specdecpp.__all__)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = {"SpecDecPPAssistant": hf_specdecpp.SpecDecPPAssistant}.get(node.value.id)
                assert owner is None or hasattr(owner, node.attr)


def test_every_rule_is_explained() -> None:
    for rule in RULES:
        assert f'`"{rule}"`' in README


def test_commands_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", README)) <= targets
    verbs = {line.split()[1] for block in blocks("console") for line in block.splitlines() if "specdecpp " in line}
    for verb in sorted(verbs - {"install"}):
        shown = subprocess.run(
            [sys.executable, "-c", "from hf_specdecpp.cli import app; app()", verb, "--help"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.returncode == 0, shown.stderr


def test_links_to_files() -> None:
    for path in re.findall(r"\]\((?!https?:)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path
