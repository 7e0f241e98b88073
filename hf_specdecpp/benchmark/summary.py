"""From generations to rows of a table: speeds relative to plain generation, rates, and what the time went into.

A row has four ratios of speeds, each as its median over prompts and the ends of its 95 % interval:

- `plain`: over plain `generate()` as it is.
- `same_passes`: over plain `generate()` on the CPU products and packed weights that ours runs on, which is what
  speculation itself gains.
- `first`: over plain `generate()`, for the first five texts of a session that has more. It begins without known costs.
- `constant`: over the best constant length, chosen in hindsight over all prompts: what adapting to texts and machine
  gains, or costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from hf_specdecpp.benchmark.contestants import BASELINES, Contestant
from hf_specdecpp.intervals import median_of_ratios

ALL = "all"  # the sets together, batches left out
FIRST = 5  # texts of a session
BUSY = 0.1  # processors that other processes may use without a word
Row = dict[str, Any]
Moment = tuple[Any, ...]


def summarise(rows: Sequence[Row], contestants: Sequence[Contestant]) -> list[Row]:
    """One row for each set (all together too, if there are several), temperature and contestant, fastest first.

    Args:
        rows: generations, as `RunLog` keeps them.
    """
    by_name = {contestant.name: contestant for contestant in contestants}
    rows = [row for row in rows if row["contestant"] in by_name]
    alone = [row for row in rows if not row["batch"]]
    plain, same = (_of(rows, each) for each in BASELINES)
    constants = [_of(alone, each) for each in contestants if each.is_constant]
    best: dict[Moment, Row] = {}
    for temperature in {row["temperature"] for row in alone}:
        here = [{at: row for at, row in of.items() if row["temperature"] == temperature} for of in constants]
        fastest = max(here, key=lambda rows: _gain(rows, plain), default={})
        best |= fastest
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
    ratios = [_speed(row) / _speed(others[_moment(row)]) for row in rows if _moment(row) in others]
    return list(median_of_ratios(ratios)) if ratios else None


def _first(rows: list[Row]) -> list[Row]:
    """The first texts of a session, where there were others, too."""
    found = [row for row in rows if row["earlier"] < FIRST and not row["batch"]]
    return found if len(found) < len(rows) else []


def _gain(rows: Mapping[Moment, Row], plain: Mapping[Moment, Row]) -> float:
    return median([_speed(row) / _speed(plain[moment]) for moment, row in rows.items()] or [0.0])


def _speed(row: Row) -> float:
    return float(row["tokens"] / row["seconds"])


def _measures(rows: list[Row]) -> Row:
    names = ("tokens", "seconds", "passes", "drafting", "drafted", "accepted", "disturbed")
    tokens, seconds, passes, drafting, drafted, accepted, disturbed = (sum(row[name] for row in rows) for name in names)
    parts = zip(("prompt", "draft", "target"), zip(*(row["split"] for row in rows), strict=True), strict=True)
    shares = {part: sum(times) / seconds for part, times in parts}
    return {
        "prompts": len({(row["set"], row["prompt"]) for row in rows}),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "tokens_per_pass": tokens / passes,
        "discard_rate": (drafted - accepted) / tokens,
        "verification_rate": passes / tokens,
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted_per_round": drafted / drafting if drafting else 0.0,
        "time": {**shares, "rest": 1.0 - sum(shares.values())},
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
