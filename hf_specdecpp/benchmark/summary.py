"""Summarises timed generations: speeds relative to plain generation, and rates.

A row has ratios of speeds, each as the median over prompts and its 95 % interval: `plain`, relative to plain
generation; `first`, the same for the first five answers of a session, which begins without known costs; `same_passes`,
relative to plain generation with the assistant's matrix multiplications; `constant`, relative to the best of the
contestants with `is_constant`, chosen in hindsight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import BASELINES, SAME_PASSES, Contestant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.estimation.ledger import PAYS, Speed, effect, verdict
from hf_specdecpp.figures import median_of_ratios

ALL = "all"  # name of all sets together, without batches
FIRST = 5  # answers of a session
BUSY = 0.1  # processors used by other processes, above which the report has a note
MORE = "take more prompts (--data FILE)"
Row = dict[str, Any]
Moment = tuple[Any, ...]


def summarise(rows: Sequence[Row], contestants: Sequence[Contestant]) -> list[Row]:
    """Return a row for each set (and for all sets together), temperature and contestant, the fastest first."""
    by_name = {contestant.name: contestant for contestant in contestants}
    rows = [row for row in rows if row["contestant"] in by_name]
    alone = [row for row in rows if not row["batch"]]
    plain, same = (_of(rows, each) for each in BASELINES)
    constants = [_of(alone, each) for each in contestants if each.is_constant]
    best: dict[Moment, Row] = {}
    for temperature in {row["temperature"] for row in alone}:
        here = [{at: row for at, row in of.items() if row["temperature"] == temperature} for of in constants]
        fastest = max(here, key=lambda rows: median(_ratios(list(rows.values()), plain) or [0.0]), default=None)
        best |= fastest or {}
    summary = [
        {"set": name, "batch": group[0]["batch"], "temperature": temperature, "contestant": contestant,
         "family": by_name[contestant].family, "ours": by_name[contestant].ours,
         "plain": _over(group, plain), "same_passes": _over(group, same), "constant": _over(group, best),
         "first": _over(_first(group), plain),
         **_measures(group)}
        for (name, temperature, contestant), group in grouped(rows).items()
    ]  # fmt: skip
    return sorted(summary, key=lambda row: (row["set"] != ALL, row["set"], row["temperature"], -row["plain"][0]))


def grouped(rows: Sequence[Row]) -> dict[tuple[str, float, str], list[Row]]:
    """Rows by set, temperature and contestant. With several sets of single prompts, "all" has the rows of all sets."""
    groups: dict[tuple[str, float, str], list[Row]] = defaultdict(list)
    several = len({row["set"] for row in rows if not row.get("batch")}) > 1
    for row in rows:
        for name in (row["set"], ALL) if several and not row.get("batch") else (row["set"],):
            groups[name, row["temperature"], row["contestant"]].append(row)
    return groups


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of prompts for which their session has both baselines; a killed session may lack them."""
    rows = list(rows)
    plain, same = (_of(rows, each) for each in BASELINES)
    return [row for row in rows if _moment(row) in plain.keys() & same.keys()]


def _of(rows: Iterable[Row], contestant: Contestant) -> dict[Moment, Row]:
    return {_moment(row): row for row in rows if row["contestant"] == contestant.name}


def _moment(row: Row) -> Moment:
    """Key of generations that can be compared: their set, prompt, temperature and session."""
    return row["set"], row["prompt"], row["temperature"], row["session"]


def _over(rows: Iterable[Row], others: Mapping[Moment, Row]) -> list[float] | None:
    """Median ratio of the rows' speeds to those of `others` at the same `_moment`, with interval; `None` if empty."""
    ratios = _ratios(rows, others)
    return list(median_of_ratios(ratios)) if ratios else None


def _ratios(rows: Iterable[Row], others: Mapping[Moment, Row]) -> list[float]:
    both = [(row, others[_moment(row)]) for row in rows if _moment(row) in others]
    return [one["tokens"] / one["seconds"] / (other["tokens"] / other["seconds"]) for one, other in both]


def _first(rows: list[Row]) -> list[Row]:
    """Rows of the first five answers of each session; empty if there are no later ones."""
    found = [row for row in rows if row["earlier"] < FIRST and not row["batch"]]
    return found if len(found) < len(rows) else []


def _measures(rows: list[Row]) -> Row:
    names = ("tokens", "seconds", "passes", "drafting", "drafted", "accepted", "disturbed")
    tokens, seconds, passes, drafting, drafted, accepted, disturbed = (sum(row[name] for row in rows) for name in names)
    return {
        "prompts": len({(row["set"], row["prompt"]) for row in rows}),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_pass": tokens / passes,
        "discard_rate": (drafted - accepted) / tokens,
        "verification_rate": passes / tokens,
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted_per_round": drafted / drafting if drafting else 0.0,
        "disturbed": disturbed,
    }


