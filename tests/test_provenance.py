"""What cards and reports say of where they come from."""

import subprocess
import sys

from hf_specdecpp import provenance


def git(folder, *words):
    subprocess.run(["git", "-C", folder, "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True)  # noqa: S607 - fixed words


def test_the_command_as_typed_and_without_folders(tmp_path, monkeypatch):
    data = tmp_path / "my prompts.jsonl"
    data.write_text("{}")
    monkeypatch.setattr(sys, "argv", ["/usr/bin/specdecpp", "train", "--data", str(data), "--lr", "1" * 5000])
    assert provenance.command() == f"specdecpp train --data '{data}' --lr {'1' * 5000}"
    assert provenance.command(folders=False) == f"specdecpp train --data 'my prompts.jsonl' --lr {'1' * 5000}"


def test_the_commit_is_this_code_s_own(tmp_path, monkeypatch):
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


def test_without_git_there_is_no_commit(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert provenance.source_commit() is None
