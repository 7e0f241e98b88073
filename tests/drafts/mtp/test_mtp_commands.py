"""`--mtp`: the commands draft with the target's own multi-token layers."""

import json
from pathlib import Path

import pytest
import torch
from support.mtp_files import VOCAB, dense
from support.repos import WORDS, tokenizer
from typer.testing import CliRunner, Result

from hf_specdecpp.cli import app

QUICK = ["--max_new_tokens", "8"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    folder = dense(dtype=torch.float32).save(tmp_path / "target")
    tokenizer(WORDS[:VOCAB]).save_pretrained(folder)
    return str(folder)


def run(*arguments: str, said: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=said)


@pytest.mark.parametrize(
    ("options", "note"),
    [(("--mtp",), ""), (("--mtp", "--lookup"), ""), ((), " (without --assistant or --layers)")],
    ids=["alone", "with lookups", "by default"],
)
def test_demo(target: str, options: tuple[str, ...], note: str) -> None:
    result = run("demo", "--target", target, *options, *QUICK, "--prompt", "w1 w2 w3")
    assert result.exit_code == 0, result.output
    assert f"assistant  multi-token layers of {target}{note}\n" in result.output
    assert "equal: all 8 tokens" in result.output
    assert f"specdecpp bench --target {target} --mtp --quick" in result.output
    assert "use it      assist(model, 'mtp'); model.generate(...)" in result.output


def test_chat(target: str) -> None:
    result = run("chat", "--target", target, "--mtp", *QUICK, "--temperature", "0", said="w1 w2 w3\n")
    assert result.exit_code == 0, result.output
    assert f"assistant  multi-token layers of {target}\n" in result.output
    assert result.output.splitlines()[-1] == f"measure it  specdecpp bench --target {target} --mtp --quick"


@pytest.mark.parametrize("options", [("--mtp",), ()], ids=["asked for", "by default"])
def test_bench(target: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3"}))
    result = run(
        "bench", "--target", target, *options, *QUICK, "--data", str(tmp_path / "questions.jsonl"), "--temperatures",
        "0", "--contestants", "plain,fixed 3", "--output", str(tmp_path / "bench"), "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert not json.loads((tmp_path / "bench" / "results.json").read_text())["mismatches"]
    assert f"multi-token layers of {target}" in (tmp_path / "bench" / "report.md").read_text()
    said = f"Without --assistant or --layers the draft is multi-token layers of {target}."
    assert (said in result.output) is not bool(options)


@pytest.mark.parametrize("command", ["demo", "chat", "bench"])
def test_beside_an_assistant(command: str) -> None:
    """Before anything is loaded."""
    result = run(command, "--target", "none", "--mtp", "--assistant", "org/assistant")
    assert result.exit_code == 1
    assert "--mtp takes no assistant, and --assistant names 'org/assistant'" in result.output


def test_bench_without_a_draft() -> None:
    result = run("bench", "--target", "none", "--mtp", "--lookup")
    assert result.exit_code == 1
    assert "--lookup takes neither --mtp nor an assistant" in result.output


@pytest.mark.parametrize("command", ["demo", "chat", "bench"])
def test_a_target_without_such_layers(command: str, tmp_path: Path) -> None:
    folder = dense(dtype=torch.float32).save(tmp_path / "target", with_layers=False)
    tokenizer(WORDS[:VOCAB]).save_pretrained(folder)
    result = run(command, "--target", str(folder), "--mtp")
    assert result.exit_code == 1
    assert "multi-token layers" in result.output
