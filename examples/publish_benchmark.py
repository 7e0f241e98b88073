"""Publish the reports of `specdecpp bench`, each in a folder of its own, and list all of them in a page.

    python examples/publish_benchmark.py bench/qwen bench/smollm2 --page docs/benchmarks.md

`bench/qwen` becomes `docs/benchmarks/qwen/report.md` with its pictures, as `specdecpp bench` wrote them; what was there
before goes. Between its two marks the page then lists every report under `docs/benchmarks`, with what it says about
itself: nothing is typed by hand. A single report can also renew the speeds in a model card:

    python examples/publish_benchmark.py bench/qwen --card hub_cards/specdecpp-qwen2.5-coder-1.5b-instruct/README.md
"""

import argparse
import json
import re
import shutil
from pathlib import Path

from jinja2 import Template

from hf_specdecpp.hub import publishing as cards

SPEED = re.compile(r"## Speed\n.*?(?=(?:{% endif %}\n)?## Training\n)", re.DOTALL)
OPENING = re.compile(r"(?<=\n\n)(Makes|Did not make|Drafts for) `generate\(\)`.*?(?=\n\n)", re.DOTALL)
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


def renew_card(folder: Path, card: Path) -> None:
    """Write the first sentences and the part "Speed" of a card as `specdecpp train` would, of results in a folder."""
    speeds = json.loads((folder / "results.json").read_text(encoding="utf-8"))["speeds"]
    template = Path(cards.__file__).with_name("card_template.md").read_text(encoding="utf-8")
    part = Template(SPEED.findall(template)[0]).render(training={"speed": speeds}, number=cards.number)
    text = OPENING.sub(lambda _: cards.opening(speeds), card.read_text(encoding="utf-8"), count=1)
    card.write_text(SPEED.sub(lambda _: part + "\n\n", text), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="output folders of specdecpp bench")
    parser.add_argument("--page", type=Path, default=Path("docs/benchmarks.md"))
    parser.add_argument("--card", type=Path, help="a model card that shows the speeds of the only folder")
    arguments = parser.parse_args()
    publish(arguments.folders, arguments.page)
    if arguments.card is not None:
        [one] = arguments.folders
        renew_card(one, arguments.card)
