"""One table of tokens per target pass from runs of `specdecpp bench`, the best of each column marked.

    python examples/tokens_per_pass.py bench/trees-smollm2 bench/trees-qwen --page docs/dyspec.md

A count, not a time: it depends on models, prompts and settings, and on no machine. Sampled texts differ from contestant
to contestant, so small differences there are chance. The tables replace what stands between the marks of the page.
"""

import argparse
import json
from pathlib import Path

BEGIN, END = "<!-- tokens per pass: begin -->", "<!-- tokens per pass: end -->"


def table(folder: Path) -> str:
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    found = {}
    for row in results["summary"]:
        if row["set"] != "all" and row["contestant"] != "plain":
            found.setdefault(row["contestant"], {})[row["temperature"], row["set"]] = row["tokens_per_pass"]
    columns = sorted({column for row in found.values() for column in row})
    best = {column: max(row[column] for row in found.values()) for column in columns}
    mean = {name: sum(row.values()) / len(columns) for name, row in found.items()}
    names = [f"{name.removesuffix('_test')}, {'greedy' if t == 0 else f'T = {t:g}'}" for t, name in columns]
    lines = [["", *names, "mean"], ["---"] * (len(names) + 2)]
    for name in sorted(found, key=mean.get, reverse=True):
        row = found[name]
        cells = [f"**{row[c]:.2f}**" if row[c] == best[c] else f"{row[c]:.2f}" for c in columns]
        lines.append([name, *cells, f"{mean[name]:.2f}"])
    prompts = max(row["prompts"] for row in results["summary"] if row["set"] != "all")
    settings = results["settings"]
    facts = f"{settings['target'].rstrip('/').rpartition('/')[2]}, {settings['dtype']}, {prompts} prompts a set, up to "
    facts += f"{settings['max_new_tokens']} tokens each, generated live:\n\n```console\n{results['command']}\n```"
    return facts + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


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
    parser.add_argument("folders", nargs="+", type=Path, help="output folders of specdecpp bench")
    parser.add_argument("--page", type=Path)
    main(**vars(parser.parse_args()))
