"""From rows of generations to speeds and a verdict."""

from typing import Any
from unittest.mock import Mock

import pytest
from support.files.repos import head_for
from support.targets.models import tiny

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.benchmark.contestants import Contestant, all_contestants, choose, quick_contestants
from hf_specdecpp.benchmark.summary import comparable, next_step, summarise, verdict_of
from hf_specdecpp.draft_kinds.draft_kind import Parts


def summary_row(contestant: str, speedup: float, same: float, **fields: Any) -> dict[str, Any]:
    row = {
        "contestant": contestant, "plain": [speedup, speedup - 0.05, speedup + 0.05],
        "same_passes": [same, same - 0.05, same + 0.05], "ours": True, "tokens_per_pass": 2.0,
        "tokens_per_second": 10 * speedup,
    }  # fmt: skip
    return row | {"disturbed": 0, "prompts": 9} | fields


@pytest.mark.parametrize(("row", "passes", "says"), [
    (summary_row("x", 1.4, 1.4), 1.0, "makes this faster: the fastest, x, runs at 1.40 (1.35 to 1.45) times"),
    (summary_row("x", 2.1, 1.3), 1.6, "and at 1.30 (1.25 to 1.35) times its speed with the same matrix"),
    (summary_row("x", 2.1, 1.3), 1.6, "to 1.60 times its speed, so most of the gain comes from them."),
    (summary_row("x", 0.7, 1.2), 0.6, "makes this slower: the fastest, x, runs at 0.70"),
    (summary_row("x", 0.7, 1.2), 0.6, "bring plain generate() to 0.60 times its speed: set cpu_products='off'."),
    (summary_row("x", 2.1, 1.9), 1.1, "bring plain generate() to 1.10 times its speed."),
    (summary_row("x", 1.4, 1.4, same_passes=[1.4, 0.9, 1.5]), 1.0, "vary too much to tell"),
    (summary_row("x", 0.9, 0.9, plain=[0.9, 0.6, 1.1]), 1.0, "To find out, take more prompts"),
    (summary_row("x", 1.0, 1.0, same_passes=[1.0, 0.9, 1.5]), 1.0, "hardly changes the speed"),
    (summary_row("x", 1.5, 1.0), 1.5, "hardly changes the speed"),
    (summary_row("x", 1.5, 0.8), 1.9, "makes this slower: the fastest, x"),
    (summary_row("theirs", 1.4, 0.9, ours=False), 1.6, "makes this faster: the fastest, theirs, runs at 1.40"),
])  # fmt: skip
def test_verdict(row: dict[str, Any], passes: float, says: str) -> None:
    """What speculation gains is the ratio to plain generation with the same passes; faster passes are named as such."""
    found = verdict_of([row, summary_row("plain, same passes", passes, 1.0)])
    assert says in found
    assert ("same matrix multiplications" in found) == row["ours"]
    assert "idle machine" not in found
    assert "idle machine" in verdict_of([{**row, "disturbed": 1}])


def test_the_next_step_is_the_fastest_of_ours() -> None:
    """Also where somebody else is faster, as it may be kept; not where even it is slower than plain generation."""
    target, settings = tiny("llama"), SpeculationConfig(cpu_products="off")
    assistant: Any = SpecDecPPAssistant.from_early_exit(target, 1, speculation=settings, head=head_for(target))
    contestants = [
        Contestant("theirs", "theirs"),
        Contestant("looked up", "lookup", SpeculationConfig(lookup=True), alone=True),
        Contestant("q", "q", SpeculationConfig("threshold", threshold=0.5), with_head=False),
        Contestant("fixed 3", "fixed", SpeculationConfig("fixed", num_tokens=3)),
    ]
    rows = [summary_row(each.name, 1.9 - 0.2 * place, 1.2) for place, each in enumerate(contestants)]
    assert next_step(rows, contestants, assistant) == "assist(model, 'lookup')"
    q = "SpeculationConfig(rule='threshold', threshold=0.5, cpu_products='off')"
    says = f"assistant.speculation = {q}; assistant.head = None"
    assert next_step([rows[0], *rows[2:]], contestants, assistant) == says
    fixed = "assistant.speculation = SpeculationConfig(rule='fixed', num_tokens=3, cpu_products='off')"
    assert next_step(rows[3:], contestants, assistant) == fixed
    assistant.parts = Parts(adapter=Mock())
    for slow in ([], rows[:1], [summary_row("fixed 3", 1.0, 1.0)]):
        says = "plain generate(), or another draft for this target"
        assert next_step(slow, contestants, assistant) == says, "lookups took part"
        says = "plain generate(), lookups (--lookup) or another draft for this target"
        assert next_step(slow, [contestants[0], *contestants[2:]], assistant) == says


