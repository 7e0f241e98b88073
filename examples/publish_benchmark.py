"""Copy reports of `specdecpp bench` into the repository, each into its own folder, and list all reports in a page.

    python examples/publish_benchmark.py bench/qwen bench/smollm2 --page docs/benchmarks.md

`bench/qwen` replaces `docs/benchmarks/qwen/report.md` and its pictures. The list between the two marks of the page is
then made from all reports under `docs/benchmarks`. `--card` writes the model card of a repository in `hub_cards` from
the results in `hub_cards/results`, and from the speeds of a report if one is given:

    python examples/publish_benchmark.py bench/qwen --card hub_cards/specdecpp-qwen2.5-coder-1.5b-instruct
    python examples/publish_benchmark.py --card hub_cards/specdecpp-gemma-3-270m
"""

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

from hf_specdecpp.files import Repository
from hf_specdecpp.hub.publishing import make_card
from hf_specdecpp.hub.repository import load_config, load_head

ABOUT = re.compile(r"^target (?:\S+/)?(\S+) \((\w+), .*?\), draft: (?:\S+/)?(.*)$")
SPEED_OF = r"([\d.]+ \([^)]*\)) times"
FASTEST = re.compile(rf"the fastest, (.*?), runs at {SPEED_OF}(?:.*?generate\(\) and at {SPEED_OF})?")
BEGIN, END = "<!-- reports: begin -->", "<!-- reports: end -->"


def publish(folders: list[Path], page: Path) -> None:
    reports = page.with_suffix("")
    for folder in folders:
        _copy(folder, reports / folder.name)
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} lacks the marks {BEGIN} and {END}, so there is no place for the list.")
    lines = ["| report | target; draft | fastest contestant, x plain (95 %) |", "|---|---|---|"]
    lines += [_line(report, page) for report in sorted(reports.glob("*/report.md"))]
    page.write_text(f"{before}{BEGIN}\n\n" + "\n".join(lines) + f"\n\n{END}{after}", encoding="utf-8")


def _copy(folder: Path, published: Path) -> None:
    shutil.rmtree(published, ignore_errors=True)
    published.mkdir(parents=True)
    for picture in folder.glob("*.png"):
        shutil.copy(picture, published)
    text = (folder / "report.md").read_text(encoding="utf-8")
    (published / "report.md").write_text(text.replace("# Benchmark", f"# {published.name}", 1), encoding="utf-8")


def _line(report: Path, page: Path) -> str:
    """The row of a report: its link, target and draft, and the fastest of each of its verdicts with its speeds."""
    text = report.read_text(encoding="utf-8")
    about = ABOUT.sub(r"\1, \2; \3", text.split("\n\n")[1])
    said = []
    for mode, verdict in re.findall(r"^## (.*), measured\n\n(.*)", text, re.MULTILINE):
        name, plain, same = FASTEST.search(verdict).groups()
        said.append(f"{mode}: {name}, {plain}" + (f", same passes {same}" if same else ""))
    said = said or (["rules compared on recorded texts"] if ", replayed" in text else [])
    return f"| [{report.parent.name}]({report.relative_to(page.parent)}) | {about} | {'<br>'.join(said)} |"


def write_card(repository: Path, folder: Path | None) -> None:
    """Write a card as `specdecpp train` does, of the kept results of its run, and of a benchmark's in a folder, if
    there is one, which are kept, too."""
    kept = repository.parent / "results" / f"{repository.name}.json"
    results = json.loads(kept.read_text(encoding="utf-8"))
    if folder is not None:
        results["speed"] = json.loads((folder / "results.json").read_text(encoding="utf-8"))["speeds"]
        kept.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    (repository / "README.md").write_text(rendered(repository, results), encoding="utf-8")


def rendered(repository: Path, results: dict[str, Any]) -> str:
    source = Repository(str(repository))
    config = load_config(source)
    return str(make_card(config, load_head(source, config), results))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="output folders of specdecpp bench")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--card", type=Path, help="a repository whose card is written, with the folder's speeds")
    arguments = parser.parse_args()
    if arguments.folders:
        publish(arguments.folders, arguments.page)
    if arguments.card is not None:
        [folder] = arguments.folders or [None]
        write_card(arguments.card, folder)
