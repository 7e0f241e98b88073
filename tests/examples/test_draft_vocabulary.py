"""`examples/draft_vocabulary.py`: what vocabularies chosen by counting earlier answers gain and lose."""

import json
import runpy
from pathlib import Path

import pytest
from support.files.repos import TEXT
from transformers import PreTrainedModel

SCRIPT = Path(__file__).parents[2] / "examples/draft_vocabulary.py"


def test_a_vocabulary_that_lacks_tokens_covers_less_of_later_answers(
    target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "questions.jsonl"
    texts = (TEXT, "w3 w9 w4 w2", "w5 w6", "w7 w8 w1")
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts), encoding="utf-8")
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    main = runpy.run_path(str(SCRIPT))["main"]
    main.__globals__["SIZES"] = (6, 30)
    words = ["--target", str(target.config.name_or_path), "--assistant", "2", "--data", str(data)]
    main([*words, "--max_new_tokens", "12", "--dtype", "float32"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert "2 prompts and answers were counted; 2 answers" in first
    rows = {cells[0]: cells[1:] for line in lines if len(cells := line.strip("│┃ ").split("│")) == 6}
    found = {name.strip(): [float(cell.strip().rstrip("%")) for cell in cells] for name, cells in rows.items()}
    assert list(found) == ["all", "6", "30"]
    assert found["all"][0] == 100.0
    assert found["6"][0] <= found["30"][0] <= 100.0
    assert found["6"][0] < 100.0
    assert 1.0 <= found["6"][2] <= found["all"][2]
