"""The files of the Space as Hugging Face reads them: the header of its README, and that what it names is there."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "hub_cards" / "space"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


def test_the_header_is_one_of_a_gradio_space() -> None:
    header: dict[str, Any] = yaml.safe_load(README.split("---\n")[1])
    assert header["sdk"] == "gradio"
    assert (FOLDER / header["app_file"]).is_file()
    assert {header["colorFrom"], header["colorTo"]} <= COLOURS
    assert len(header["short_description"]) <= 60
    # The version that the tests run.
    assert f"gradio=={header['sdk_version']}" in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()


def test_its_variables_are_those_of_the_program() -> None:
    read = set(re.findall(r'os\.environ\.get\("([A-Z]+)"', (FOLDER / "app.py").read_text(encoding="utf-8")))
    assert set(re.findall(r"^\| `([A-Z]+)` \|", README, flags=re.MULTILINE)) == read != set()


def test_it_installs_what_it_imports() -> None:
    asked = (FOLDER / "requirements.txt").read_text(encoding="utf-8")
    assert re.search(r"^hf-specdecpp\[bench\]", asked, flags=re.MULTILINE)  # with matplotlib, which draws trees
