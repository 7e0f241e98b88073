"""The benchmark as a table on the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hf_specdecpp.benchmark.contestants import PLAIN, SAME_PASSES
from hf_specdecpp.benchmark.summary import best_of_families, busy_elsewhere, measured_ratio, overall, verdict
from hf_specdecpp.estimation.metrics import auc, ece, ece_by_chance
from hf_specdecpp.intervals import ratio_of_sums

WIDTH = 100
STEPS = (0.05, 0.19)  # prices of a draft pass, in target passes, that replayed rounds are compared at
LEARNED = 500  # candidates of a set after which calibration while running is measured
_ESTIMATES = (
    "How good the estimates were that rules stopped by, over the candidates that verification got to, with the chances "
    "that these had. `online` contestants learned from text to text and from set to set, in this order of the sets."
)

_BATCHES = (
    "Several prompts in one `generate()`, padded on the left. Both baselines are plain `generate()` on the same batch. "
    "The last column counts greedy texts that are not those of plain generation."
)


def print_report(results: dict[str, Any], console: Console) -> None:
    """For each temperature the best setting of each family, the fastest marked, and the verdict."""
    for line in notes(results):
        console.print(line)
    for temperature in results["settings"]["temperatures"]:
        rows = overall(results["summary"], temperature)
        if rows:
            console.print(_table(best_of_families(rows), f"{_mode(temperature)}, prompts: {rows[0]['prompts']}"))
            console.print(verdict(rows), "")
    for temperature, size in dict.fromkeys((row["temperature"], row["size"]) for row in results["batches"]):
        rows = [row for row in results["batches"] if (row["temperature"], row["size"]) == (temperature, size)]
        console.print(_terminal_batches(rows, f"{_mode(temperature)}, rows in a batch: {size}"), "")
    for mismatch in results["mismatches"]:
        console.print(describe_mismatch(mismatch), style="bold red" if counts(mismatch, results) else "yellow")
    if not lossless(results):
        console.print("FAILED: not the texts of plain generate(), so these speeds mean nothing. Please report it.")


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, width=WIDTH)
    table.add_column("contestant (best setting)", ratio=1, no_wrap=True)
    for column in ("x plain", "x plain,\nsame passes", "x best\nconstant", "tokens/s", "tokens/pass", "discarded"):
        table.add_column(column, justify="right", no_wrap=True)
    fastest = max(rows, key=lambda row: row["speedup"])
    for row in rows:
        best = row is fastest
        table.add_row(
            f"{'>' if best else ' '} {row['contestant']}{' *' if row['disturbed'] else ''}",
            *_ratios(row), "" if row["of_constant"] is None else f"{row['of_constant'][0]:.2f}",
            f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_pass']:.2f}",
            f"{row['discard_rate']:.2f}",
            style="bold green" if best else None,
        )  # fmt: skip
    return table


def _ratios(row: dict[str, Any]) -> tuple[str, str]:
    """Speed over plain generation, as it is and with the same passes, each with its interval."""
    (low, high), (same_low, same_high) = row["interval"], row["same_passes_interval"]
    return f"{row['speedup']:.2f} ({low:.2f}-{high:.2f})", f"{row['same_passes']:.2f} ({same_low:.2f}-{same_high:.2f})"


def _of_constant(row: dict[str, Any]) -> str:
    """Speed over that of the best constant length, with its interval; nothing where none took part."""
    if row["of_constant"] is None:
        return ""
    ratio, low, high = row["of_constant"]
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def notes(results: dict[str, Any]) -> list[str]:
    """What a reader of any table must know."""
    settings, where = results["settings"], results["environment"]
    threads = f"{where['threads']} thread{'' if where['threads'] == 1 else 's'}"
    place = f"{settings['dtype']}, {where['device']}, {threads}"
    lines = [f"target {settings['target']} ({place}), draft: {settings['draft_name']}"]
    if _was_measured(results):
        lines += _passes(settings)
    if (ratio := measured_ratio(results["runs"])) is not None:
        lines.append(f"A draft step, reading the prompt included, costs {ratio:.3f} target passes in these runs.")
    rows = [row for row in results["runs"] if row["disturbed"]]
    if rows:
        lines.append(
            f"{len(rows)} of {len(results['runs'])} runs were disturbed: they waited for a processor for up to "
            f"{max(row['waited'] for row in rows):.0%} of their time. They are marked *."
        )
    if busy := busy_elsewhere(results["runs"]):
        lines.append(
            f"Other processes kept {busy:.1f} of the machine's {where['processors']} processors busy: they slow memory "
            "down for everybody, so these are the ratios of a busy machine."
        )
    return lines


def _was_measured(results: dict[str, Any]) -> bool:
    """Whether texts were generated. Replays alone say nothing of passes."""
    return bool(results["runs"] or results["batches"])


def _passes(settings: dict[str, Any]) -> list[str]:
    """What the passes of ours were made of; weights in other formats than float32 stay as they are."""
    lines, is_float32 = [], settings["dtype"] == "float32"
    if settings["pack_weights"] and is_float32:
        lines.append("Ours keeps packed copies of the float32 weights (pack_weights): twice their memory.")
    if settings["int8_draft"] and is_float32:
        lines.append("Ours drafts in int8 (int8_draft), transformers with the same draft in float32.")
    return [*lines, f'"{SAME_PASSES.name}" is plain generate() on the CPU products and packed weights of ours.']


def describe_mismatch(found: dict[str, Any]) -> str:
    """Where a greedy text left that of plain generation."""
    place = found["place"] - found["prompt_length"]
    where = (
        f"{found['contestant']} left the text of plain generate() at token {place} of {found['set']}/{found['prompt']}"
    )
    tokens = " and ".join("the end" if token is None else str(token) for token in found["tokens"])
    if found["near_tie"]:
        return f"{where}: a near-tie ({tokens}, {found['gap']:.1e} of the largest logit apart), which rounding decides."
    return f"{where}: {tokens}, {found['gap']:.1e} of the largest logit apart, which rounding does not explain."


def lossless(results: dict[str, Any]) -> bool:
    """Whether all texts of ours were those of plain generation."""
    in_batches = any(row["different"] for row in results["batches"] if row["contestant"] in results["ours"])
    half = results["settings"]["dtype"] in ("bfloat16", "float16")  # where near-ties fall either way
    return not any(counts(found, results) for found in results["mismatches"]) and (half or not in_batches)


def counts(mismatch: dict[str, Any], results: dict[str, Any]) -> bool:
    """Whether it fails the benchmark: one of ours has left the target's text where rounding is no excuse."""
    return mismatch["contestant"] in results["ours"] and not mismatch["near_tie"]


