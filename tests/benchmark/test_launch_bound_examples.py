"""The examples about launches, in a small form: the launch-bound tables, transformers' own drafts, `make bench-gpu`."""

import importlib
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from support.pretend_graph import pretend_graphs

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imported from one another, with few layers and tokens."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("launch_bound", "beside_economize"):
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


@pytest.mark.apart
@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="has no such drafts")
@pytest.mark.usefixtures("examples")
def test_beside_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.modeling_layers import MtpModel

    monkeypatch.setattr(MtpModel, "from_pretrained", MtpModel.from_pretrained)  # the example replaces it
    run("beside_transformers.py", monkeypatch, "--repetitions", "1", LAYERS=6)
    out = capsys.readouterr().out
    assert out.count("│ yes") == 3 * 6
    assert "│ no" not in out


@pytest.mark.apart
def test_bench_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On a CPU, of a tiny shape, with pretended graphs: a table for each batch size; texts are plain generation's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="There is no GPU here"):
        run("bench_gpu.py", monkeypatch)
    with pretend_graphs():
        run(
            "bench_gpu.py", monkeypatch, "--dry_run", "--batch_sizes", "1", "2", "--ours", "ours, 3 candidates",
            "ours, tree of 15", SAMPLE=64,
        )  # fmt: skip
    report = capsys.readouterr().out
    assert "**no GPU**" in report
    assert f"torch {torch.__version__}" in report
    tables = [part.splitlines() for part in report.split("## ")[1:]]
    assert [table[0].split(",")[-1] for table in tables] == [" batch of 1", " batch of 2"]
    rows = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line[:1] == "|"] for table in tables]
    assert [row[0] for row in rows[0][2:]] == [
        "plain generate()", "transformers' assisted, 5 candidates", "plain passes, captured by us",
        "ours, 3 candidates", "ours, tree of 15",
    ]  # fmt: skip
    assert [row[6] for row in rows[0][2:]] == ["1 of 1"] * 5
    assert [row[0] for row in rows[1][2:]] == ["plain generate()", "ours, 3 candidates"], "batches have no trees"
    assert [row[6] for row in rows[1][2:]] == ["1 of 1"] * 2
    assert all(" graphs made" in row[7] for row in [*rows[0][4:], *rows[1][3:]])
    assert all("rounds captured" in row[7] for row in [*rows[0][5:], *rows[1][3:]])
