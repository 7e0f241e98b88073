"""The notebook in `examples` runs from its first cell to its last, and shows the outputs of such a run."""

import ast
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.files.repos import save_model, tokenizer
from support.targets.models import partly_agreeing, tiny

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig

FILE = Path(__file__).parents[1] / "examples" / "first_steps.ipynb"
CELLS = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

# Accepts whatever was drafted.
MUTANT = """from hf_specdecpp.generation import output_text as verification
verification.verify_greedy = lambda tree, likeliest: (tree.nodes_to(len(tree)), likeliest(len(tree)))"""


def test_cells_are_python_and_what_they_import_exists() -> None:
    assert len(CODE) > 6
    for cell in CODE:
        tree = ast.parse(re.sub(r"%pip.*|!git.*", "pass", cell))
        ours = [
            ast.unparse(node)
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("hf_specdecpp")
        ]
        for statement in ours:
            exec(statement, {})  # noqa: S102 - our own notebook


def test_outputs_are_of_a_whole_run_and_name_no_folder() -> None:
    """Outputs are kept because most people read a notebook where it cannot run. They are small."""
    runs = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in runs] == list(range(1, len(runs) + 1))
    found = [output for cell in runs for output in cell["outputs"]]
    text = json.dumps([{**output, "data": None} for output in found])
    assert {output["output_type"] for output in found} == {"stream", "execute_result"}
    assert all(word in text for word in ("tokens per pass", "verdict", "times the speed of plain generate()"))
    assert re.findall(r"(?<![\w.`])/(?:home|root|tmp|work|usr|Users)/", text) == []
    assert "stderr" not in text
    assert FILE.stat().st_size < 100_000


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs the notebook, or its first cells, in a folder of its own, with a tiny model and an assistant for it."""
    nbclient = pytest.importorskip("nbclient", reason="needs the [test] extra")
    nbformat = pytest.importorskip("nbformat", reason="needs the [test] extra")
    target, words = tiny("llama", num_hidden_layers=5).float(), tokenizer()
    words.chat_template = TEMPLATE
    words.save_pretrained(save_model(target, tmp_path / "target", None))
    draft = save_model(partly_agreeing(target), tmp_path / "draft")
    assistant = SpecDecPPAssistant.from_draft(draft, target, speculation=SpeculationConfig("fixed", num_tokens=3))
    assistant.save_pretrained(tmp_path / "assistant")
    paths = {"TARGET": str(tmp_path / "target"), "ASSISTANT": str(tmp_path / "assistant")}
    for name, value in {**paths, "HF_HUB_OFFLINE": "1", "PYTHONPATH": search_path()}.items():
        monkeypatch.setenv(name, value)

    def execute(first: int | None = None, insert: tuple[int, str] | None = None) -> Any:
        notebook = nbformat.read(FILE, 4)
        notebook.cells = notebook.cells[:first]
        if insert is not None:
            notebook.cells.insert(insert[0], nbformat.v4.new_code_cell(insert[1]))
        place = {"metadata": {"path": str(tmp_path)}}
        return nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()

    return execute


def search_path() -> str:
    """For the kernel, which runs elsewhere: this package, and what this process was given."""
    return os.pathsep.join(filter(None, (str(FILE.parents[1]), os.environ.get("PYTHONPATH"))))


def printed(notebook: Any) -> str:
    return "".join(output.get("text", "") for output in outputs(notebook))


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.mark.slow
def test_it_runs(run: Callable[..., Any], tmp_path: Path) -> None:
    notebook = run()
    text = printed(notebook)
    for part in ("The same 96 tokens", "tokens generated      96 in"):
        assert part in text
    for way in ("plain", "lookups", "a trained draft", "both"):
        assert re.search(rf"^{way} +[\d.]+ s +[\d.]+ times the speed of plain generate", text, flags=re.MULTILINE)
    assert (tmp_path / "tree.png").exists()
    assert sum("image/png" in output.get("data", {}) for output in outputs(notebook)) == 1


@pytest.mark.slow
def test_a_wrong_text_stops_it(run: Callable[..., Any]) -> None:
    errors = pytest.importorskip("nbclient.exceptions")
    end = next(place for place, cell in enumerate(CELLS) if "The same {len(plain)}" in "".join(cell["source"])) + 1
    assert "The same 96 tokens" in printed(run(end))
    with pytest.raises(errors.CellExecutionError, match="assert torch.equal"):
        run(end + 1, (end - 1, MUTANT))
