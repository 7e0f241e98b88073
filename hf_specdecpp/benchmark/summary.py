"""From generations to rows of a table: speeds relative to plain generation, rates, and what the time went into.

Every speed has two ratios: `speedup` over plain `generate()` as it is, and `same_passes` over plain `generate()` on the
CPU products and packed weights that ours runs on, which is what speculation itself gains. A third, `of_constant`, is
over the best constant length, chosen in hindsight over all prompts: what adapting to texts and machine gains, or costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from statistics import median
from typing import Any

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import BASELINES, PASSES, PLAIN, SAME_PASSES, Contestant
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.intervals import median_of_ratios

ALL = "all"  # the sets together
PAYS, LOSES = 1.03, 0.97  # between them speeds count as equal
BUSY = 0.1  # processors that other processes may use without a word
IDLE = 1.02  # tokens a pass of a contestant that has all but stopped speculating


def summarise(rows: Sequence[dict[str, Any]], contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
    """One row for each set (all together too, if there are several), temperature and contestant, fastest first.

    Args:
        rows: generations, as `RunLog` keeps them.
    """
    by_name = {contestant.name: contestant for contestant in contestants}
    groups: dict[tuple[str, float, str], list[dict[str, Any]]] = defaultdict(list)
    several = len({row["set"] for row in rows}) > 1
    for row in rows:
        if row["contestant"] in by_name:
            for name in (row["set"], ALL) if several else (row["set"],):
                groups[name, row["temperature"], row["contestant"]].append(row)
    plain, same = ({_moment(row): row for row in rows if row["contestant"] == each.name} for each in BASELINES)
    best = _best_constants(groups, [each for each in contestants if each.is_constant], plain)
    summary = [
        {"set": name, "temperature": temperature, "contestant": contestant, "family": by_name[contestant].family,
         "ours": by_name[contestant].ours, **_measures(group, plain, same),
         "of_constant": _over(group, best[temperature])}
        for (name, temperature, contestant), group in groups.items()
    ]  # fmt: skip
    return sorted(summary, key=lambda row: (row["set"] != ALL, row["set"], row["temperature"], -row["speedup"]))


def _best_constants(
    groups: dict[tuple[str, float, str], list[dict[str, Any]]],
    constants: Sequence[Contestant],
    plain: dict[tuple[Any, ...], dict[str, Any]],
) -> dict[float, dict[tuple[Any, ...], dict[str, Any]]]:
    """By temperature the generations of the constant length with the largest median gain over all prompts."""
    found: dict[float, dict[tuple[Any, ...], dict[str, Any]]] = {}
    for temperature in {key[1] for key in groups}:
        of_all: dict[str, list[dict[str, Any]]] = {each.name: [] for each in constants}
        for (name, mode, contestant), group in groups.items():
            if name != ALL and mode == temperature and contestant in of_all:
                of_all[contestant] += group
        rows = max(of_all.values(), key=lambda rows: _median_gain(rows, plain), default=[])
        found[temperature] = {_moment(row): row for row in rows}
    return found


def _median_gain(rows: list[dict[str, Any]], plain: dict[tuple[Any, ...], dict[str, Any]]) -> float:
    return median(_speed(row) / _speed(plain[_moment(row)]) for row in rows) if rows else 0.0


def _over(rows: list[dict[str, Any]], others: dict[tuple[Any, ...], dict[str, Any]]) -> list[float] | None:
    """The median ratio of speeds on the same prompts, with its interval; `None` if there are no others."""
    ratios = [_speed(row) / _speed(others[_moment(row)]) for row in rows if _moment(row) in others]
    return list(median_of_ratios(ratios)) if ratios else None


def comparable(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those with both baselines of the same prompt in the same session: a session may have been killed before them."""
    rows = list(rows)
    plain, same = ({_moment(row) for row in rows if row["contestant"] == each.name} for each in BASELINES)
    return [row for row in rows if _moment(row) in plain & same]


