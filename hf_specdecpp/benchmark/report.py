"""Reports of a benchmark: tables on the terminal, and Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from hf_specdecpp.benchmark.contestants import PLAIN, SAME_PASSES
from hf_specdecpp.benchmark.summary import FIRST, Row, best_of_families, busy_elsewhere, overall, too_close, verdict_of

WIDTH = 100
_BATCHES = (
    "Several prompts in one `generate()`, padded on the left. Both baselines are plain `generate()` on the same batch, "
    "and tokens/pass is per row."
)


def ratio(values: Sequence[float] | None) -> str:
    """Format a median with its interval, three numbers, as "1.52 (1.48-1.55)"; `None` as an empty text."""
    return "" if values is None else f"{values[0]:.2f} ({values[1]:.2f}-{values[2]:.2f})"


class Column(NamedTuple):
    """A column of the table: headings in the report and on the terminal (`None`: not shown), and the cell of a row."""

    report: str | None
    terminal: str | None
    cell: Callable[[Row], str]


COLUMNS = (
    Column("x plain (95 %)", "x plain", lambda row: ratio(row["plain"])),
    Column("x plain, same passes (95 %)", "x plain,\nsame passes", lambda row: ratio(row["same_passes"])),
    Column(f"x plain, first {FIRST} texts", f"first {FIRST}\ntexts", lambda row: ratio(row["first"]).split(" ")[0]),
    Column("x best constant length (95 %)", None, lambda row: ratio(row["constant"])),
    Column(None, "x best\nconstant", lambda row: ratio(row["constant"]).split(" ")[0]),
    Column("tokens/s", "tokens\n/s", lambda row: f"{row['tokens_per_second']:.1f}"),
    Column("tokens/pass", "tokens\n/pass", lambda row: f"{row['tokens_per_pass']:.2f}"),
    Column("discard rate", "dis-\ncarded", lambda row: f"{row['discard_rate']:.2f}"),
    Column("verification rate", None, lambda row: f"{row['verification_rate']:.3f}"),
    Column("drafted/round", None, lambda row: f"{row['drafted_per_round']:.1f}"),
    Column("prompts", None, lambda row: str(row["prompts"])),
    Column("disturbed", None, lambda row: str(row["disturbed"])),
)


def print_report(results: dict[str, Any], console: Console) -> None:
    """Print for each temperature the best setting of each family, the verdict, and batches; then any mismatches."""
    for line in notes(results):
        console.print(line)
    summary = results["summary"]
    for temperature in results["settings"]["temperatures"]:
        if rows := overall(summary, temperature):
            title = f"{mode(temperature)}, best setting of each kind of contestant, prompts: {rows[0]['prompts']}"
            console.print(_table(best_of_families(rows), title))
            console.print(verdict_of(rows))
        for name in dict.fromkeys(row["set"] for row in summary if row["batch"]):
            rows = [row for row in summary if (row["set"], row["temperature"]) == (name, temperature)]
            console.print(_table(rows, f"{mode(temperature)}, {name}: {rows[0]['prompts']}"), "")
    for mismatch in results["mismatches"]:
        console.print(describe_mismatch(mismatch), style="bold red" if counts(mismatch, results) else "yellow")
    if not lossless(results):
        console.print("FAILED: answers differ from plain generate(), so these speeds are invalid. Please report it.")


def _table(rows: Sequence[Row], title: str) -> Table:
    """Make a table without empty columns. Marks: `>` fastest, `~` interval overlaps with that of `>`, `*` disturbed."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, width=WIDTH)
    columns = [each for each in COLUMNS if each.terminal and any(map(each.cell, rows))]
    table.add_column("contestant", ratio=1)
    for column in columns:
        table.add_column(str(column.terminal), justify="right", no_wrap=True)
    close = [row["contestant"] for row in too_close(rows)]
    for place, row in enumerate(rows):
        mark = ">" if place == 0 else "~" if row["contestant"] in close else " "
        cells = (each.cell(row) for each in columns)
        name = f"{mark}{'*' if row['disturbed'] else ' '}{row['contestant']}"
        table.add_row(name, *cells, style=None if place else "bold green")
    return table


