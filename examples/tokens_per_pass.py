"""Make one table of tokens per target pass from runs of `examples/replay/rounds.py` or `specdecpp bench`.

    python examples/tokens_per_pass.py bench/trees-smollm2 bench/trees-qwen --page docs/benchmarks/trees/report.md

Tokens per pass depend on models, prompts and settings, and not on the machine. A second table shows the relative
difference between trees on the same texts, with a 95 % interval over the texts. The tables replace the content between
the marks of the page.
"""

import argparse
import json
from pathlib import Path

from hf_specdecpp.benchmark.report import markdown_table
from hf_specdecpp.figures import ratio_of_sums

BEGIN, END = "<!-- tokens per pass: begin -->", "<!-- tokens per pass: end -->"
LEADS = [
    (f"dyspec {budget} ({judge})", other)
    for budget in (16, 64)
    for judge in ("head", "q")
    for other in (f"static best {budget}", f"dyspec {budget} (q)")
    if other != f"dyspec {budget} ({judge})"
]


def cells(results: dict) -> tuple[dict, int, str]:
    """Tokens a pass by contestant and (temperature, set), the number of texts in a cell, and where they are from."""
    found: dict[str, dict] = {}
    if not (rows := results.get("round_replays", [])):
        rows = [row for row in results["summary"] if row["set"] != "all" and row["contestant"] != "plain"]
        for row in rows:
            found.setdefault(row["contestant"], {})[row["temperature"], row["set"]] = row["tokens_per_pass"]
        return found, max(row["prompts"] for row in rows), "generated live"
    for name, of_name in grouped(rows, lambda row: row["contestant"]).items():
        found[name] = {
            column: 1.0 + sum(row["accepted"] for row in group) / sum(row["rounds"] for row in group)
            for column, group in grouped(of_name, lambda row: (row["temperature"], row["set"])).items()
        }
    texts = len({(row["set"], row["prompt"]) for row in rows}) // len({row["set"] for row in rows})
    return found, texts, "replayed"


def grouped(rows: list[dict], key) -> dict:
    groups: dict = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def leads(rows: list[dict]) -> str:
    """A line for each pair: the mean tokens a pass of the first, over the texts, relative to that of the second."""
    lines = []
    for temperature, of_temperature in grouped(rows, lambda row: row["temperature"]).items():
        groups = grouped(of_temperature, lambda row: row["contestant"])
        for ours, other in LEADS:
            if ours in groups and other in groups:
                rates = [[1.0 + row["accepted"] / row["rounds"] for row in groups[name]] for name in (ours, other)]
                lead, low, high = (100.0 * (value - 1.0) for value in ratio_of_sums(*rates))
                mode = "greedy" if temperature == 0 else f"T = {temperature:g}"
                lines.append(f"| {mode} | {ours} | {other} | {lead:+.1f} % | {low:+.1f} to {high:+.1f} % |")
    return "\n".join(["| | tree | against | lead | 95 % interval |", "| --- | --- | --- | --- | --- |", *lines])


def table(folder: Path) -> str:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found, texts, how = cells(results)
    columns = sorted({column for row in found.values() for column in row})
    best = {column: max(row[column] for row in found.values()) for column in columns}
    mean = {name: sum(row.values()) / len(columns) for name, row in found.items()}
    names = [f"{name.removesuffix('_test')}, {'greedy' if t == 0 else f'T = {t:g}'}" for t, name in columns]
    lines = []
    for name in sorted(found, key=mean.get, reverse=True):
        row = found[name]
        marked = [f"**{row[c]:.2f}**" if row[c] == best[c] else f"{row[c]:.2f}" for c in columns]
        lines.append([name, *marked, f"{mean[name]:.2f}"])
    settings = results["settings"]
    target = settings["target"].rstrip("/").rpartition("/")[2]
    facts = (
        f"{target}, {settings['dtype']}, {texts} texts a column of up to {settings['max_new_tokens']} tokens, {how}:"
    )
    facts += f"\n\n```console\n{results['command']}\n```"
    parts = [facts, markdown_table(["", *names, "mean"], lines)]
    return "\n\n".join([*parts, leads(results["round_replays"])] if "round_replays" in results else parts)


def main(folders: list[Path], page: Path | None) -> None:
    text = "\n\n".join(table(folder) for folder in folders)
    if page is None:
        print(text)
        return
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{page} lacks the marks {BEGIN} and {END}, so there is no place for the tables.")
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of rounds.py or specdecpp bench")
    parser.add_argument("--page", type=Path)
    main(**vars(parser.parse_args()))
