"""What pyproject.toml cannot say: the page and the links of the package index, made of README and one address."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def repository() -> str:
    """The address of the repository, which hf_specdecpp/version.py has."""
    source = (ROOT / "hf_specdecpp" / "version.py").read_text(encoding="utf-8")
    found = re.search(r'^REPOSITORY = "(.+?)"', source, re.MULTILINE)
    assert found is not None  # noqa: S101
    return found[1]


def page() -> str:
    """README with absolute links: pictures are shown as they are, all else as the repository shows it."""
    text, base = (ROOT / "README.md").read_text(encoding="utf-8"), repository()
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\1{base}/raw/main/", text)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https?:|#)", rf"\1{base}/blob/main/", text)


def links() -> dict[str, str]:
    base = repository()
    pages = {"Documentation": "docs/README.md", "Benchmarks": "docs/benchmarks.md", "Changelog": "CHANGELOG.md"}
    return {
        "Source": base,
        "Issues": f"{base}/issues",
        **{name: f"{base}/blob/main/{at}" for name, at in pages.items()},
    }


if __name__ == "__main__":
    setup(long_description=page(), long_description_content_type="text/markdown", project_urls=links())
