"""Names in docstrings and pages, such as `DraftSetup.remedies` and `throughput.plan`, are names of the code."""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_specdecpp"
# CHANGELOG.md also names what was removed.
PAGES = [ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "SECURITY")]
PAGES += [
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "hub_cards" / name / "README.md" for name in ("custom_generate", "space")),
]
DOTTED = re.compile(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)(?=[`(\[ =])")
# Such as: `verify_tree`, [`trees/verification.py`](../hf_specdecpp/trees/verification.py)
LINKED = re.compile(r"`(\w+)`,?\s+(?:in\s+)?\(?\[`[^`]+`\]\(([^)]+\.py)\)")
FILES = re.compile(r"\.(py|json|jsonl|md|safetensors|txt|sh|ya?ml|svg|png|bin|pt|model|toml|gguf|ipynb|whl)$")
# Variables of examples and their classes; of others nothing is looked up.
VARIABLES = {
    "assistant": "SpecDecPPAssistant", "stats": "SpeculationStats", "memory": "Memory", "answers": "Answers",
    "speculation": "SpeculationConfig", "decisions": "Decisions", "distill": "DistillConfig",
    "head": "HeadConfig", "rollouts": "RolloutConfig", "evaluation": "EvalConfig",
}  # fmt: skip
OTHERS = {"model", "target", "module", "config", "cls", "cache", "scores", "length", "text", "steps", "rounds"}
OTHERS |= {"eh_proj", "enorm", "hnorm", "post_norm", "mtp"}  # tensors of published drafts
ELSEWHERE = ("torch", "transformers", "peft", "huggingface_hub", "safetensors", "asyncio", "functools", "time")


@cache
def members() -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """By class what its bodies and those of its bases define or assign to `self`; by module what is at its top."""
    classes: dict[str, set[str]] = defaultdict(set)
    bases: dict[str, set[str]] = defaultdict(set)
    modules: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text("utf-8"))
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        modules[name] = set(_defined(tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name] |= set(_defined(node.body)) | set(_assigned_to_self(node))
                bases[node.name] |= {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases}
    for _ in range(5):  # as deep as classes are derived
        for name, above in bases.items():
            classes[name] |= {each for base in above for each in classes.get(base, ())}
            if above - classes.keys():  # of another package
                classes[name] |= {each for base in above for each in dir(_of_other_packages(base))}
    return dict(classes), modules


def _defined(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in getattr(node, "targets", None) or [node.target]:  # type: ignore[union-attr]
                yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.If):
            yield from _defined(node.body)


def _assigned_to_self(node: ast.ClassDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and ast.unparse(each.value) == "self":
            yield each.attr


def _of_other_packages(name: str) -> object:
    for package in ("transformers", "torch", "torch.nn", "torch.utils._python_dispatch"):
        if hasattr(found := importlib.import_module(package), name):
            return getattr(found, name)
    return object


def exists(name: str, classes: dict[str, set[str]], modules: dict[str, set[str]]) -> bool:
    """Whether `name` is one of a class, of a module by its whole path or the end of it, or of another package."""
    first, second, *_ = parts = name.split(".")
    if first in OTHERS or first in ELSEWHERE:
        return True
    owner = VARIABLES.get(first, first)
    if owner in classes and (second in classes[owner] or second in VARIABLES):
        return len(parts) < 3 or second not in VARIABLES or exists(".".join(parts[1:]), classes, modules)
    if owner == "SpecDecPPAssistant" and second in VARIABLES:
        return len(parts) < 3 or exists(".".join(parts[1:]), classes, modules)
    for module, defined in modules.items():
        path = module.split(".")
        for cut in range(len(parts), 0, -1):
            rest = parts[cut:]
            if path[-cut:] == parts[:cut] and (not rest or rest[0] in defined):
                return len(rest) < 2 or exists(".".join(rest), classes, modules)
    return hasattr(_of_other_packages(first), second) if first[0].isupper() else False


def texts() -> Iterator[tuple[Path, str]]:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                yield path, text
    yield from ((page, re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)) for page in PAGES)


@pytest.mark.takes(4)
def test_dotted_names_exist() -> None:
    found = members()
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in texts()
        for name in DOTTED.findall(text)
        if not FILES.search(name) and not exists(name, *found)
    }
    assert not unknown, "\n".join(sorted(unknown))


@pytest.mark.parametrize("name", ["tree_shapes.best_shape", "SpeculationConfig.products", "kind.meets", "Nobody.here"])
def test_wrong_names_are_found(name: str) -> None:
    assert not exists(name, *members())


def test_names_beside_a_link_are_defined_in_the_linked_file() -> None:
    found = [(page, *pair) for page, text in texts() for pair in LINKED.findall(text) if page in PAGES]
    assert len(found) > 15
    for page, name, link in found:
        source = (page.parent / link).read_text("utf-8")
        assert re.search(rf"^ *(?:def |class )?{name}\b", source, flags=re.MULTILINE), f"{page.name}: {name} in {link}"


def test_files_in_the_picture_of_a_round_exist() -> None:
    picture = (
        (ROOT / "docs" / "architecture.md")
        .read_text("utf-8")
        .partition("\n```\nmodel.generate()")[2]
        .partition("```")[0]
    )
    files = [path.as_posix() for path in PACKAGE.rglob("*.py")]
    named = re.findall(r"[\w/]+\.py", picture)
    assert len(named) > 15
    assert [name for name in named if not any(file.endswith(f"/{name}") for file in files)] == []


def test_reasons_on_the_page_of_gpus_are_those_of_the_code() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text("utf-8").partition("| `stats.uncaptured` | ")[2].partition("\n\n")[0]
    reasons = [
        part for cell in re.findall(r"^\| (?!---)(.+?) \|", page, flags=re.MULTILINE) for part in cell.split("; ")
    ]
    code = " ".join(
        path.read_text("utf-8")
        for room in ("cuda_graphs", "generation", "caches")
        for path in PACKAGE.glob(f"{room}/**/*.py")
    )
    fixed = [piece.strip(" ,()") for reason in reasons for piece in re.split(r"\.\.\.|cpu", reason)]
    assert len(reasons) > 15
    assert [piece for piece in fixed if piece not in code] == []
