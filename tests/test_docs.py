"""The guides: every link within the repository leads somewhere, and settings.md says what the dataclasses say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for folder in ("docs", "hub_cards") for page in ROOT.glob(f"{folder}/**/*.md"))]
)
CODE_BLOCK = re.compile(r"^```.*?^```", flags=re.DOTALL | re.MULTILINE)
CODE_SPAN = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page: `## On a CPU` is `on-a-cpu`."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in LINK.findall(CODE_SPAN.sub("code", CODE_BLOCK.sub("", page.read_text(encoding="utf-8")))):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"`((?:docs|examples|hf_specdecpp|tests)/[\w/-]+\.\w+)`", page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n[a](page.md#one) [b](#one) [c](http://x) `[d](no.md)` [e](no.md) [f](#two) [g](page.md#two)"
    )
    assert broken_links(page) == ["no.md", "#two", "page.md#two"]


def test_settings_are_those_of_the_code() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "settings.py"))["page"]
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == page(), "run `make docs`"