def markdown(results: dict[str, Any]) -> str:
    """The whole report."""
    settings, where = results["settings"], results["environment"]
    parts = ["# Benchmark", *notes(results)]
    parts.append(f"Made by\n\n```console\n{results['command']}\n```")
    versions = ", ".join(f"{name} {where[name]}" for name in ("torch", "transformers", "hf_specdecpp"))
    texts = f"up to {settings['max_new_tokens']} new tokens"
    if settings["rollouts"] and not _was_measured(results):
        texts = "texts of the rollouts"
    parts.append(f"{versions}; seed {settings['seed']}, {texts}.")
    for temperature in settings["temperatures"]:
        if rows := overall(results["summary"], temperature):
            parts += [f"## {_mode(temperature)}, measured", verdict(rows), _picture("speed-up", temperature)]
            parts += [_live_tables(results["summary"], temperature)]
            parts += [_picture("tokens-per-pass", temperature), _picture("time", temperature)]
    if results["batches"]:
        parts += ["## Batches", _BATCHES, _batch_table(results["batches"])]
    parts += _checks(results)
    for each in results["replays"]:
        parts.append(f"## {each['set']}, {_mode(each['temperature'])}, replayed")
        parts.append(f"{each['texts']} texts, {each['tokens']} tokens.")
        parts.append(_picture(f"pareto-{each['set']}", each["temperature"]))
        parts += [_replay_table(name, each["best"][name], results["costs"][name]) for name in results["costs"]]
    if results["round_replays"]:
        rows = results["round_replays"]
        parts += ["## Rounds, replayed", round_table(rows)]
        if any(row["judged"] for row in rows):
            parts += ["## Estimates of chains", _ESTIMATES, _estimate_table(rows)]
    return "\n\n".join(parts) + "\n"


