"""`examples/equal_texts.py`: counts of greedy answers that differ from plain generation."""

import json
import runpy
from pathlib import Path

import pytest
from support.files.repos import TEXT
from transformers import PreTrainedModel

from hf_specdecpp import SpecDecPPAssistant

SCRIPT = Path(__file__).parents[2] / "examples/equal_texts.py"


def test_answers_are_counted_and_a_later_run_goes_on(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In float32 all are equal; an answer that is not is counted."""
    SpecDecPPAssistant.from_early_exit(target, 1).save_pretrained(tmp_path / "assistant")
    data, output = tmp_path / "questions.jsonl", tmp_path / "results.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT, "w3 w9 w4 w2")), encoding="utf-8")
    named = {"target": target.config.name_or_path, "assistant": tmp_path / "assistant", "data": data, "output": output}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    words += ["--max_new_tokens", "8", "--dtype", "float32"]
    main = runpy.run_path(str(SCRIPT))["main"]
    main([*words, "--count", "1"])
    first = output.read_text(encoding="utf-8")
    results = json.loads(first)
    assert [each[0] for each in results.values()] == [True] * 5
    assert results["chains and lookups"][1] >= 1.0
    output.write_text(first.replace("[true, 1.0,", "[false, 1.0,", 1))  # plain's
    main([*words, "--count", "2"])
    assert len(output.read_text(encoding="utf-8").splitlines()) == 2
    assert [line.split()[1:6:2] for line in capsys.readouterr().out.splitlines() if "plain " in line] == [
        ["plain", "1", "0"], ["plain", "2", "1"],
    ]  # fmt: skip
