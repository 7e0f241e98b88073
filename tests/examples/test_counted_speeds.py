"""`examples/counted_speeds.py`: speeds of rules on a machine of which every cost is known. The example changes its
process, so the test starts processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.files.repos import TEXT
from transformers import PreTrainedModel

from hf_specdecpp import SpecDecPPAssistant

SCRIPT = Path(__file__).parents[2] / "examples/counted_speeds.py"


@pytest.mark.apart
def test_speeds_are_those_of_the_counted_passes(target: PreTrainedModel, tmp_path: Path) -> None:
    """Two runs print the same table, and reading the prompt is paid by every setting."""
    SpecDecPPAssistant.from_early_exit(target, 1).save_pretrained(tmp_path / "assistant")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT, "w3 w9 w4 w2")), encoding="utf-8")
    named = {"target": target.config.name_or_path, "assistant": tmp_path / "assistant", "data": data}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    words += ["--max_new_tokens", "12", "--dtype", "float32", "--settings", "throughput (default)", "fixed 2"]

    def rows(*more: str) -> list[list[str]]:
        given = {**os.environ, "COLUMNS": "120"}
        found = subprocess.run(
            [sys.executable, str(SCRIPT), *words, *more], capture_output=True, text=True, env=given, check=True
        )
        return [line.split("│")[1:-1] for line in found.stdout.splitlines() if "│" in line]

    usual, dear = rows(), rows("--read", "1.0")
    assert usual == rows()
    assert [row[0].strip() for row in usual] == ["throughput (default), first", "throughput (default)", "fixed 2"]
    assert float(dear[2][2]) < 0.8 * float(usual[2][2])
