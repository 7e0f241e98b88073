"""`specdecpp demo` on a tiny model: equal answers, statistics, an honest verdict, clean errors."""

import re
from pathlib import Path
from unittest.mock import Mock

import pytest
from support.models import tiny
from support.mutants import accept_everything
from support.repos import save_model
from typer.testing import CliRunner

from hf_specdecpp.cli import app
from hf_specdecpp.terminal import demo
from hf_specdecpp.throughput.target_passes import TargetPasses
from hf_specdecpp.trees.drawing import DrawnTree

ARGUMENTS = ["--layers", "1", "--max-new-tokens", "12", "--prompt", "w1 w2 w3", "--prompt", "w4"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_model(tiny("llama").float(), tmp_path / "target")


@pytest.mark.parametrize("mode", [[], ["--sample"]])
def test_demo_compares_and_reports(target: str, mode: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", "--target", target, *ARGUMENTS, *mode])
    assert result.exit_code == 0, result.output
    for part in ("1/2  w1 w2 w3", "2/2  w4", "layer 0 of the target, untrained", "verdict", "times the speed of plain"):
        assert part in result.output
    assert result.output.count("equal: all 12 tokens") == (0 if mode else 2)
    assert "24 in" in result.output
    assert result.output.splitlines()[-3:] == [
        f"measure it  specdecpp bench --target {target} --layers 1 --quick",
        f"train one   specdecpp train --target {target} --data FILE --output DIR",
        "use it      assist(model, SpecDecPPAssistant.from_early_exit(model, layers=1)); model.generate(...)",
    ]
    assert "Loading weights" not in result.output


@pytest.mark.parametrize("options", [[], ["--lookup"]])
def test_without_an_assistant_candidates_are_looked_up(target: str, options: list[str]) -> None:
    """And the prompts, which suit that, are said to do so."""
    result = CliRunner().invoke(app, ["demo", "--target", target, *options, "--max-new-tokens", "4"])
    assert result.exit_code == 0, result.output
    note = "" if options else " (without --assistant or --layers)"
    assert f"assistant  text that was seen before{note}\n" in result.output
    assert "prompts    answers that repeat their prompt, which suits lookups; --prompt asks others" in result.output
    assert f"measure it  specdecpp bench --target {target} --lookup --quick" in result.output
    assert "use it      assist(model, 'lookup'); model.generate(...)" in result.output


def test_the_verdict_agrees_with_what_was_measured(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that were timed at another moment, here a thousand times too fast, do not decide."""
    seen = []
    monkeypatch.setattr(demo, "_report", lambda stats, pairs, _: seen.append((stats, pairs)))
    monkeypatch.setattr(TargetPasses, "seconds", lambda *_: (2e-6, 1e-6))
    result = CliRunner().invoke(app, ["demo", "--target", target, *ARGUMENTS])
    assert result.exit_code == 0, result.output
    [(stats, pairs)] = seen
    plain, assisted = (sum(getattr(each, name).seconds for each in pairs) for name in ("plain", "assisted"))
    assert stats.speedup == pytest.approx(plain / assisted, rel=0.5)  # prompts are left out
    assert stats.same_pass_seconds == pytest.approx(stats.plain_pass_seconds / 2)


@pytest.mark.usefixtures("assumed_costs")
def test_demo_fails_when_an_answer_differs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is real: with a verifier that accepts everything, the demo says so and exits with 1."""
    accept_everything(monkeypatch)
    result = CliRunner().invoke(app, ["demo", "--target", target, *ARGUMENTS])
    assert result.exit_code == 1
    assert re.search(r"different from token \d+ on: plain 'w\d+', assisted 'w\d+'", " ".join(result.output.split()))
    assert "answers differ" in result.output
    assert "measure it" not in result.output


def test_brackets_are_printed_as_they_are(target: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """rich would take them for markup: a prompt with a closing tag is an error, the name of an extra is lost."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(DrawnTree, "save", Mock(side_effect=ImportError))
    prompts = ["--prompt", "w1 [/INST]", "--prompt", "[bold red]w2"]
    result = CliRunner().invoke(app, ["demo", "--target", target, *ARGUMENTS[:4], *prompts, "--tree"])
    assert result.exit_code == 0, result.output
    for part in ("1/2  w1 [/INST]\n", "2/2  [bold red]w2\n", "pip install 'hf-specdecpp[train]'"):
        assert part in result.output


def test_demo_shows_a_tree(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["demo", "--target", target, *ARGUMENTS, "--tree"])
    assert result.exit_code == 0, result.output
    assert result.output.count("equal: all 12 tokens") == 2
    for part in ("The most branched tree", "draft passes", "a=0.", "trees", "Picture: tree.png"):
        assert part in result.output
    assert (tmp_path / "tree.png").read_bytes().startswith(b"\x89PNG")


def test_demo_draws_the_last_answer(target: str, tmp_path: Path) -> None:
    file = tmp_path / "demo.svg"
    result = CliRunner().invoke(app, ["demo", "--target", target, *ARGUMENTS, "--svg", str(file)])
    assert result.exit_code == 0, result.output
    assert f"Picture of the last answer: {file}" in result.output
    svg = file.read_text(encoding="utf-8").replace("&#160;", " ")
    assert "<title>w4: 12 tokens in " in svg
    assert svg.count("12 tokens in") == 4  # the title says it of both, and so do the panes
    answer = result.output.split("2/2  w4\n")[1].split("plain\n")[1].splitlines()[0].split()
    shown = " ".join(re.findall(r">([^<]*)</text>", svg)).split()
    assert all(shown.count(word) >= 2 * answer.count(word) for word in answer)
    assert "target, float32 on cpu" in svg
    assert str(tmp_path) not in svg
