"""What the README shows works: its program, names, commands, and length."""

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
from support.files.repos import save_chat_model
from typer.main import get_command

from hf_specdecpp import provenance
from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.config.speculation import TREES, Rule

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
[FIRST] = re.findall(r"^```python\n(from transformers.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


@pytest.mark.slow  # builds a wheel, and imports torch again
def test_the_first_block_runs_from_a_wheel_without_a_clone(tmp_path: Path) -> None:
    assert len(FIRST.strip().splitlines()) <= 25
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "hf_specdecpp", copy / "hf_specdecpp", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "LICENSE", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, copy / name)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(copy)], check=True)
    [wheel] = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    folder = save_chat_model(tmp_path / "target")
    program = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n{FIRST.replace(MODEL, folder)}"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "plain generate()" in done.stdout or "drafted" in done.stdout
    listed = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
         "from hf_specdecpp.cli import app; app(['drafts', 'Qwen/Qwen3-8B'])"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert "z-lab/Qwen3-8B-DFlash-b16" in listed.stdout


def test_a_stranger_sees_how_much_an_edit_and_an_open_question_gain() -> None:
    first, _, rest = README.partition("## How much faster")
    assert re.search(r"pip install.*assist\(", first, flags=re.DOTALL)
    assert len(re.findall(r"faster: [\d.]+ times the speed of plain", first)) == 2
    assert rest


def test_pretended_drafts_are_told_from_real_ones() -> None:
    """Factors of random weights stand under a heading of their own, say so first, and are not bold."""
    real, _, rest = README.partition("pretended drafts\n")
    pretended, _, rest = rest.partition("\n## ")
    tables = [re.findall(r"^\| (.*?) \|.*\d.*\|$", part, flags=re.MULTILINE) for part in (real, pretended)]
    assert [len(table) >= 2 for table in tables] == [True, True]
    assert all(row.startswith("random, ") for row in tables[1])
    assert "**" not in pretended
    assert "texts equal to plain's" in pretended
    assert "random" not in (real + rest).lower()


def test_the_demo_runs_the_setting_of_a_row() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    recipe = re.findall(r"^demo:.*\n((?:\t.*\n)+)", makefile, flags=re.MULTILINE)[0]
    assert "`make demo` runs the second row's setting" in README
    assert "--assistant hub_cards/specdecpp-smollm2-135m-instruct --lookup" in recipe
    assert "OMP_NUM_THREADS=1" in recipe


def test_a_package_index_that_warns_does_not_fill_the_first_screen() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"-m pip (?:install|download) (\S+)", makefile)
    assert len(commands) > 5
    assert set(commands) == {"-qq"}


def test_names_exist() -> None:
    for name in re.findall(r"SpecDecPPAssistant\.(\w+)", README):
        assert hasattr(SpecDecPPAssistant, name)


def test_every_command_is_shown() -> None:
    commands: Any = get_command(app)
    assert set(re.findall(r"^specdecpp (\w+)", README, flags=re.MULTILINE)) == set(commands.commands)


def test_it_fits_on_a_few_screens() -> None:
    lines = README.splitlines()
    assert len(lines) <= 185
    assert max(map(len, lines)) <= 120


def test_every_rule_and_tree_is_in_the_guide_to_choosing() -> None:
    guide = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    for rule in get_args(Rule):
        assert f"`{rule}`" in guide
    for tree in TREES:
        assert f'`tree="{tree}"`' in guide


BUILT = runpy.run_path(str(ROOT / "setup.py"), run_name="setup")
ADDRESS = "https://example.org/ours"
PLACEHOLDER = re.compile(r"\bOWNER\b|github\.com/\w+/hf[-_]specdecpp|<(?:owner|user|org)>")


def test_the_page_of_the_package_index_has_absolute_links_only() -> None:
    """All from the one address that setup.py has."""
    links = re.findall(r"\]\(([^)\s]+)\)", BUILT["page"](ADDRESS))
    assert len(links) == len(re.findall(r"\]\(([^)\s]+)\)", README))
    assert all(link.startswith(("https://", "#")) for link in links)
    assert f"{ADDRESS}/raw/main/docs/pictures/demo.svg" in links
    assert f"{ADDRESS}/blob/main/docs/using.md" in links
    assert all(link.startswith(ADDRESS) for link in BUILT["links"](ADDRESS).values())


def test_without_a_public_repository_nothing_links_to_one() -> None:
    page = BUILT["page"](None)
    assert all(link.startswith(("https://", "#")) for link in re.findall(r"\]\(([^)\s]+)\)", page))
    assert "docs/using.md" in page
    assert ".svg" not in page
    assert BUILT["links"](None) == {}


def test_no_placeholder_is_left_in_what_a_user_sees() -> None:
    """An address that nobody has: where something is not known, nothing stands in its place."""
    seen = [*ROOT.glob("*.*"), *(path for name in ("hf_specdecpp", "docs", "examples", "hub_cards")
                                for path in (ROOT / name).rglob("*"))]  # fmt: skip
    text = {".py", ".md", ".toml", ".json", ".ipynb", ".cff", ".yaml", ".svg", ".txt"}
    assert PLACEHOLDER.search("https://github.com/OWNER/hf_specdecpp")
    read = {path: path.read_text(encoding="utf-8") for path in seen if path.suffix in text and path.is_file()}
    assert {path: found[0] for path, content in read.items() if (found := PLACEHOLDER.search(content))} == {}


# What cards and reports say of where they come from. ------------------------------------------------------------------


GIT = str(shutil.which("git"))
AUTHOR = ("-c", "user.name=a", "-c", "user.email=a@b")  # a machine without an identity cannot commit


def git(folder: Path, *words: str) -> None:
    subprocess.run([GIT, "-C", folder, *AUTHOR, *words], check=True)


def test_the_command_as_typed_and_without_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "my prompts.jsonl"
    data.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/specdecpp", "train", "--data", str(data), "--lr", "1" * 5000])
    assert provenance.command() == f"specdecpp train --data '{data}' --lr {'1' * 5000}"
    assert provenance.command(folders=False) == f"specdecpp train --data 'my prompts.jsonl' --lr {'1' * 5000}"


def test_names_that_others_may_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "draft").mkdir(parents=True)
    names = ["org/target", str(tmp_path / "gone"), "models/draft", "./models"]
    assert [provenance.public_name(name) for name in names] == ["org/target", "gone", "draft", "models"]
    monkeypatch.setattr(sys, "argv", ["specdecpp", "train", "--output", "/new/out", "--data=/new/x.jsonl", "--lr", "1"])
    assert provenance.command(folders=False) == "specdecpp train --output out --data=x.jsonl --lr 1"


def test_the_commit_is_this_code_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was installed below somebody else's repository must not take its commit for its own."""
    code = tmp_path / "venv" / "provenance.py"
    code.parent.mkdir()
    code.touch()
    (tmp_path / "theirs.txt").touch()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "theirs.txt")
    git(tmp_path, "commit", "-qm", "theirs")
    monkeypatch.setattr(provenance, "__file__", str(code))
    assert provenance.source_commit() is None

    git(tmp_path, "add", "venv")
    git(tmp_path, "commit", "-qm", "ours")
    assert provenance.source_commit() == next((tmp_path / ".git" / "refs" / "heads").glob("*")).read_text().strip()


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.source_commit() is None