def _moment(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["set"], row["prompt"], row["temperature"], row["session"]


def _measures(
    rows: list[dict[str, Any]],
    plain: dict[tuple[Any, ...], dict[str, Any]],
    same: dict[tuple[Any, ...], dict[str, Any]],
) -> dict[str, Any]:
    speedup, low, high = median_of_ratios([_speed(row) / _speed(plain[_moment(row)]) for row in rows])
    same_passes, same_low, same_high = median_of_ratios([_speed(row) / _speed(same[_moment(row)]) for row in rows])
    rounds = [each for row in rows for each in row["rounds"]]
    tokens, seconds = sum(row["tokens"] for row in rows), sum(row["seconds"] for row in rows)
    drafted, accepted = (sum(each[field] for each in rounds) for field in (0, 1))
    speculating = [each for each in rounds if each[0]]
    return {
        "prompts": len({(row["set"], row["prompt"]) for row in rows}),
        "tokens": tokens,
        "tokens_per_second": tokens / seconds,
        "speedup": speedup,
        "interval": [low, high],
        "same_passes": same_passes,
        "same_passes_interval": [same_low, same_high],
        "tokens_per_pass": tokens / len(rounds),
        "discard_rate": (drafted - accepted) / tokens,
        "verification_rate": len(rounds) / tokens,
        "acceptance_rate": accepted / drafted if drafted else None,
        "drafted_per_round": drafted / len(speculating) if speculating else 0.0,
        "time": _time_split(rows, seconds),
        "disturbed": sum(row["disturbed"] for row in rows),
    }


def _speed(row: dict[str, Any]) -> float:
    return float(row["tokens"] / row["seconds"])


def _time_split(rows: list[dict[str, Any]], seconds: float) -> dict[str, float]:
    """Shares of the time. Ours says what it spent on drafting; of others only the time between passes is known."""
    prompt = sum(row["rounds"][0][3] for row in rows)
    target = sum(each[3] for row in rows for each in row["rounds"][1:])
    draft = sum(row["split"][1] for row in rows) if all("split" in row for row in rows) else 0.0
    parts = {"prompt": prompt, "draft": draft, "target": target, "rest": seconds - prompt - draft - target}
    return {name: part / seconds for name, part in parts.items()}


def best_of_families(summary: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest of each family; `summary` is of one set and temperature, fastest first."""
    best: dict[str, dict[str, Any]] = {}
    for row in summary:
        best.setdefault(row["family"], row)
    return list(best.values())


def measured_ratio(rows: Sequence[dict[str, Any]]) -> float | None:
    """What a draft step costs in target passes, by the live runs of chains; `None` if there are none."""
    plain = [each[3] for row in rows if row["contestant"] == PLAIN.name for each in row["rounds"][1:]]
    drafts = [
        row["split"][1] / drafted
        for row in rows
        if row["contestant"].startswith(("fixed", "threshold")) and (drafted := sum(each[0] for each in row["rounds"]))
    ]
    return median(drafts) / median(plain) if drafts and plain else None


def busy_elsewhere(rows: Sequence[dict[str, Any]]) -> float:
    """Processors that other processes kept busy, in the median run; 0 if that is hardly any or unknown."""
    others = [row["others"] for row in rows if row["others"] is not None]
    busy = median(others) if others else 0.0
    return busy if busy > BUSY else 0.0


def overall(summary: Sequence[dict[str, Any]], temperature: float) -> list[dict[str, Any]]:
    """The rows of all sets together at a temperature."""
    names = {row["set"] for row in summary}
    wanted = ALL if ALL in names else next(iter(names), None)
    return [row for row in summary if row["set"] == wanted and row["temperature"] == temperature]


def verdict(rows: Sequence[dict[str, Any]]) -> str:
    """What speculation gains, and what faster passes do, by the rows of one set and temperature, fastest first."""
    others = [row for row in rows if row["contestant"] not in {each.name for each in BASELINES}]
    if not others:
        return "Only plain generate() took part, so there is nothing to compare."
    best = others[0]
    gain, low = (best["same_passes"], best["same_passes_interval"][0]) if best["ours"] else _over_plain(best)
    same = [row for row in rows if row["contestant"] == SAME_PASSES.name]
    runs = f"{best['contestant']}, runs at {_speeds(best)}"
    more = _of_products(same[0], best) if same and best["ours"] else ""
    if rivals := _too_close(others)[1:]:
        more += f" Too close to tell from it: {_some([row['contestant'] for row in rivals])}."
    if any(row["disturbed"] for row in rows):
        more += " Other load disturbed some of the runs, so repeat this on a quiet machine."
    if best["tokens_per_pass"] < IDLE and gain > LOSES:
        return f"Speculation does not pay here, and all but stops: the fastest, {runs}.{more}"
    if gain >= PAYS and low > 1.0:
        return f"Speculation pays here: the fastest, {runs}.{more}"
    if gain > LOSES:
        return f"Speculation neither pays nor costs here: the fastest, {runs}.{more}"
    return f"Speculation does not pay here: even the fastest, {runs}.{more}"


def _too_close(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fastest, which comes first, and those whose intervals overlap with its own."""
    return [row for row in rows if row["interval"][1] >= rows[0]["interval"][0]]


def next_step(rows: Sequence[dict[str, Any]], contestants: Sequence[Contestant], assistant: SpecDecPPAssistant) -> str:
    """How to keep the fastest of ours, by the rows of one set and temperature, fastest first; or what else to try.

    Of those that are too close to tell the one that made most tokens a second of all prompts.
    """
    by_name = {each.name: each for each in contestants}
    ours = [row for row in rows if by_name[row["contestant"]].speculation is not None]
    if not ours or ours[0]["speedup"] < PAYS:
        return _instead(assistant, any(each.alone for each in contestants))
    best = max(_too_close(ours), key=lambda row: row["tokens_per_second"])
    rivals = [row["contestant"] for row in _too_close(ours) if row is not best]
    rivals += ["plain generate()"] if best["interval"][0] <= 1.0 else []
    more = f"  # {best['contestant']}, too close to tell from {_some(rivals)}: take more prompts (--data FILE)"
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
        return "assistant = SpecDecPPAssistant.from_lookup(model)"
    passes = {name: getattr(assistant.speculation, name) for name in PASSES}
    chosen, usual = asdict(replace(best.speculation, **passes)), asdict(SpeculationConfig())
    told = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value != usual[name])
    without_head = "; assistant.head = None" if assistant.head is not None and not best.with_head else ""
    return f"assistant.speculation = SpeculationConfig({told}){without_head}"


def _over_plain(row: dict[str, Any]) -> tuple[float, float]:
    return row["speedup"], row["interval"][0]


def _speeds(row: dict[str, Any]) -> str:
    """Both ratios of ours; only the first of others, whose passes are those of plain generation."""

    def ratio(value: float, interval: Sequence[float]) -> str:
        low, high = interval
        return f"{value:.2f} ({low:.2f} to {high:.2f})" if row["prompts"] > 1 else f"{value:.2f} (a single prompt)"

    plain = f"{ratio(row['speedup'], row['interval'])} times the speed of plain generate()"
    if not row["ours"]:
        return plain
    same = (
        f"{ratio(row['same_passes'], row['same_passes_interval'])} times that of plain generate() with the same passes"
    )
    return f"{plain} and at {same}"


def _of_products(same: dict[str, Any], best: dict[str, Any]) -> str:
    """What plain generation gains from the CPU products alone, by its row, where that is something."""
    passes, (low, high) = same["speedup"], same["interval"]
    if LOSES < passes < PAYS:
        return ""
    most = ", so most of the speed comes from the passes" if low > 1.0 and passes * passes > best["speedup"] else ""
    slower = ": turn them off (cpu_products)" if high < 1.0 else ""
    return f" The same passes alone take plain generate() to {passes:.2f}{most}{slower}."


def speed_table(summary: Iterable[dict[str, Any]], facts: dict[str, Any]) -> dict[str, Any]:
    """The speeds as a model card shows them."""
    fields = ("set", "temperature", "contestant", "tokens_per_second", "speedup", "interval", "same_passes",
              "same_passes_interval", "tokens_per_pass", "prompts")  # fmt: skip
    return {**facts, "rows": [{name: row[name] for name in fields} for row in summary]}
