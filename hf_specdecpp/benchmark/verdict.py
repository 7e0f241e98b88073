"""What a benchmark says in a sentence: whether speculation pays here, and how to keep the fastest of ours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import BASELINES, SAME_PASSES, Contestant
from hf_specdecpp.config.speculation import SpeculationConfig

PAYS, LOSES = 1.03, 0.97  # between them speeds count as equal
IDLE = 1.02  # tokens a pass of a contestant that has all but stopped speculating
MORE = "take more prompts (--data FILE)"
Row = dict[str, Any]


def verdict(rows: Sequence[Row]) -> str:
    """What speculation gains, and what faster passes do, by the rows of one set and temperature, fastest first.

    It pays where it is faster than plain generation, both as that is and with the same passes, by more than chance.
    """
    others = [row for row in rows if row["contestant"] not in {each.name for each in BASELINES}]
    if not others:
        return "Only plain generate() took part, so there is nothing to compare."
    best = others[0]
    ratios = [best["plain"], best["same_passes"]] if best["ours"] else [best["plain"]]
    gain, low, high = min(ratios)
    runs = f"{best['contestant']}, runs at {_speeds(best)}"
    if (same := [row for row in rows if row["contestant"] == SAME_PASSES.name]) and best["ours"]:
        runs += _of_products(same[0], best)
    if rivals := too_close(others)[1:]:
        runs += f" Too close to tell from it: {_some([row['contestant'] for row in rivals])}."
    if any(row["disturbed"] for row in rows):
        runs += " Other load disturbed some of the runs, so repeat this on a quiet machine."
    if best["tokens_per_pass"] < IDLE and gain > LOSES:
        return f"Speculation does not pay here, and all but stops: the fastest, {runs}"
    if LOSES < gain < PAYS:
        return f"Speculation neither pays nor costs here: the fastest, {runs}"
    if low <= 1.0 <= high:
        return f"Whether speculation pays here is too close to tell, so {MORE}: the fastest, {runs}"
    if gain >= PAYS:
        return f"Speculation pays here: the fastest, {runs}"
    return f"Speculation does not pay here: even the fastest, {runs}"


def too_close(rows: Sequence[Row]) -> list[Row]:
    """The fastest, which comes first, and those whose intervals overlap with its own."""
    return [row for row in rows if row["plain"][2] >= rows[0]["plain"][1]]


def _speeds(row: Row) -> str:
    """Both ratios of ours; only the first of others, whose passes are those of plain generation."""

    def times(ratio: Sequence[float]) -> str:
        middle, low, high = ratio
        return f"{middle:.2f} ({low:.2f} to {high:.2f})" if row["prompts"] > 1 else f"{middle:.2f} (a single prompt)"

    plain = f"{times(row['plain'])} times the speed of plain generate()"
    if not row["ours"]:
        return f"{plain}."
    return f"{plain} and at {times(row['same_passes'])} times that of plain generate() with the same passes."


def _of_products(same: Row, best: Row) -> str:
    """What plain generation gains from the CPU products alone, by its row, where that is something."""
    passes, low, high = same["plain"]
    if LOSES < passes < PAYS:
        return ""
    most = ", so most of the speed comes from the passes" if low > 1.0 and passes * passes > best["plain"][0] else ""
    slower = ": turn them off (cpu_products)" if high < 1.0 else ""
    return f" The same passes alone take plain generate() to {passes:.2f}{most}{slower}."


def next_step(rows: Sequence[Row], contestants: Sequence[Contestant], assistant: SpecDecPPAssistant) -> str:
    """How to keep the fastest of ours, by the rows of one set and temperature, fastest first; or what else to try.

    Of those that are too close to tell the one that made most tokens a second of all prompts.
    """
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
