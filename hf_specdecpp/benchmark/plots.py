"""The pictures of a benchmark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from hf_specdecpp.benchmark.contestants import PLAIN
from hf_specdecpp.benchmark.replay.sweep import FIXED, INFORMED
from hf_specdecpp.benchmark.report import mode
from hf_specdecpp.benchmark.summary import best_of_families, overall
from hf_specdecpp.figures import COLOURS, MARKERS, new_figure, save

Points = dict[str, list[tuple[float, float]]]


def plot_all(results: dict[str, Any], folder: Path) -> None:
    """Every picture that `report.markdown` shows, and those that it does not."""
    for temperature in results["settings"]["temperatures"]:
        rows = overall(results["summary"], temperature)
        for name, plot in (("speed-up", plot_speeds), ("tokens-per-pass", plot_budgets), ("time", plot_times)):
            if rows:
                plot(rows, folder / f"{name}-{temperature:g}.png", mode(temperature))
    for each in results["replays"]:
        title = f"{each['set']}, {mode(each['temperature'])}"
        plot_pareto(each["rows"], folder / f"pareto-{each['set']}-{each['temperature']:g}.png", title)


def plot_speeds(rows: Sequence[dict[str, Any]], path: Path, how: str) -> None:
    """The best setting of each family: median speeds over plain generation, as it is and with the same passes."""
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


def plot_pareto(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Discard over verification rate, a line a rule, and the front of all rules (SpecDec++, figure 4)."""
    families: Points = defaultdict(list)
    for row in rows:
        if row["setting"] is not None:
            families[row["family"]].append((row["verification_rate"], row["discard_rate"]))
    front: list[tuple[float, float]] = []  # the points that no other is below and left of
    for point in sorted(point for family, points in families.items() if family != INFORMED for point in points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    figure, axes = _lines(families, dashed=(FIXED, INFORMED))
    axes.plot(*zip(*front, strict=True), color="#BBBBBB", linewidth=6, zorder=0, label="front of all rules")
    axes.set(xlabel="verification rate: target passes per generated token", title=f"Where to stop drafting ({title})")
    axes.set_ylabel("discard rate: discarded candidates per generated token")
    axes.set_ylim(0, min(axes.get_ylim()[1], 2.5))
    axes.legend(frameon=False, title="down and left is better")
    save(figure, path)


def plot_budgets(rows: Sequence[dict[str, Any]], path: Path, how: str) -> None:
    """Tokens per target pass over candidates a round."""
    families: Points = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["drafted_per_round"]):
        families[row["family"]].append((row["drafted_per_round"], row["tokens_per_pass"]))
    figure, axes = _lines(families)
    axes.set(xlabel="candidates a round", ylabel="tokens per target pass", title=f"What a budget yields ({how})")
    axes.legend(frameon=False)
    save(figure, path)


def _lines(families: Points, dashed: Collection[str] = ()) -> tuple[Any, Any]:
    """A figure with a line a family."""
    figure, axes = new_figure(7.5, 5.5)
    for number, (family, points) in enumerate(families.items()):
        style: dict[str, Any] = {"color": COLOURS[number % 8], "marker": MARKERS[number % 8], "markersize": 4}
        axes.plot(*zip(*points, strict=True), linestyle="--" if family in dashed else "-", label=family, **style)
    axes.grid(alpha=0.3)
    return figure, axes


def plot_times(rows: Sequence[dict[str, Any]], path: Path, how: str) -> None:
    """What the time of a token goes into, for the best setting of each family."""
    best = best_of_families(rows)[::-1]
    figure, axes = new_figure(7.5, 1.4 + 0.36 * len(best))
    left = [0.0] * len(best)
    for part, colour in zip(("prompt", "draft", "target", "rest"), COLOURS, strict=False):
        widths = [1e3 * row["time"][part] / row["tokens_per_second"] for row in best]
        axes.barh([row["contestant"] for row in best], widths, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="milliseconds a token (of contestants not ours, the rest includes drafting)", title=f"Time ({how})")
    axes.legend(frameon=False)
    save(figure, path)