def best_of_families(summary: Iterable[Row]) -> list[Row]:
    """Return the fastest row of each family. `summary`: rows of one set and temperature, the fastest first."""
    best: dict[str, Row] = {}
    for row in summary:
        best.setdefault(row["family"], row)
    return list(best.values())


def overall(summary: Sequence[Row], temperature: float) -> list[Row]:
    """Return the rows for all sets together (or the only set) at a temperature."""
    sets = {row["set"] for row in summary if not row["batch"]}
    wanted = ALL if ALL in sets else next(iter(sets), None)
    return [row for row in summary if row["set"] == wanted and row["temperature"] == temperature]


def busy_elsewhere(rows: Sequence[Row]) -> float:
    """Return the median over runs of the processors that other processes used; 0 if at most 0.1 or unknown."""
    busy = median([row["others"] for row in rows if row["others"] is not None] or [0.0])
    return busy if busy > BUSY else 0.0


def speed_table(summary: Iterable[Row], facts: Row) -> Row:
    """Return the speeds of single prompts for a model card, with `facts`. `speedup`: ratio to plain generation."""
    fields = ("set", "temperature", "contestant", "tokens_per_second", "tokens_per_pass", "prompts")
    rows = []
    for row in (row for row in summary if not row["batch"]):
        ratios = {"speedup": row["plain"][0], "interval": row["plain"][1:]}
        ratios |= {"same_passes": row["same_passes"][0], "same_passes_interval": row["same_passes"][1:]}
        rows.append({name: row[name] for name in fields} | ratios)
    return {**facts, "rows": rows}


# The verdict ----------------------------------------------------------------------------------------------------------


def verdict_of(rows: Sequence[Row]) -> str:
    """Sentences on the gain by speculation and by faster passes. `rows`: of one set and temperature, fastest first."""
    others = [row for row in rows if row["contestant"] not in {each.name for each in BASELINES}]
    if not others:
        return "Only plain generate() was timed, so there is nothing to compare."
    best = others[0]
    plain, same = Speed(*best["plain"]), Speed(*best["same_passes" if best["ours"] else "plain"])
    passes = next((Speed(*row["plain"]) for row in rows if row["contestant"] == SAME_PASSES.name), Speed(1.0, 1.0, 1.0))
    sentences = [verdict(plain, same, passes if best["ours"] else None, f"the fastest, {best['contestant']}, runs at ")]
    if effect(plain, same) == "unclear":
        sentences.append(f"To find out, {MORE}.")
    if rivals := too_close(others)[1:]:
        sentences.append(f"Not significantly slower: {_some([row['contestant'] for row in rivals])}.")
    if any(row["disturbed"] for row in rows):
        sentences.append("Other load disturbed some runs, so repeat the benchmark on an idle machine.")
    return " ".join(sentences)


def too_close(rows: Sequence[Row]) -> list[Row]:
    """Return the first row, the fastest, and all rows whose intervals overlap with that of the first."""
    return [row for row in rows if row["plain"][2] >= rows[0]["plain"][1]]


def next_step(rows: Sequence[Row], contestants: Sequence[Contestant], assistant: SpecDecPPAssistant) -> str:
    """Return code that selects the fastest contestant of this package, or advice if none is faster than plain
    generation. Of contestants with overlapping intervals, the one with most tokens per second is selected."""
    by_name = {each.name: each for each in contestants}
    ours = [row for row in rows if by_name[row["contestant"]].ours]
    if not ours or ours[0]["plain"][0] < PAYS:
        return _instead(assistant, any(each.alone for each in contestants))
    best = max(too_close(ours), key=lambda row: row["tokens_per_second"])
    return _kept(by_name[best["contestant"]], assistant)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _instead(assistant: SpecDecPPAssistant, looked_up: bool) -> str:
    """Advice if no contestant of this package is faster than plain generation. `looked_up`: if lookups were timed."""
    setup = assistant.setup()
    if "training" in setup.remedies:
        return (
            f"specdecpp train --target {assistant.config.target_id} --data FILE --output DIR, a draft for this target"
        )
    if not setup.drafter.places:
        return "plain generate(), or a draft for this target: --assistant REPO, or specdecpp train"
    return f"plain generate(), {'' if looked_up else 'lookups (--lookup) '}or another draft for this target"


def _kept(best: Contestant, assistant: SpecDecPPAssistant) -> str:
    """The line of code that gives the assistant the settings of a contestant."""
    if best.alone or best.speculation is None:
        return "assist(model, 'lookup')"
    chosen = asdict(replace(best.speculation, cpu_products=assistant.speculation.cpu_products))
    usual = asdict(SpeculationConfig())
    given = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value != usual[name] or name == "rule")
    without_head = "; assistant.head = None" if assistant.head is not None and not best.with_head else ""
    return f"assistant.speculation = SpeculationConfig({given}){without_head}"
