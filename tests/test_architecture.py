"""Imports point down the floors that docs/architecture.md lists, no files import one another in a circle, and tests
have the names of modules."""

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_specdecpp"
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in PACKAGE.rglob("*.py")
}
MOST_FILES = 12


def floors() -> dict[str, int]:
    """`{"files.py": 0, "sampling/": 1, ...}`, the table of rooms in docs/architecture.md."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, flags=re.MULTILINE)
    return {room: int(floor) for floor, names in rows for room in re.findall(r"`([^`]+)`", names)}


def room_of(module: str) -> str:
    parts = FILES[module].relative_to(PACKAGE).parts
    return parts[0] if len(parts) == 1 else f"{parts[0]}/"


def imports(module: str) -> Iterator[str]:
    """The modules of this package that a module imports anywhere, for type checking too."""
    for node in ast.walk(ast.parse(FILES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if name in FILES else node.module for name in names} & FILES.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & FILES.keys()


def test_every_room_is_on_the_map_and_nothing_else() -> None:
    assert {room_of(module) for module in FILES} == set(floors())


def test_imports_point_down() -> None:
    floor = floors()
    wrong = [
        f"{module} imports {imported}"
        for module in FILES
        for imported in imports(module)
        if room_of(module) != room_of(imported) and floor[room_of(module)] <= floor[room_of(imported)]
    ]
    assert wrong == []


def test_no_files_import_one_another_in_a_circle() -> None:
    graph = {module: set(imports(module)) - {module} for module in FILES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(error.args[1][::-1]))


def test_rooms_have_at_most_a_dozen_files() -> None:
    for folder in {file.parent for file in FILES.values()}:
        names = sorted(file.name for file in folder.glob("*.py") if file.name not in ("__init__.py", "__main__.py"))
        assert len(names) <= MOST_FILES, f"{folder.relative_to(ROOT)}: {', '.join(names)}"


# Tests of what several modules do together: exact distributions, calls of `generate()`, other programs, the examples.
BEHAVIOUR = {"exactness", "generate", "integrations", "examples", "support", "data"}


def test_tests_have_the_names_of_modules() -> None:
    """`tests/caches/test_static.py` tests `caches/static.py`, and so may `test_static_*.py`."""
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if file.parent != ROOT / "tests"]
    for file in files:
        folder = file.parent.relative_to(ROOT / "tests")
        if folder.parts[0] not in BEHAVIOUR:
            modules = [module.stem for module in (PACKAGE / folder).glob("*.py")]
            assert any(f"{file.stem}_".startswith(f"test_{name}_") for name in modules), f"{folder}/{file.name}"


# What is over the limits, and why. Nothing may be added without a reason.
SIGNATURES_OF_OTHERS = {"generation/doors/attached.py:_assisted_decoding", "assistant.py:push_to_hub"}  # transformers'
OPTIONS = {"cli.py:inspect", "estimation/acceptance_head.py:__init__"}  # a parameter each


def test_files_and_functions_are_short_and_take_few_parameters() -> None:
    """400 lines, 60 lines, and six parameters beside `self`; those that are left have names above."""
    found = set()
    for file in FILES.values():
        name, source = file.relative_to(PACKAGE).as_posix(), file.read_text(encoding="utf-8")
        if len(source.splitlines()) > 400:
            found.add(name)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                count = len([each for each in given if each.arg not in ("self", "cls")])
                if count > 6 or (node.end_lineno or 0) - node.lineno >= 60:
                    found.add(f"{name}:{node.name}")
    assert found <= SIGNATURES_OF_OTHERS | OPTIONS
