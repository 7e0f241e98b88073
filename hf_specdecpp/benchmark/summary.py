"""From generations to rows of a table: speeds relative to plain generation, and rates.

A row has ratios of speeds, each as its median over prompts and the ends of its 95 % interval: over `plain` generation,
and for the `first` five texts of a session, which begins without known costs; over plain generation on the
`same_passes`, which is what speculation itself gains; and over the best `constant` length in hindsight.
"""

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

ALL = "all"  # the sets together, batches left out
FIRST = 5  # texts of a session
BUSY = 0.1  # processors that other processes may use without a word
MORE = "take more prompts (--data FILE)"
Row = dict[str, Any]
Moment = tuple[Any, ...]


def summarise(rows: Sequence[Row], contestants: Sequence[Contestant]) -> list[Row]:
    """One row for each set (all together too, if there are several), temperature and contestant, fastest first."""
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
    """Rows by set, temperature and contestant; where there are several sets of single prompts, all together, too."""
    groups: dict[tuple[str, float, str], list[Row]] = defaultdict(list)
    several = len({row["set"] for row in rows if not row.get("batch")}) > 1
    for row in rows:
        for name in (row["set"], ALL) if several and not row.get("batch") else (row["set"],):
            groups[name, row["temperature"], row["contestant"]].append(row)
    return groups


def comparable(rows: Iterable[Row]) -> list[Row]:
    """Those with both baselines of the same prompt in the same session: a session may have been killed before them."""
    rows = list(rows)
    plain, same = (_of(rows, each) for each in BASELINES)
    return [row for row in rows if _moment(row) in plain.keys() & same.keys()]


def _of(rows: Iterable[Row], contestant: Contestant) -> dict[Moment, Row]:
    return {_moment(row): row for row in rows if row["contestant"] == contestant.name}


def _moment(row: Row) -> Moment:
    """Generations of one moment are compared with one another."""
    return row["set"], row["prompt"], row["temperature"], row["session"]


def _over(rows: Iterable[Row], others: Mapping[Moment, Row]) -> list[float] | None:
    """The median ratio of speeds at the same moments, with its interval; `None` if there are no others."""
    ratios = _ratios(rows, others)
    return list(median_of_ratios(ratios)) if ratios else None


def _ratios(rows: Iterable[Row], others: Mapping[Moment, Row]) -> list[float]:
    """Of speeds at the same moments."""
    both = [(row, others[_moment(row)]) for row in rows if _moment(row) in others]
    return [one["tokens"] / one["seconds"] / (other["tokens"] / other["seconds"]) for one, other in both]


def _first(rows: list[Row]) -> list[Row]:
    """The first texts of a session, where there were others, too."""
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
    """The fastest of each family; `summary` is of one set and temperature, fastest first."""
    best: dict[str, Row] = {}
    for row in summary:
        best.setdefault(row["family"], row)
    return list(best.values())


def overall(summary: Sequence[Row], temperature: float) -> list[Row]:
    """The rows of all sets together at a temperature."""
    sets = {row["set"] for row in summary if not row["batch"]}
    wanted = ALL if ALL in sets else next(iter(sets), None)
    return [row for row in summary if row["set"] == wanted and row["temperature"] == temperature]


def busy_elsewhere(rows: Sequence[Row]) -> float:
    """Processors that other processes kept busy, in the median run; 0 if that is hardly any or unknown."""
    busy = median([row["others"] for row in rows if row["others"] is not None] or [0.0])
    return busy if busy > BUSY else 0.0


def speed_table(summary: Iterable[Row], facts: Row) -> Row:
    """The speeds of single prompts as a model card shows them: `speedup` is the ratio to plain generation."""
    fields = ("set", "temperature", "contestant", "tokens_per_second", "tokens_per_pass", "prompts")
    rows = []
    for row in (row for row in summary if not row["batch"]):
        ratios = {"speedup": row["plain"][0], "interval": row["plain"][1:]}
        ratios |= {"same_passes": row["same_passes"][0], "same_passes_interval": row["same_passes"][1:]}
        rows.append({name: row[name] for name in fields} | ratios)
    return {**facts, "rows": rows}


# The verdict ----------------------------------------------------------------------------------------------------------


def verdict_of(rows: Sequence[Row]) -> str:
    """What speculation gains, and what faster passes do, by the rows of one set and temperature, fastest first."""
    others = [row for row in rows if row["contestant"] not in {each.name for each in BASELINES}]
    if not others:
        return "Only plain generate() took part, so there is nothing to compare."
    best = others[0]
    plain, same = Speed(*best["plain"]), Speed(*best["same_passes" if best["ours"] else "plain"])
    passes = next((Speed(*row["plain"]) for row in rows if row["contestant"] == SAME_PASSES.name), Speed(1.0, 1.0, 1.0))
    said = [verdict(plain, same, passes if best["ours"] else None, f"the fastest, {best['contestant']}, runs at ")]
    if effect(plain, same) == "unclear":
        said.append(f"To tell, {MORE}.")
    if rivals := too_close(others)[1:]:
        said.append(f"Too close to tell from it: {_some([row['contestant'] for row in rivals])}.")
    if any(row["disturbed"] for row in rows):
        said.append("Other load disturbed some of the runs, so repeat this on a quiet machine.")
    return " ".join(said)


def too_close(rows: Sequence[Row]) -> list[Row]:
    """The fastest, which comes first, and those whose intervals overlap with its own."""
    return [row for row in rows if row["plain"][2] >= rows[0]["plain"][1]]


def next_step(rows: Sequence[Row], contestants: Sequence[Contestant], assistant: SpecDecPPAssistant) -> str:
    """How to keep the fastest of ours (of close ones that with most tokens a second), or what else to try."""
    by_name = {each.name: each for each in contestants}
    ours = [row for row in rows if by_name[row["contestant"]].ours]
    if not ours or ours[0]["plain"][0] < PAYS:
        return _instead(assistant, any(each.alone for each in contestants))
    best = max(too_close(ours), key=lambda row: row["tokens_per_second"])
    rivals = [row["contestant"] for row in too_close(ours) if row is not best]
    rivals += ["plain generate()"] if best["plain"][1] <= 1.0 else []
    more = f"  # {best['contestant']}, too close to tell from {_some(rivals)}: {MORE}"
    return _kept(by_name[best["contestant"]], assistant) + (more if rivals else "")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _instead(assistant: SpecDecPPAssistant, looked_up: bool) -> str:
    """What to try where nothing of ours pays, but for what was tried."""
    setup = assistant.setup()
    if "training" in setup.trainable:
        return (
            f"specdecpp train --target {assistant.config.target_id} --data FILE --output DIR, a draft for this target"
        )
    if not setup.drafter.places:
        return "plain generate(), or a draft for this target: --assistant REPO, or specdecpp train"
    return f"plain generate(), {'' if looked_up else 'lookups (--lookup) '}or another draft for this target"


def _kept(best: Contestant, assistant: SpecDecPPAssistant) -> str:
    """The line of code with which the assistant generates like a contestant."""
    if best.alone or best.speculation is None:
        return "assist(model, 'lookup')"
    chosen = asdict(replace(best.speculation, cpu_products=assistant.speculation.cpu_products))
    usual = asdict(SpeculationConfig())
    told = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value != usual[name] or name == "rule")
    without_head = "; assistant.head = None" if assistant.head is not None and not best.with_head else ""
    return f"assistant.speculation = SpeculationConfig({told}){without_head}"
