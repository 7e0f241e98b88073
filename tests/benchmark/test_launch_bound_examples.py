"""The examples about launches, in a small form: the launch-bound tables, transformers' own drafts, `make bench-gpu`."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.models import partly_agreeing, tiny
from support.repos import save_model
from transformers import AutoTokenizer, CompileConfig

from hf_specdecpp import SpecDecPPAssistant

FOLDER = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="nothing compiles there, nor has it such drafts"
)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported from one another, with few layers and tokens."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("launch_bound", "launch_bound_compiled", "beside_economize"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    for name, value in {"LAYERS": 3, "WARM_UP": 0, "NEW_TOKENS": 12}.items():
        monkeypatch.setattr(importlib.import_module("launch_bound"), name, value)


def run(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str, **constants: Any) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    module = runpy.run_path(str(FOLDER / name))
    main = module["main"]
    main.__globals__.update(constants)
    if "LAYERS" in constants:
        module["SHAPE"]["num_hidden_layers"] = constants["LAYERS"]
    main()


@pytest.mark.slow
@pytest.mark.usefixtures("examples", "traced_drafts")
def test_compiled(
    traced_only: CompileConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts are equal; how many candidates are accepted is what the kinds say."""
    run(
        "launch_bound_compiled.py", monkeypatch, "--dtype", "float64", "--repetitions", "1", "--contestants",
        "chain, fixed 4", "tree of 16", CompileConfig=lambda **_: traced_only,
    )  # fmt: skip
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [row for row in cells if len(row) == 6]
    assert len(rows) == 3 * 4
    assert [row[-1] for row in rows] == ["yes"] * len(rows)
    of_chain, of_tree = ([float(row[3]) for row in rows if row[0] == name] for name in ("chain, fixed 4", "tree of 16"))
    assert of_chain[0] > 3.0 > of_chain[2] >= 1.0
    assert of_tree[0] > 3.0 > of_tree[2] >= 1.0


@pytest.mark.usefixtures("examples")
def test_beside_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.modeling_layers import MtpModel

    monkeypatch.setattr(MtpModel, "from_pretrained", MtpModel.from_pretrained)  # the example replaces it
    run("beside_transformers.py", monkeypatch, "--repetitions", "1", LAYERS=6)
    out = capsys.readouterr().out
    assert out.count("│ yes") == 3 * 6
    assert "│ no" not in out


@pytest.mark.usefixtures("examples", "untraced")
def test_bench_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU, of a tiny pair: a report with a table for each batch size, whose texts are plain generation's."""
    model = tiny("llama", num_hidden_layers=1)
    target = save_model(model, tmp_path / "target")
    chat = AutoTokenizer.from_pretrained(target)
    chat.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    chat.save_pretrained(target)
    draft = save_model(partly_agreeing(model), tmp_path / "draft")
    SpecDecPPAssistant.from_draft(draft, model).save_pretrained(tmp_path / "assistant")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="There is no GPU here"):
        run("bench_gpu.py", monkeypatch)
    run(
        "bench_gpu.py", monkeypatch, "--device", "cpu", "--dtype", "float32", "--pair", target,
        str(tmp_path / "assistant"), "--batch_sizes", "1", "2", "--prompts", "1", "--max_new_tokens", "8",
        "--max_length", "64", "--repetitions", "1", KINDS=["all accepted"], SPECULATION=["chain, fixed 4"],
    )  # fmt: skip
    report = capsys.readouterr().out
    assert "**No GPU was used**" in report
    assert f"torch {torch.__version__}" in report
    tables = [part.splitlines() for part in report.split("## ")[1:]]
    assert [table[0].split(",")[-1] for table in tables[:2]] == [" batch of 1", " batch of 2"]
    names = [line.split("|")[1].strip() for line in tables[0] if line.startswith("|")]
    assert names[2:] == [
        "plain generate()", "plain generate(), compiled", "ours", "ours, compiled", "ours, tree of 16",
        "ours, tree of 16, compiled",
    ]  # fmt: skip
    equal = [line.split("|")[-2].strip() for table in tables[:2] for line in table if " of 6" in line]
    assert equal == ["6 of 6"] * (6 + 3)
    assert tables[2][0].startswith("Launch-bound")
