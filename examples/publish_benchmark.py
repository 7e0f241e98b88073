"""Put the reports of `specdecpp bench` into a page, with their pictures beside it.

    python examples/publish_benchmark.py bench/qwen bench/smollm2 --page docs/benchmarks.md

The reports replace what stands between the two marks of the page. Tables and pictures are as `specdecpp bench` wrote
them; nothing is typed by hand.
"""

import argparse
import re
import shutil
from pathlib import Path

BEGIN, END = "<!-- reports: begin -->", "<!-- reports: end -->"


def publish(folders: list[Path], page: Path) -> None:
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} lacks the marks {BEGIN} and {END}, so there is no place for the reports.")
    reports = [_report(folder, page.parent / "benchmarks" / folder.name) for folder in folders]
    page.write_text(f"{before}{BEGIN}\n\n{''.join(reports)}{END}{after}", encoding="utf-8")


def _report(folder: Path, pictures: Path) -> str:
    """The report of a folder, two levels further down, its pictures copied to `pictures`."""
    pictures.mkdir(parents=True, exist_ok=True)
    for picture in folder.glob("*.png"):
        shutil.copy(picture, pictures)
    text = (folder / "report.md").read_text(encoding="utf-8")
    text = re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE)
    text = text.replace("## Benchmark", f"## {folder.name}", 1)
    return re.sub(r"\]\(([^/)]+\.png)\)", rf"](benchmarks/{pictures.name}/\1)", text) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of specdecpp bench")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    arguments = parser.parse_args()
    publish(arguments.folders, arguments.page)
