"""The examples: their imports exist, they say how to run them, and the quick ones run."""

import ast
import importlib
import json
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from PIL import Image
from support.devices.pretend_graph import pretend_graphs
from support.files.repos import save_model
from support.runs.training_files import training_run
from support.targets.models import tiny

from hf_specdecpp.assistant import SpecDecPPAssistant

pytestmark = pytest.mark.apart

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.rglob("*.py"))


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


def test_imports_exist_and_docstrings_say_how_to_run_them() -> None:
    for file in EXAMPLES:
        source = file.read_text(encoding="utf-8")
        tree = ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_specdecpp"):
                module = importlib.import_module(str(node.module))
                for alias in node.names:
                    assert hasattr(module, alias.name) or find_spec(f"{node.module}.{alias.name}"), file
        if file.parent == FOLDER or "__main__" in source:  # the other files of a folder are parts of its programs
            assert f"python examples/{file.relative_to(FOLDER).as_posix()}" in (ast.get_docstring(tree) or ""), file


def test_generate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama")
    target = save_model(model, tmp_path / "target")
    SpecDecPPAssistant.from_early_exit(model, 1).save_pretrained(tmp_path / "assistant")
    monkeypatch.setattr(sys, "argv", ["generate.py", target, str(tmp_path / "assistant")])
    runpy.run_path(str(FOLDER / "generate.py"))
    text, *statistics = capsys.readouterr().out.splitlines()
    assert len(text.split()) == 37  # of them 5 are the prompt's
    assert statistics[-1].startswith("verdict")


def test_round_overhead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run("round_overhead.py", monkeypatch, NEW_TOKENS=4, REPETITIONS=1, LENGTHS=(2,))
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["ours", "stock"]
    assert [row.split(",")[0] for row in rows] == ["greedy", "sampled"]


def test_verification_gain(capsys: pytest.CaptureFixture[str]) -> None:
    """No test of siblings accepts more than the best, which for one child is the sum of min(p, q)."""
    example = runpy.run_path(str(FOLDER / "verification_gain.py"))
    example["main"].__globals__.update(CHAINS=3, TREES=3, NODES=3, NOISES=(0.7,), CHILDREN=(2,))
    example["main"]()
    assert capsys.readouterr().out.count("|\n") == 2 + 5 + 2 + 6 + 2 + 1
    torch.manual_seed(0)
    p, q = (torch.randn(3, 5, dtype=torch.float64).softmax(-1) for _ in range(2))
    a = p.new_ones(3)
    for children in (1, 2, 3):
        sets = example["chances_of_sets"](q, children)
        assert torch.allclose(torch.stack(list(sets.values())).sum(0), a)
        ours, best = example["one_after_another"](p, q, a, children), example["at_best"](p, q, children)
        assert bool((ours <= best + 1e-12).all())
        if children == 1:
            assert torch.allclose(ours, torch.minimum(p, q).sum(-1))
            assert torch.allclose(best, ours)


def test_train_a_dspark_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss falls, and the checkpoint is a draft with a confidence head."""
    made = training_run(tmp_path, num_texts=16, early_exit=True)
    settings = tmp_path / "dspark.yaml"
    settings.write_text(json.dumps({"target": made.target, "output": made.output}), encoding="utf-8")
    example = runpy.run_path(str(FOLDER / "train_a_dspark_draft.py"))
    example["main"].__globals__.update(EPOCHS=4, TEXTS=2, BLOCKS=6, RATE=3e-3)
    example["main"](str(settings), str(tmp_path / "draft"))
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < 0.95 * losses[0]
    target = transformers.AutoModelForCausalLM.from_pretrained(made.target, dtype=torch.float32)
    assistant: Any = SpecDecPPAssistant.from_pretrained(tmp_path / "draft", target=target)
    assert assistant.head.is_published
    assert assistant.ready_drafter().places == 5
    ids, options = torch.arange(1, 9)[None], {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(target.generate(ids, assistant_model=assistant, **options), target.generate(ids, **options))


def test_plot_speeds(tmp_path: Path) -> None:
    """Every kind of text has a bar, and the same reports make the same picture."""
    example = runpy.run_path(str(FOLDER / "plot_speeds.py"))
    speeds = example["collect"](example["REPORTS"])
    assert {each for _, each in speeds} == set(example["SETS"])
    pictures = []
    for _ in range(2):
        example["draw"](speeds, tmp_path / "speeds.svg")
        pictures.append((tmp_path / "speeds.svg").read_bytes())
    assert pictures[0] == pictures[1]


def test_plot_reports(tmp_path: Path) -> None:
    """Pictures of a benchmark and of an evaluation, from the parts of their files that are drawn."""
    draw = runpy.run_path(str(FOLDER / "plot_reports.py"))["draw"]
    speeds = {"plain": [2.0, 1.5, 2.5], "same_passes": [1.6, 1.2, 1.9]}
    rows = [
        {"set": "s", "batch": 0, "temperature": 0.0, "contestant": name, "family": name, **speeds}
        for name in ("fixed 3", "plain")
    ]
    points = [{"verification_rate": 0.5, "discard_rate": 0.2}, {"verification_rate": 0.4, "discard_rate": 0.6}]
    bench, evaluation = tmp_path / "results.json", tmp_path / "evaluation.json"
    bench.write_text(json.dumps({"settings": {"temperatures": [0.0]}, "summary": rows}))
    evaluation.write_text(json.dumps({"sets": {"heldout": {"1": {"curves": {"head": points, "fixed": points}}}}}))
    for file, picture in ((bench, "speed-up-0.png"), (evaluation, "curve-heldout-1.png")):
        draw(file)
        with Image.open(tmp_path / picture) as image:
            assert min(image.size) > 300


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.23"), reason="has no such drafts")
@pytest.mark.usefixtures("examples")
def test_beside_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.modeling_layers import MtpModel

    monkeypatch.setattr(MtpModel, "from_pretrained", MtpModel.from_pretrained)  # the example replaces it
    run("beside_transformers.py", monkeypatch, "--repetitions", "1", LAYERS=6)
    out = capsys.readouterr().out
    assert out.count("│ yes") == 3 * 6
    assert "│ no" not in out


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
    tables = [part.splitlines() for part in report.split("## ")[1:]]
    assert len(tables) == 2
    rows = [[[cell.strip() for cell in line.split("|")[1:-1]] for line in table if line[:1] == "|"] for table in tables]
    assert [row[6] for row in rows[0][2:]] == ["1 of 1"] * 5
    assert [row[0] for row in rows[1][2:]] == ["plain generate()", "ours, 3 candidates"], "batches have no trees"
    assert [row[6] for row in rows[1][2:]] == ["1 of 1"] * 2
    assert all("rounds captured" in row[7] for row in [*rows[0][5:], *rows[1][3:]])


def test_bench_gpu_has_the_rival_with_compiled_passes() -> None:
    """transformers compiles the target's passes of assisted generation if the cache is static."""
    names = runpy.run_path(str(FOLDER / "bench_gpu.py"), run_name="bench_gpu")
    target = names["built"](names["SHAPES"]["tiny"], "cpu", torch.float32)
    asked: list[dict[str, Any]] = []
    contest = SimpleNamespace(target=target, rows=1, run=lambda _, **options: asked.append(options), economize=None)
    for compiles in (False, True):
        found = names["contestants"](contest, compiles, False, [])
        rivals = [name for name in found if "assisted" in name]
        assert len(rivals) == 1 + compiles
        for name in rivals:
            found[name](1)
    assert [options.get("cache_implementation") for options in asked] == [None, None, "static"]
    assert all("assistant_model" in options for options in asked)