def _picture(name: str, temperature: float) -> str:
    return f"![{name}]({name}-{temperature:g}.png)"


def _live_tables(summary: Sequence[dict[str, Any]], temperature: float) -> str:
    here = [row for row in summary if row["temperature"] == temperature]
    header = ("set", "contestant", "x plain (95 %)", "x plain, same passes (95 %)", "x best constant length (95 %)",
              "tokens/s", "tokens/pass", "discard rate", "verification rate", "drafted/round", "prompts",
              "disturbed")  # fmt: skip
    fastest = {name: max(r["speedup"] for r in here if r["set"] == name) for name in {r["set"] for r in here}}
    lines = []
    for row in here:
        mark = "**" if row["speedup"] == fastest[row["set"]] else ""
        lines.append(
            (row["set"], f"{mark}{row['contestant']}{mark}", *(f"{mark}{each}{mark}" for each in _ratios(row)),
             _of_constant(row), f"{row['tokens_per_second']:.2f}", f"{row['tokens_per_pass']:.2f}",
             f"{row['discard_rate']:.2f}", f"{row['verification_rate']:.3f}", f"{row['drafted_per_round']:.1f}",
             row["prompts"], row["disturbed"])
        )  # fmt: skip
    return markdown_table(header, lines)


def _replay_table(name: str, best: Sequence[dict[str, Any]], costs: dict[str, Any]) -> str:
    ratio = costs["draft"] / costs["verify"][0]
    title = f"Costs **{name}**: a draft step takes {costs['draft'] * 1e3:.4g} ms, {ratio:.3f} target passes."
    if costs["verify"] == [1.0]:
        title = f"Costs **{name}**: a draft step takes {ratio:g} target passes, which are the unit of time."
    header = ("rule", "best setting", "tokens/s", "speed-up", "over best fixed", "95 % interval", "of informed bound",
              "of the oracle", "discard rate", "verification rate")  # fmt: skip
    lines = []
    for row in best:
        low, high = row["interval"]
        setting = "none" if row["setting"] is None else f"{row['setting']:g}"
        lines.append(
            (row["family"], setting, f"{row['tokens_per_second']:.2f}", f"{row['speedup']:.2f}",
             f"{row['gain_over_fixed']:+.1%}", f"{low:+.1%} to {high:+.1%}", f"{row['of_informed']:.1%}",
             f"{row['of_oracle']:.1%}", f"{row['discard_rate']:.3f}", f"{row['verification_rate']:.4f}")
        )  # fmt: skip
    return f"{title}\n\n{markdown_table(header, lines)}"


def round_table(rows: Sequence[dict[str, Any]]) -> str:
    """Replayed rounds by set and of all sets, contestant by contestant; `rows` are `replay_rounds`'."""
    header = ("set", "decoding", "contestant", "tokens/pass", "95 % interval", "token by token", "lead of the block",
              "95 % interval", *(f"x plain, step {ratio:g}" for ratio in STEPS),
              *(f"the same token by token, step {ratio:g}" for ratio in STEPS), "candidates/round",
              "draft passes/round", "texts")  # fmt: skip
    lines = []
    for (name, temperature, contestant), group in _grouped(rows).items():
        rounds = [row["rounds"] for row in group]
        tokens, by_token = ([row["rounds"] + row[how] for row in group] for how in ("accepted", "by_token"))
        mean, low, high = ratio_of_sums(tokens, rounds)
        lead, *around = ratio_of_sums(tokens, by_token)
        drafted, passes = (sum(row[field] for row in group) / sum(rounds) for field in ("drafted", "draft_passes"))
        mean_by_token = sum(by_token) / sum(rounds)
        speeds = (f"{each / (1.0 + ratio * passes):.3f}" for each in (mean, mean_by_token) for ratio in STEPS)
        leads = f"{lead - 1.0:+.1%}", " to ".join(f"{each - 1.0:+.1%}" for each in around)
        if temperature == 0.0:
            leads = "", ""
        cells = (f"{mean:.2f}", f"{low:.2f} to {high:.2f}", f"{mean_by_token:.2f}", *leads, *speeds,
                 f"{drafted:.1f}", f"{passes:.1f}", len(group))  # fmt: skip
        lines.append((name, _mode(temperature), contestant, *cells))
    return markdown_table(header, sorted(lines))