def notes(results: dict[str, Any]) -> list[str]:
    """Return sentences on target, draft, matrix multiplications and other load, for above the tables."""
    settings, where = results["settings"], results["environment"]
    threads = f"{where['threads']} thread{'' if where['threads'] == 1 else 's'}"
    place = f"{settings['dtype']}, {where['device']}, {threads}"
    lines = [f"target {settings['target']} ({place}), draft: {settings['draft_name']}"]
    if not results["runs"]:
        return lines
    if "float16" in settings["products"] or "oneDNN" in settings["products"]:
        lines.append("hf_specdecpp keeps copies of the weights of large layers, in float16 where that is exact.")
        if "own (" in settings["products"]:
            lines.append(
                f"Some layers have no copy: {settings['products']}. Copies take at most a quarter of the free memory, "
                "and are made only of weights that they represent exactly."
            )
    if "int8" in settings["products"]:
        lines.append(f"hf_specdecpp drafts in int8, transformers with the same draft in {settings['dtype']}.")
    lines.append(f'"{SAME_PASSES.name}" is plain generate() with the matrix multiplications of hf_specdecpp.')
    if rows := [row for row in results["runs"] if row["disturbed"]]:
        lines.append(
            f"{len(rows)} of {len(results['runs'])} runs were disturbed: they waited for a processor for up to "
            f"{max(row['waited'] for row in rows):.0%} of their time. They are marked *."
        )
    if busy := busy_elsewhere(results["runs"]):
        lines.append(
            f"Other processes kept {busy:.1f} of the machine's {where['processors']} processors busy, which slows down "
            "memory: the ratios may differ on an idle machine."
        )
    return lines


def describe_mismatch(found: Row) -> str:
    """Return a sentence on the first difference between a greedy answer and plain generation (`mismatches`)."""
    where = (
        f"{found['contestant']} differs from plain generate() from token {found['place']} on, in "
        f"{found['set']}/{found['prompt']}"
    )
    tokens = " and ".join("the end" if text is None else repr(text) for text in found["texts"])
    if found["near_tie"]:
        return f"{where}: a near-tie ({tokens}, {found['gap']:.1e} of the largest logit apart), which rounding decides."
    return f"{where}: {tokens}, {found['gap']:.1e} of the largest logit apart, which rounding does not explain."


def lossless(results: dict[str, Any]) -> bool:
    """Whether no mismatch is one that `counts`."""
    return not any(counts(found, results) for found in results["mismatches"])


def counts(mismatch: Row, results: dict[str, Any]) -> bool:
    """Whether a mismatch fails the benchmark: a contestant of this package differs, and not by a near-tie."""
    return mismatch["contestant"] in results["ours"] and not mismatch["near_tie"]


def markdown(results: dict[str, Any]) -> str:
    settings, where, summary = results["settings"], results["environment"], results["summary"]
    parts = ["# Benchmark", *notes(results), f"Made by\n\n```console\n{results['command']}\n```"]
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "hf_specdecpp"))
    parts.append(f"{versions}; seed {settings['seed']}, up to {settings['max_new_tokens']} new tokens.")
    for temperature in settings["temperatures"]:
        here = [row for row in summary if row["temperature"] == temperature]
        if rows := [row for row in here if not row["batch"]]:
            text = verdict_of(overall(summary, temperature))
            parts += [f"## {mode(temperature)}, measured", text, _live_table(rows)]
        if rows := [row for row in here if row["batch"]]:
            parts += [f"## {mode(temperature)}, batches", _BATCHES, _live_table(rows)]
    return "\n\n".join([*parts, *_checks(results)]) + "\n"


def _live_table(rows: Sequence[Row]) -> str:
    columns = [each for each in COLUMNS if each.report]
    fastest = {row["set"]: row for row in reversed(rows)}
    lines = []
    for row in rows:
        mark = "**" if row is fastest[row["set"]] else ""
        name, *ratios = (f"{mark}{each}{mark}" for each in (row["contestant"], *(c.cell(row) for c in columns[:2])))
        lines.append((row["set"], name, *ratios, *(column.cell(row) for column in columns[2:])))
    return markdown_table(("set", "contestant", *(column.report for column in columns)), lines)


def _checks(results: dict[str, Any]) -> list[str]:
    """Lines of the report on losslessness; empty if nothing was generated."""
    if not results["runs"]:
        return []
    ours = [found for found in results["mismatches"] if found["contestant"] in results["ours"]]
    greedy = [row for row in results["runs"] if row["temperature"] == 0.0 and row["contestant"] != PLAIN.name]
    compared = sum(len(row["answers"]) for row in greedy)
    same = {(row["set"], row["prompt"]): row["answers"] for row in greedy if row["contestant"] == SAME_PASSES.name}
    assisted = [row for row in greedy if row["contestant"] in results["ours"]]
    apart = [a != b for row in assisted for a, b in zip(row["answers"], same[row["set"], row["prompt"]], strict=True)]
    lines = [
        f"- {compared} greedy answers were compared with plain generate(); {len(ours)} of hf_specdecpp differ. "
        f"{sum(apart)} of {len(apart)} differ from plain generation with the same passes.",
        *(f"- {describe_mismatch(found)}" for found in results["mismatches"]),
    ]
    return ["## Checks", "\n".join(lines)]


def markdown_table(header: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in table)


def mode(temperature: float) -> str:
    return "greedy" if temperature == 0.0 else f"temperature {temperature:g}"
