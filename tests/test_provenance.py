"""What cards and reports say of where they come from."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_specdecpp import provenance

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
    head = (tmp_path / ".git" / "refs" / "heads").glob("*")
    assert provenance.source_commit() == next(head).read_text().strip()


def test_without_git_there_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert provenance.source_commit() is None
