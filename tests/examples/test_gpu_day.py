"""The commands for a day with a GPU, on pretended devices and on a CPU, with tiny steps."""

import inspect
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices.pretend_cuda import pretend_graphs_on_devices
from support.devices.pretend_devices import on_device
from support.devices.pretend_graph import pretend_graphs
from torch.nn.functional import scaled_dot_product_attention

from hf_specdecpp.cuda_graphs import model_copy

pytestmark = pytest.mark.apart
FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The names of a script, after its `main` has run with these arguments, and with some names replaced."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def run(name: str, *arguments: str, **replaced: Any) -> dict[str, Any]:
        names = runpy.run_path(str(FOLDER / name))
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        inspect.unwrap(names["main"]).__globals__.update(replaced)
        names["main"]()
        return names

    return run


def rows(report: str) -> list[list[str]]:
    """The cells of a report's table, without its heading."""
    lines = [line for line in report.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


# The order of the day. ------------------------------------------------------------------------------------------------


def test_all_steps_fit_and_hazards_come_first() -> None:
    names = runpy.run_path(str(FOLDER / "gpu_day.py"))
    bench = runpy.run_path(str(FOLDER / "bench_gpu.py"))
    steps = names["STEPS"]
    assert next(iter(steps)) == "hazards"
    assert sum(step.minutes for step in steps.values()) <= 40
    for step in steps.values():
        assert step.command[0] == "-m" or Path(step.command[0]).exists()
        for option in step.command:
            assert not option.startswith("ours") or option in bench["OURS"]


def test_a_day_is_continued(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is done is not run again; a step that fails does not stop others; what does not fit is left out."""
    names = runpy.run_path(str(FOLDER / "gpu_day.py"))
    make, steps = names["make"], list(names["STEPS"])
    ran: list[Sequence[str]] = []
    clock = [0.0]
    make.__globals__["time"] = SimpleNamespace(monotonic=lambda: clock[0])

    def run(command: Sequence[str], seconds: float) -> tuple[str, bool]:
        ran.append(command)
        clock[0] += seconds
        return "# A report\n\n| a | b |\n|---|---|\n| 1 | 2 |\n", len(ran) != 2

    assert make(steps, tmp_path, 10, run=run) == steps[1:]  # the second fails, and the others do not fit
    assert ran == [names["STEPS"][name].command for name in steps[:2]]
    out = capsys.readouterr().out
    assert "expected: all as in its table\nfound:\n| a | b |\n| 1 | 2 |\n" in out
    assert (out.count("failed: see"), out.count("left out:")) == (1, len(steps) - 2)
    assert make(steps, tmp_path, 40, run=run) == []
    assert capsys.readouterr().out.count("done before") == 1
    assert make(steps, tmp_path, 40, run=run) == []
    assert len(ran) == len(steps) + 1
    assert make(["pieces"], tmp_path, 40, again=True, run=run) == []
    assert ran[-1] == names["STEPS"]["pieces"].command


@pytest.mark.takes(3)
def test_a_command_that_crashes_or_does_not_end() -> None:
    run = runpy.run_path(str(FOLDER / "gpu_day.py"))["run"]
    assert run(["-c", "print('found')"], 60) == ("found\n", True)
    output, succeeded = run(["-c", "import os; print('begun', flush=True); os.abort()"], 60)
    assert (output.splitlines()[0], succeeded) == ("begun", False)
    output, succeeded = run(["-c", "import time; print('begun', flush=True); time.sleep(60)"], 1.0)
    assert ("begun" in output, "ended after 1 s" in output, succeeded) == (True, True, False)


# Its steps. -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("length", [512, 1024, 4096, 8192])
@pytest.mark.parametrize("width", [1, 6])
def test_attention_in_pieces_is_exact(width: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a piece has no token that a query sees; a mutant of which leaves out the last piece is noticed."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = runpy.run_path(str(FOLDER / "gpu_attention.py"))
    torch.manual_seed(0)
    query, key, value, mask = names["inputs_for"](width, length, torch.float64, "cpu")
    expected = scaled_dot_product_attention(query, key, value, mask)
    found = names["split_attention"](query, key, value, mask)
    assert float((found - expected).abs().max()) < 1e-12
    mask = torch.zeros_like(mask)
    expected = scaled_dot_product_attention(query, key, value, mask)
    assert float((names["split_attention"](query, key, value, mask) - expected).abs().max()) < 1e-12
    assert float((found - expected).abs().max()) > 1e-3


def test_times_of_attention(script: Any, capsys: pytest.CaptureFixture[str]) -> None:
    script("gpu_attention.py", "--device", "cpu", "--widths", "1", "6", "--rows", "512", "1024")
    found = rows(capsys.readouterr().out)
    assert [row[:2] for row in found] == [["1", "512"], ["1", "1024"], ["6", "512"], ["6", "1024"]]
    assert all(float(row[2]) > 0.0 and float(row[-1]) > 0.0 for row in found)


@pytest.mark.takes(4)
def test_pieces(script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler, and without CUDA's."""
    monkeypatch.setattr(model_copy, "_compiled", lambda function, _shape: function)
    with pretend_graphs():
        script("gpu_pieces.py", "--device", "cpu", "--shapes", "tiny", PASSES=2)
    ((name, usual, norms, compiled, gated, head),) = rows(capsys.readouterr().out)
    assert name == "tiny"
    assert min(map(float, (usual, norms, compiled))) > 0.0
    assert "Error" in gated
    assert head


@pytest.mark.takes(4)
def test_overlap(script: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=int, synchronize=torch.cuda.synchronize))
    with pretend_graphs_on_devices():
        script("gpu_overlap.py", "--shapes", "tiny", on_device=on_device, ROUNDS=3, NEW_TOKENS=8)
    ((name, host, now, overlapped),) = rows(capsys.readouterr().out)
    assert name == "tiny"
    assert min(map(float, (host, now, overlapped))) > 0.0