def test_what_overlaps_is_too_close_to_tell() -> None:
    assistant: Any = SpecDecPPAssistant.from_early_exit(tiny("llama"), 1)
    contestants = quick_contestants(has_head=False)
    fixed = summary_row("fixed 5", 1.65, 1.65, plain=[1.65, 0.94, 2.90], tokens_per_second=40.0)
    throughput = summary_row("throughput (q)", 1.56, 1.56, plain=[1.56, 1.28, 2.11], tokens_per_second=45.0)
    plain = summary_row("plain", 1.0, 1.0, plain=[1.0, 1.0, 1.0])
    said = next_step([fixed, throughput, plain], contestants, assistant)
    assert said == "assistant.speculation = SpeculationConfig(rule='throughput')", "more tokens a second"
    assert "Not significantly slower: throughput (q)." in verdict_of([fixed, throughput, plain])
    others = [summary_row(f"fixed {length}", 1.6, 1.6) for length in (2, 3, 4, 5)]
    assert "Not significantly slower: fixed 3, fixed 4 and 1 more." in verdict_of([*others, plain])
    slower = summary_row("throughput (q)", 1.5, 1.5)
    assert "Not significantly" not in verdict_of([summary_row("fixed 5", 1.65, 1.65), slower])


def timed(seconds: dict[str, list[float]], **fields: Any) -> list[dict[str, Any]]:
    """Rows of 8 tokens, by the seconds of each contestant for each prompt."""
    row = {"set": "s", "batch": 0, "temperature": 0.0, "session": 1, "tokens": 8, "passes": 8, "drafting": 0,
           "drafted": 0, "accepted": 0, "earlier": 0,
           "disturbed": False}  # fmt: skip
    return [
        {**row, "contestant": name, "prompt": number, "seconds": each, **fields}
        for name, times in seconds.items()
        for number, each in enumerate(times)
    ]


def test_ratios_are_paired_by_prompt() -> None:
    rows = timed({"plain": [4.0, 8.0], "plain, same passes": [2.0, 8.0], "fixed 3": [1.0, 2.0]})
    rows[-1]["earlier"] = 5
    found = {row["contestant"]: row for row in summarise(rows, choose(all_contestants(False), ["fixed 3"]))}
    assert (found["fixed 3"]["plain"][0], found["fixed 3"]["same_passes"][0]) == (4.0, 3.0)  # medians of 4, 4 and 2, 4
    assert found["fixed 3"]["same_passes"][1:] == [2.0, 4.0]
    assert (found["plain, same passes"]["plain"][0], found["plain, same passes"]["same_passes"][0]) == (1.5, 1.0)
    assert (found["plain"]["plain"][0], found["plain"]["same_passes"][0]) == (1.0, 0.75)
    assert comparable(rows[:2] + rows[4:]) == []
    first = {"plain": [2.0] * 7, "plain, same passes": [2.0] * 7, "fixed 3": [2.0] * 5 + [1.0] * 2}
    rows = [{**row, "earlier": row["prompt"]} for row in timed(first)]
    [ours] = [row for row in summarise(rows, choose(all_contestants(False), ["fixed 3"])) if row["ours"]]
    assert ours["first"] == [1.0, 1.0, 1.0], "five texts, of which none was faster"


def test_speeds_over_the_best_constant_length() -> None:
    """The one with the largest median gain over all prompts of all sets, whatever is the best of one of them."""
    seconds: dict[str, list[float]] = {
        "plain": [4.0] * 4, "plain, same passes": [4.0] * 4, "fixed 3": [2.0, 2.0, 2.0, 8.0], "fixed 9": [1.0] * 4,
        "threshold 0.5 (q)": [2.5, 2.5, 2.5, 2.5], "throughput (q)": [1.0, 2.0, 4.0, 4.0],
    }  # fmt: skip
    rows = [{**row, "set": "ab"[row["prompt"] // 2]} for row in timed(seconds)]
    contestants = choose(all_contestants(False), ["fixed 3", "fixed 9", "threshold 0.5 (q)", "throughput (q)"])
    found = {(row["set"], row["contestant"]): row["constant"] for row in summarise(rows, contestants)}
    assert found["all", "throughput (q)"][0] == 1.5, "the median of 2, 1, 0.5 and 2"
    assert found["b", "throughput (q)"][0] == 1.25
    assert found["b", "threshold 0.5 (q)"][0] == pytest.approx((2.0 / 2.5 + 8.0 / 2.5) / 2.0)
    assert found["all", "fixed 3"] == [1.0, 1.0, 1.0]
    only = summarise([row for row in rows if str(row["contestant"]).startswith("plain")], contestants)
    assert {row["constant"] for row in only} == {None}
