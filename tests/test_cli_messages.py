"""Commands speak of what they were asked: `--help` at any width, `inspect --target`, `bench` without a draft."""

from pathlib import Path
from typing import Any

import click
import pytest
from support.files.repos import chat_tokenizer, save_chat_model, save_model
from support.targets.models import partly_agreeing
from transformers import AutoModelForCausalLM
from typer.main import get_command
from typer.testing import CliRunner

from hf_specdecpp import SpecDecPPAssistant, assist
from hf_specdecpp.cli import app

VERBS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_whole_option_names(verb: str, columns: int) -> None:
    command: click.Command = get_command(app).commands[verb]  # type: ignore[attr-defined]
    done = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": str(columns), "TERMINAL_WIDTH": str(columns)})
    options = [each for each in command.params if isinstance(each, click.Option)]
    names = [name for each in options for name in (*each.opts, *each.secondary_opts)]
    assert done.exit_code == 0
    assert [name for name in names if name not in done.output] == []
    assert "…" not in done.output


def test_the_list_of_commands_has_whole_sentences() -> None:
    command: Any = get_command(app)
    shown = command.get_help(command.context_class(command, terminal_width=78))  # click leaves 2 of 80 columns empty
    lines = shown.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines if line.strip()] != []
    assert [line for line in lines if line.strip() and not line.endswith(".")] == []
    assert [line for line in lines if line.endswith("...")] == []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    target = AutoModelForCausalLM.from_pretrained(save_chat_model(folder / "target"))
    chat_tokenizer().save_pretrained(folder / "draft")
    draft = save_model(partly_agreeing(target), folder / "draft", None)
    made = SpecDecPPAssistant.from_draft(draft, target), SpecDecPPAssistant.from_early_exit(target, 1), assist(target)
    for name, each in zip(("independent", "early", "lookup"), made, strict=True):
        each.save_pretrained(folder / name)
        each.detach()
    return folder


@pytest.mark.parametrize(("repo", "words"), [
    ("independent", "measures how often a published draft agrees with a target"),
    ("early", "measures how often a published draft agrees with a target"),
    ("lookup", "measures how often a published draft agrees with a target"),
])  # fmt: skip
def test_inspect_with_a_target(repo: str, words: str, place: Path) -> None:
    done = CliRunner().invoke(app, ["inspect", str(place / repo), "--target", str(place / "target")])
    assert done.exit_code == 1
    assert words in done.output
    assert f"specdecpp bench --target {place / 'target'} --assistant {place / repo}" in done.output
    assert "convert" not in done.output


@pytest.mark.parametrize("more", [[], ["--target", "TARGET"]])
def test_inspect_of_an_ordinary_model(more: list[str], place: Path) -> None:
    words = [word.replace("TARGET", str(place / "target")) for word in more]
    done = CliRunner().invoke(app, ["inspect", str(place / "draft"), *words])
    said = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "It is an ordinary model, which needs no such repository to draft: assist(model, draft)" in said
    assert "convert" not in said


def test_bench_without_a_draft(place: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = ["bench", "--target", str(place / "target"), "--max_new_tokens", "8", "--max_prompts", "1"]
    done = CliRunner().invoke(app, [*words, "--output", str(tmp_path / "a"), "--contestants", "throughput*"])
    said = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "No contestant matches 'throughput*'." in said
    assert "'plain, same passes'" in said
    assert "All others need a draft: --assistant REPO." in said
    assert "--replay" not in said + caplog.text, "nobody asked for it"
    words += ["--output", str(tmp_path / "b"), "--contestants", "lookup", "--temperatures", "0"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "--replay" not in done.output + caplog.text


def test_a_misspelt_contestant_of_a_draft_asks_for_no_draft(place: Path, tmp_path: Path) -> None:
    words = ["bench", "--target", str(place / "target"), "--layers", "1", "--output", str(tmp_path)]
    done = CliRunner().invoke(app, [*words, "--contestants", "fxied"])
    assert "No contestant matches 'fxied'" in done.output
    assert "need a draft" not in done.output
