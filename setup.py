"""What pyproject.toml cannot say: the page and the links of the package index, made of README and one address."""

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
REPOSITORY: str | None = None  # where the source is public, such as "https://example.org/hf_specdecpp"; not yet


def page(base: str | None) -> str:
    """README for a reader elsewhere: links are absolute, pictures are shown as they are. Without an address a link to
    a file becomes its text, and a picture is left out."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    to_file = r"\((?!https?:|#)([^)\s]+)\)"
    picture, link = (rf"!\[([^\]]*)\]{to_file}", rf"(?<!!)\[([^\]]*)\]{to_file}")
    text = re.sub(picture, "" if base is None else rf"![\1]({base}/raw/main/\2)", text)
    return re.sub(link, r"\1" if base is None else rf"[\1]({base}/blob/main/\2)", text)


def links(base: str | None) -> dict[str, str]:
    if base is None:
        return {}
    pages = {"Documentation": "docs/README.md", "Benchmarks": "docs/benchmarks.md", "Changelog": "CHANGELOG.md"}
    return {
        "Source": base,
        "Issues": f"{base}/issues",
        **{name: f"{base}/blob/main/{at}" for name, at in pages.items()},
    }


if __name__ == "__main__":
    setup(
        long_description=page(REPOSITORY),
        long_description_content_type="text/markdown",
        project_urls=links(REPOSITORY),
    )