def _estimate_table(rows: Sequence[dict[str, Any]]) -> str:
    header = ("set", "decoding", "contestant", "AUC", "ECE", f"ECE after {LEARNED}", "if estimates were right",
              "candidates")  # fmt: skip
    lines = []
    for (name, temperature, contestant), group in _grouped(rows).items():
        judged = torch.tensor([pair for row in group for pair in row["judged"]], dtype=torch.float64)
        if len(judged) > LEARNED:
            (estimate, label), later = judged.T, judged[LEARNED:].T
            errors = (f"{each:.4f}" for each in (ece(estimate, label), ece(*later), ece_by_chance(*later)))
            cells = f"{auc(estimate, label):.4f}", *errors, len(judged)
            lines.append((name, _mode(temperature), contestant, *cells))
    return markdown_table(header, sorted(lines))


def _terminal_batches(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, width=WIDTH)
    table.add_column("contestant", ratio=1, no_wrap=True)
    for column in ("x plain", "x plain,\nsame passes", "tokens/s", "tokens/pass\nand row", "batches"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        name = f"{row['contestant']}{' *' if row['disturbed'] else ''}"
        speed, passes = f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_pass']:.2f}"
        table.add_row(name, *_batch_ratios(row), speed, passes, str(row["batches"]))
    return table


def _batch_ratios(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{each[0]:.2f} ({each[1]:.2f}-{each[2]:.2f})" for each in (row["speedup"], row["same_passes"]))


def _batch_table(rows: Sequence[dict[str, Any]]) -> str:
    header = ("decoding", "rows", "contestant", "x plain (95 %)", "x plain, same passes (95 %)", "tokens/s",
              "tokens/pass and row", "batches", "disturbed", "other texts")  # fmt: skip
    lines = []
    for row in rows:
        lines.append((_mode(row["temperature"]), row["size"], row["contestant"], *_batch_ratios(row),
                      f"{row['tokens_per_second']:.1f}", f"{row['tokens_per_pass']:.2f}", row["batches"],
                      row["disturbed"], "" if row["different"] is None else row["different"]))  # fmt: skip
    return markdown_table(header, lines)


def _grouped(rows: Sequence[dict[str, Any]]) -> dict[tuple[str, float, str], list[dict[str, Any]]]:
    """By set, temperature and contestant; of several sets together, too, as the set "all"."""
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = {}
    together = ["all"] if len({row["set"] for row in rows}) > 1 else []
    for row in rows:
        for name in (row["set"], *together):
            groups.setdefault((name, row["temperature"], row["contestant"]), []).append(row)
    return groups


def _checks(results: dict[str, Any]) -> list[str]:
    """Losslessness, and whether replays did as the live runs did; nothing without such runs."""
    if not results["runs"]:
        return []
    ours = [found for found in results["mismatches"] if found["contestant"] in results["ours"]]
    compared = sum(row["temperature"] == 0.0 and row["contestant"] != PLAIN.name for row in results["runs"])
    lines = [f"- {compared} greedy texts were compared with those of plain generate(); {len(ours)} of ours differ."]
    lines += [f"- {describe_mismatch(found)}" for found in results["mismatches"]]
    if agreement := results["replay_agreement"]:
        lines.append(
            f"- Of {agreement['compared']} greedy generations of chain rules, {agreement['equal']} had exactly the "
            "rounds that their replay has."
        )
    return ["## Checks", "\n".join(lines)]


def markdown_table(header: Sequence[object], lines: Sequence[Sequence[object]]) -> str:
    table = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in table)


def _mode(temperature: float) -> str:
    return "greedy" if temperature == 0.0 else f"temperature {temperature:g}"
