"""Draw the numbers that `specdecpp bench` and the stage `eval` of `specdecpp train` have written.

    python examples/plot_reports.py bench/results.json my-head-work/evaluation/evaluation.json

The pictures are written beside each file: `speed-up-TEMPERATURE.png` of a benchmark shows the best setting of each kind
of contestant, and `curve-SET-TEMPERATURE.png` of an evaluation the discard rate against the verification rate of each
stopping rule. Needs matplotlib (`pip install "hf-specdecpp[bench]"`).
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_specdecpp.benchmark.contestants import PLAIN
from hf_specdecpp.benchmark.report import mode
from hf_specdecpp.benchmark.summary import best_of_families, overall

sys.path.append(str(Path(__file__).parent / "replay"))
from drawing import COLOURS, MARKERS, new_figure, save


def plot_speeds(rows: Sequence[dict[str, Any]], path: Path, how: str) -> None:
    """Draw the best setting of each family: median speed relative to plain generation, and to it on the same passes."""
    best = [row for row in best_of_families(rows) if row["contestant"] != PLAIN.name][::-1]
    figure, axes = new_figure(7.5, 1.6 + 0.5 * len(best))
    ratios = {"plain": "over plain generate()", "same_passes": "over plain generate(), same passes"}
    for number, (ratio, label) in enumerate(ratios.items()):
        speeds, lows, highs = zip(*(row[ratio] for row in best), strict=True)
        errors = [[max(a - b, 0.0) for a, b in zip(*ends, strict=True)] for ends in ((speeds, lows), (highs, speeds))]
        places = [place + 0.2 - 0.4 * number for place in range(len(best))]
        axes.barh(places, speeds, height=0.38, xerr=errors, color=COLOURS[number], capsize=3, label=label)
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(best)), [row["contestant"] for row in best])
    axes.set(xlabel="relative speed, median of prompts", title=f"Best setting of each rule ({how})")
    figure.legend(frameon=False, loc="outside lower center", ncols=2)
    save(figure, path)


def plot_curves(curves: Mapping[str, Sequence[dict[str, float]]], path: Path, title: str) -> None:
    """Draw discard rate against verification rate, with a line for each rule."""
    figure, axes = new_figure(7, 5)
    for (name, points), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        x, y = ([point[rate] for point in points] for rate in ("verification_rate", "discard_rate"))
        width = 2.2 if name == "head" else 1.2
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=width, label=name)
    axes.set(xlabel="verification rate: target passes per generated token", title=title, ylim=(0, None))
    axes.set_ylabel("discard rate: discarded candidates per generated token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="stopping rule (down and left is better)")
    save(figure, path)


def draw(file: Path) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    for temperature in found["settings"]["temperatures"] if "summary" in found else ():
        if rows := overall(found["summary"], temperature):
            plot_speeds(rows, file.with_name(f"speed-up-{temperature:g}.png"), mode(temperature))
    for name, temperatures in found.get("sets", {}).items():
        for temperature, report in temperatures.items():
            title = f"Where to stop drafting ({name}, temperature {temperature})"
            plot_curves(report["curves"], file.with_name(f"curve-{name}-{temperature}.png"), title)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for each in parser.parse_args().files:
        draw(each)
