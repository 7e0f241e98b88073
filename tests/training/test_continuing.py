"""`specdecpp train --continue`: a draft that goes on to learn from answers that its target wrote before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.models import quiet_later_layers, tiny
from support.repos import save_model
from typer.testing import CliRunner

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.training import continuing


@pytest.fixture
def assistant(tmp_path: Path) -> Path:
    target = quiet_later_layers(tiny("llama").float())
    save_model(target, tmp_path / "target")
    made = SpecDecPPAssistant.from_early_exit(target, 2)
    made.config.target_id = str(tmp_path / "target")
    made.save_pretrained(tmp_path / "assistant")
    return tmp_path / "assistant"


def write(file: Path, count: int = 10) -> str:
    words = [f"w{number}" for number in range(1, 40)]
    rows = []
    for place in range(count):
        prompt, answer = " ".join(words[place : place + 6]), " ".join(words[place + 6 : place + 30])
        own = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        rows.append({"messages": own} if place % 2 else {"prompt": prompt, "answer": answer})
    rows.append({"prompt": "w1 w2"})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["train", *arguments])
    return result.exit_code, " ".join(result.output.split())


def test_a_draft_goes_on_to_learn(assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuing, "PASSES", 12)
    data, output = write(tmp_path / "answers.jsonl"), tmp_path / "new"
    code, said = run("--continue", str(assistant), "--data", data, "--output", str(output))
    assert code == 0, said
    assert "a first candidate is accepted with probability" in said
    assert f"Written: {output}" in said
    target = tiny("llama").float()
    loaded = SpecDecPPAssistant.from_pretrained(output, target=target)
    assert loaded.config.learned["texts"] == 8, "of ten answers every fifth is held out"
    assert loaded.parts.adapter is not None
    code, said = run("--continue", str(assistant), "--data", data, "--output", str(output))
    assert code == 1
    assert "is not empty" in said


def test_in_parts(assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuing, "AT_ONCE", 130)
    data = write(tmp_path / "answers.jsonl")
    lessons = list(continuing.go_on(str(assistant), [data], tmp_path / "new"))
    assert [lesson.texts for lesson in lessons] == [4, 4]
    assert lessons[1].steps == 2


def test_what_is_wrong_is_said(assistant: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "answers.jsonl", 1)
    output = ("--output", str(tmp_path / "new"))
    code, said = run("--continue", str(assistant), "--data", data, *output)
    assert (code, "1 of 2 rows" in said) == (1, True)
    code, said = run("--continue", str(assistant), "--data", data, *output, "--layers", "2")
    assert (code, "takes --data, --output and --target" in said) == (2, True)
    code, said = run("--continue", str(tmp_path / "nowhere"), "--data", data, *output)
    assert code == 1
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda _self: None)
    code, said = run("--continue", str(assistant), "--data", write(tmp_path / "more.jsonl"), *output)
    assert (code, "is not written" in said) == (1, True)
    assert not (tmp_path / "new").exists()
