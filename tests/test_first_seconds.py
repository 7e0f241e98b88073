"""What is imported before anything is done: `specdecpp --help` and `import hf_specdecpp` cost a moment.

Seconds differ between machines, so modules are counted."""

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.files.repos import save_model
from support.targets.models import assistant_for, tiny
from transformers import AutoModelForCausalLM

import hf_specdecpp

pytestmark = pytest.mark.apart

HEAVY = {"torch", "transformers", "peft", "numpy", "huggingface_hub", "safetensors", "datasets", "matplotlib", "jinja2"}


def python(program: str) -> Any:
    """What the last line that a new interpreter prints says, as JSON."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def imported_by(statement: str, before: str = "pass") -> list[str]:
    """The modules that a statement loads beyond those that another one has loaded."""
    return python(f"""
import json, sys
{before}
known = set(sys.modules)
{statement}
print(); print(json.dumps(sorted(set(sys.modules) - known)))""")


@pytest.mark.parametrize("words", [[], ["demo"], ["chat"], ["train"], ["bench"], ["inspect"], ["export"]])
def test_help_imports_nothing_heavy(words: list[str]) -> None:
    found = imported_by(f"""
from typer.testing import CliRunner
from hf_specdecpp.cli import app
assert "Usage" in CliRunner().invoke(app, {[*words, "--help"]}).stdout""")
    assert {"typer", "hf_specdecpp.cli"} <= set(found)
    assert {name.partition(".")[0] for name in found} & HEAVY == set()


@pytest.mark.parametrize("before", ["import transformers", "from transformers import AutoConfig"])
def test_import_adds_a_handful_of_modules_of_our_own(before: str) -> None:
    found = imported_by("import hf_specdecpp", before)
    ours = [name for name in found if name.startswith("hf_specdecpp")]
    assert ours == ["hf_specdecpp", "hf_specdecpp.registration", "hf_specdecpp.version"]
    assert {name.partition(".")[0] for name in found} & HEAVY == set()
    assert len(found) < 10


def test_every_name_is_there_and_no_other() -> None:
    for name in hf_specdecpp.__all__:
        assert getattr(hf_specdecpp, name) is not None
    assert set(hf_specdecpp.__all__) <= set(dir(hf_specdecpp))
    with pytest.raises(AttributeError, match="module 'hf_specdecpp' has no attribute 'Assistant'"):
        _ = hf_specdecpp.Assistant


def failing(before: str, statements: dict[str, str]) -> list[str]:
    """Which statements fail, each in a process of its own, which begins after `before`."""
    return python(f"""
import json, os
{before}
failing = []
for name, statement in {statements!r}.items():
    child = os.fork()
    if not child:
        exec(statement)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        failing.append(name)
print(); print(json.dumps(failing))""")


def test_each_name_may_be_the_first() -> None:
    """Where transformers has been imported, and nothing of ours."""
    before = "import sys\nfrom transformers import PreTrainedModel, Trainer\nassert 'hf_specdecpp' not in sys.modules"
    assert failing(before, {name: f"from hf_specdecpp import {name}" for name in hf_specdecpp.__all__}) == []


def test_checkers_and_the_interpreter_see_the_same_names() -> None:
    """Type checkers read imports, which the interpreter does not make."""
    tree = ast.parse(Path(hf_specdecpp.__file__).read_text(encoding="utf-8"))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    shown = {
        alias.name: str(node.module).removeprefix("hf_specdecpp.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert (shown, {*shown, "__version__"}) == (hf_specdecpp._MODULES, set(hf_specdecpp.__all__))


# --- transformers knows us, though nothing of ours has been imported yet ---

CONFIG, ASSISTANT = "hf_specdecpp.config.assistant.SpecDecPPConfig", "hf_specdecpp.assistant.SpecDecPPAssistant"
DOORS = {
    "transformers.AutoConfig.from_pretrained(head)": CONFIG,
    "transformers.AutoConfig.for_model('specdecpp', target_id='x')": CONFIG,
    "transformers.AutoModelForCausalLM.from_pretrained(head)": ASSISTANT,
    "transformers.pipeline('text-generation', model=target, assistant_model=head).assistant_model": ASSISTANT,
}
TOKENIZER = "assert transformers.AutoTokenizer.from_pretrained(head)('w1 w2').input_ids == [1, 2]"
FIRST = {
    "ours": "import hf_specdecpp\nimport transformers",
    "transformers": "import transformers\nimport hf_specdecpp",
    "Auto classes": "import transformers\nfrom transformers import AutoModelForCausalLM\nimport hf_specdecpp",
}


@pytest.fixture
def places(tmp_path: Path) -> str:
    """Python that names the folders of a target and of an assistant for it."""
    target = AutoModelForCausalLM.from_pretrained(save_model(tiny("llama"), tmp_path / "target"))
    assistant = assistant_for(target)
    assistant.config.draft_id = save_model(assistant.drafter.model, tmp_path / "draft")
    assistant.save_pretrained(tmp_path / "head")
    return f"target, head = {str(tmp_path / 'target')!r}, {str(tmp_path / 'head')!r}"


@pytest.mark.daily("ours")
@pytest.mark.parametrize("first", FIRST)
def test_doors_by_name(first: str, places: str) -> None:
    before = f"{FIRST[first]}\nfrom transformers import PreTrainedModel, pipelines\n{places}"
    asked = {door: f"assert str(type({door})) == \"<class '{name}'>\"" for door, name in DOORS.items()}
    assert failing(before, {**asked, "tokenizer": TOKENIZER}) == []


def test_without_us_the_doors_are_shut(places: str) -> None:
    """So the tests above would fail if importing the package told transformers nothing."""
    with pytest.raises(AssertionError, match="does not recognize this architecture"):
        python(f"import transformers\n{places}\n{list(DOORS)[0]}")
