"""Draw the speed of the published assistants by kind of text, from the reports in `docs/benchmarks`.

    python examples/plot_speeds.py --output docs/pictures/speeds.svg

Each bar is a median over prompts: the speed relative to plain `generate()` with the same matrix multiplications, which
is the gain of speculation alone. The lines are 95 % intervals; pale bars are a single prompt. Each line of `SHOWN`
names a report and its rows; all numbers are read from the reports.
"""

import argparse
import re
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "replay"))
from drawing import COLOURS, new_figure, save

REPORTS = Path(__file__).parents[1] / "docs" / "benchmarks"
SAME_PASSES = 3  # the column of a report

QWEN, SMOLLM2, GEMMA = "Qwen2.5-Coder-1.5B", "SmolLM2-135M", "Gemma 3 270M"
# Target, report, contestant. No setting was tuned.
SHOWN = (
    (QWEN, "qwen-bfloat16-zen5", "lookup + draft (head)"),
    (SMOLLM2, "smollm2-lookup-bfloat16-zen5", "lookup + draft (head)"),
    (GEMMA, "gemma3-bfloat16-zen5", "lookup + draft (head)"),
)
SETS = {
    "gsm8k_test": "school maths (GSM8K)",
    "humaneval_test": "code (HumanEval)",
    "alpaca_test": "instructions (Alpaca)",
    "rewrite": "rewrite a text",
    "summarise": "summarise a text",
    "passage": "questions about a text",
    "turns": "several turns",
    "arithmetic": "arithmetic",
    "open": "open questions",
}
Speeds = dict[tuple[str, str], tuple[float, float, float]]


def read(report: str, contestant: str) -> dict[str, tuple[float, float, float]]:
    """Median and interval of a contestant by set."""
    found = {}
    for line in report.splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split(" |")]
        if len(cells) > SAME_PASSES and cells[1] == contestant and cells[0] in SETS:
            median, low, high = map(float, re.findall(r"[\d.]+", cells[SAME_PASSES]))
            found[cells[0]] = (median, low, high)
    return found


def collect(folder: Path) -> Speeds:
    """By target and set."""
    speeds: Speeds = {}
    for target, name, contestant in SHOWN:
        rows = read((folder / name / "report.md").read_text(encoding="utf-8"), contestant)
        if not rows:
            raise SystemExit(f"{folder / name}/report.md has no rows of {contestant!r}, so there is nothing to draw.")
        speeds.update({(target, each): speed for each, speed in rows.items()})
    return speeds


def draw(speeds: Speeds, output: Path) -> None:
    """Bars by set, one a target."""
    figure, axes = new_figure(8.2, 5.6)
    targets = list(dict.fromkeys(target for target, _, _ in SHOWN))
    place, ticks = 0.0, []
    for each in SETS:
        bars = [target for target in targets if (target, each) in speeds]
        for target in bars:
            median, low, high = speeds[target, each]
            colour = COLOURS[targets.index(target)]
            alone = {"alpha": 0.4} if low == high else {"label": target}  # one prompt has no interval
            axes.barh(place, median, height=0.85, color=colour, **alone)
            axes.plot((low, high), (place, place), color="#333333", linewidth=1.2)
            axes.text(max(high, 1.0) + 0.05, place, f"{median:.2f}", va="center", fontsize=8)
            place += 1
        ticks.append(place - (len(bars) + 1) / 2)
        place += 0.8
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(ticks, list(SETS.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(
        xlabel="speed over plain generate(), equal multiplications: median, 95 % interval (pale: one prompt)",
        xlim=(0, 1.1 * max(high for _, _, high in speeds.values())),
    )
    axes.spines[["top", "right"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend([handles[target] for target in targets], targets, frameon=False, loc="outside upper center", ncols=3)
    save(figure, output)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("docs/pictures/speeds.svg"))
    draw(collect(REPORTS), parser.parse_args().output)
