"""What installs the package and what tests it: the workflow, the floors, the Makefile, the source distribution."""

import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no reader of TOML")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")

# The workflow, as strictly as GitHub reads it. ------------------------------------------------------------------------

JOB = {"name", "needs", "runs-on", "timeout-minutes", "permissions", "strategy", "defaults", "env", "steps",
       "continue-on-error"}  # fmt: skip
STEP = {"name", "uses", "with", "run", "env", "shell"}
RUNNERS = {"ubuntu-latest", "macos-latest", "windows-latest"}


class Strict(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, as GitHub does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := {key for key in keys if keys.count(key) > 1}:
            raise ValueError(f"{sorted(twice)} more than once, line {node.start_mark.line + 1}")
        return super().construct_mapping(node, deep)


def faults(text: str) -> list[str]:
    """Why GitHub would refuse a workflow, or why a job of it would fail before any test."""
    try:
        jobs: dict[str, Any] = yaml.load(text, Strict)["jobs"]  # noqa: S506 - a SafeLoader
    except ValueError as error:
        return [str(error)]
    found = []
    for name, job in jobs.items():
        needs = job.get("needs", [])
        found += [
            f"{name} needs {other}" for other in ([needs] if isinstance(needs, str) else needs) if other not in jobs
        ]
        found += [f"{name}: {key}" for key in set(job) - JOB]
        matrix = job.get("strategy", {}).get("matrix", {})
        found += [f"{name}: matrix.{used}" for used in re.findall(r"matrix\.(\w+)", str(job)) if used not in matrix]
        runners = matrix.get("system", [job["runs-on"]])
        found += [f"{name} runs on {runner}" for runner in runners if runner not in RUNNERS]
        for step in job["steps"]:
            found += [f"{name}: {key}" for key in set(step) - STEP]
            found += [f"{name}: {step}" for _ in range(("uses" in step) == ("run" in step))]
            if "uses" in step and not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"]):
                found.append(f"{name}: {step['uses']} is no commit")
            found += [f"{name}: {command}" for command in missing(step.get("run", ""))]
    return found


def missing(script: str) -> list[str]:
    """Lines of a script that ask for a target or a file that there is not."""
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, flags=re.MULTILINE))
    lines = [line.split() for line in script.splitlines()]
    return [
        " ".join(words) for words in lines
        if (words[0] == "make" and not targets.issuperset(word for word in words[1:] if "=" not in word))
        or (words[0].startswith(".") and not (ROOT / words[0]).is_file())
    ]  # fmt: skip


def test_the_workflow_is_sound() -> None:
    assert faults(WORKFLOW) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  floor:\n", "  pinned:\n"),
        ("make test-newest", "make test-new"),
        (".ci/run", ".ci/rum"),
        ("matrix.python", "matrix.pyhton"),
        ("    runs-on: ubuntu-latest\n", "    runs-on: ubuntu-latest\n    needs: lint\n"),
        ("macos-latest", "macos"),
        ("      - run: make test-floor", "      - run: make test-floor\n        uses: a/b@" + 40 * "0"),
        ("@de0fac2e4500dabe0009e67214ff5f5447ce83dd", "@v6"),
        ("timeout-minutes", "timeout_minutes"),
    ],
)
def test_faults_of_a_workflow_are_found(old: str, new: str) -> None:
    assert old in WORKFLOW
    assert len(faults(WORKFLOW.replace(old, new, 1))) == 1


def pythons_of_jobs() -> set[str]:
    jobs = yaml.load(WORKFLOW, Strict)["jobs"]  # noqa: S506 - a SafeLoader
    return {version for job in jobs.values() for version in job.get("strategy", {}).get("matrix", {}).get("python", [])}


def test_each_python_that_we_name_is_tested() -> None:
    named = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    assert named == pythons_of_jobs()
    supported = SpecifierSet(PROJECT["requires-python"])
    assert all(version in supported for version in named)
    assert f"3.{min(int(version[2:]) for version in named) - 1}" not in supported
    assert not re.search("[<=~]", PROJECT["requires-python"].replace(">=", "")), "an upper bound blocks new Pythons"


def test_each_system_that_we_name_is_tested() -> None:
    assert "Operating System :: OS Independent" in PROJECT["classifiers"]
    assert all(runner in WORKFLOW for runner in RUNNERS)


# Versions. ------------------------------------------------------------------------------------------------------------


def pins(name: str) -> dict[str, Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    found = [Requirement(line.split("#")[0]) for line in lines if line.split("#")[0].strip()]
    return {pin.name.lower(): pin for pin in found}


def floors() -> dict[str, Version]:
    """Of what the package needs, and of what its tests need of the extras."""
    extras = PROJECT["optional-dependencies"]
    needed = [Requirement(line) for line in (*PROJECT["dependencies"], *extras["train"], *extras["bench"])]
    assert all([each.operator for each in need.specifier] == [">="] for need in needed), "no upper bounds"
    return {need.name.lower(): Version(next(iter(need.specifier)).version) for need in needed}


def test_floors_are_what_is_tested() -> None:
    tested = {name: str(pin.specifier) for name, pin in pins("constraints-floor.txt").items()}
    assert {name: tested.get(name) for name in floors()} == {name: f"=={at}" for name, at in floors().items()}


def test_pins_are_no_older_than_the_floors() -> None:
    pinned = pins("constraints.txt")
    assert all(floor in SpecifierSet(f"<={pinned[name].specifier!s}".replace("<===", "<="))
               for name, floor in floors().items() if name in pinned)  # fmt: skip


# Files. ---------------------------------------------------------------------------------------------------------------


def test_the_makefile_uses_no_option_of_gnu_alone() -> None:
    assert re.findall(r"\bsed (?:-\w* )*-i|\breadlink -f|\bgrep -P|\bstat -c|\bxargs -r|\bcp --", MAKEFILE) == []


@pytest.mark.apart
def test_the_source_distribution_has_the_package_alone(tmp_path: Path) -> None:
    """Tests would need `tests/support` and the examples; a wheel is built of what there is."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "docs", "hub_cards", "examples")
    shutil.copytree(ROOT, copy, ignore=ignored)
    build = "from setuptools import build_meta; build_meta.build_sdist('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=copy, check=True, capture_output=True)
    [made] = (copy / "dist").glob("*.tar.gz")
    with tarfile.open(made) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "hf_specdecpp").rglob("*") if path.is_file()}
    assert {name for name in modules if "__pycache__" not in name} <= names
    assert {"LICENSE", "README.md", "pyproject.toml", "setup.py"} <= names
    assert [name for name in names if name.startswith(("tests", "examples", "docs"))] == []
    [unpacked] = (tmp_path / "unpacked").iterdir()
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=unpacked, check=True, capture_output=True)
