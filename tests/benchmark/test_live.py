"""Timed runs: passes, resuming, disturbances, losslessness, and what contestants set up."""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.enumeration.mutants import accept_everything
from support.targets.models import assistant_for, prompt, tiny

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.benchmark import live as live_module
from hf_specdecpp.benchmark.contestants import (
    BASELINES,
    PLAIN,
    SAME_PASSES,
    Contestant,
    all_contestants,
    choose,
    quick_contestants,
)
from hf_specdecpp.benchmark.live import Disturbance, LiveBenchmark, _watched, answer, mismatches, noted_passes
from hf_specdecpp.benchmark.questions import RUNS, Benchmark, Question, RunLog, in_batches
from hf_specdecpp.benchmark.report import describe_mismatch
from hf_specdecpp.benchmark.summary import comparable, summarise
from hf_specdecpp.cli_options import BenchmarkConfig
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.texts.parting import explain_parting
from hf_specdecpp.throughput import known_costs

SOME = ["plain", "fixed 3", "threshold 0.5 (q)", "dyspec 4*", "transformers default", "prompt lookup"]
QUESTIONS = [Question("set", f"prompt-{seed}", [prompt(seed=seed)[0].tolist()]) for seed in range(2)]


def some_contestants() -> list[Contestant]:
    return choose(all_contestants(has_head=False), SOME)


def benchmark(folder: Path, contestants: list[Contestant], **options: Any) -> LiveBenchmark:
    target = tiny("llama")
    config = BenchmarkConfig("target", max_new_tokens=24, **{"attempts": 1, "temperatures": [0.0], **options})
    log = RunLog(folder, {"seed": 0})
    return LiveBenchmark(Benchmark(config, target, assistant_for(target), contestants, QUESTIONS), log)


@pytest.mark.takes(4)
@pytest.mark.usefixtures("cache")
def test_passes_add_up(tmp_path: Path) -> None:
    """And costs that were known before are neither used nor forgotten."""
    before = dict(known_costs._known)
    live = benchmark(tmp_path, some_contestants(), temperatures=[0.0, 1.0])
    live.run(QUESTIONS)
    assert len(live.log.rows) == 2 * 2 * len(some_contestants())
    for row in live.log.rows:
        assert row["tokens"] == 24 == len(row["answers"][0])
        assert 0 <= row["accepted"] <= row["drafted"]
        assert row["passes"] + row["accepted"] in (24, 25)  # a text may end with a candidate
        assert row["drafting"] <= row["passes"]
        assert row["earlier"] == 2 * (row["temperature"] > 0.0) + (row["prompt"] == "prompt-1")
    drafted = {row["contestant"]: row["drafted"] for row in live.log.rows}
    assert known_costs._known == before
    idle = {each.name for each in BASELINES}
    assert {drafted[name] for name in idle} == {0}
    assert min(count for name, count in drafted.items() if name not in idle and "lookup" not in name) > 0


def test_passes_of_transformers_own_speculation() -> None:
    """A draft that is never wrong: each pass reads three candidates and emits a token more."""
    target = tiny("llama")
    assistant = SpecDecPPAssistant.from_draft(copy.deepcopy(target), target)
    question = Question("set", "prompt", prompt().tolist())
    [contestant] = [each for each in all_contestants(False) if each.name == "transformers constant 3"]
    with noted_passes(target) as read, contestant.arguments(assistant, target) as arguments:
        said = answer(target, question.ids, 0.0, 0, {"max_new_tokens": 24, **arguments})
    watched = _watched(read, question, said)
    assert [watched[name] for name in ("passes", "drafting", "drafted", "accepted")] == [6, 6, 18, 18]


def test_contestants_leave_the_assistant_as_it_was() -> None:
    target = tiny("llama")
    assistant = assistant_for(target)
    knobs, config = assistant.speculation, assistant.drafter.model.generation_config
    memory = assistant.memory
    for contestant in all_contestants(has_head=False):
        with contestant.arguments(assistant, target):
            pass
        assert assistant.speculation is knobs
        assert assistant.memory is memory
        assert assistant.drafter.model.generation_config is config
    assert len({contestant.name for contestant in all_contestants(True)}) == len(all_contestants(True))


def test_patterns() -> None:
    contestants = all_contestants(has_head=True)
    assert [each.name for each in choose(contestants, ["lookup"])] == ["plain", "plain, same passes", "lookup"]
    assert (len(choose(contestants, ["fixed*"])), choose(contestants, [])) == (16, contestants)
    with pytest.raises(ValueError, match="No contestant matches 'fxied'"):
        choose(contestants, ["fxied"])
    assert {each.name for each in quick_contestants(False)} < {each.name for each in all_contestants(False)}


@pytest.mark.daily("3", takes=3)
@pytest.mark.parametrize("answers", [3, 8, 12, 13])  # the baselines come last for the second prompt
def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    live, left = benchmark(tmp_path, some_contestants()), [answers + len(some_contestants())]  # warm-ups count, too
    generate = live_module.answer

    def killed(*args: Any) -> list[list[int]]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return generate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(live_module, "answer", killed)
        with pytest.raises(KeyboardInterrupt):
            live.run(QUESTIONS)
    with (tmp_path / RUNS).open("a") as file:
        file.write('{"set": "torn')  # killed while it wrote
    again = benchmark(tmp_path, some_contestants())
    assert len(again.log.rows) == len(live.log.rows) == answers
    again.run(QUESTIONS)
    lines = [json.loads(line) for line in (tmp_path / RUNS).read_text().splitlines()]
    assert (lines, {row["session"] for row in lines}) == (again.log.rows, {1, 2})
    compared = comparable(lines)
    assert len({(row["prompt"], row["contestant"]) for row in compared}) == 2 * len(some_contestants())
    for baseline in BASELINES:  # every speed has something to compare with
        there = {(row["prompt"], row["session"]) for row in lines if row["contestant"] == baseline.name}
        assert {(row["prompt"], row["session"]) for row in compared} <= there
    assert len(lines) - len(compared) == max(0, answers - len(some_contestants()))
    summarise(compared, some_contestants())
    benchmark(tmp_path, some_contestants()).run(QUESTIONS)
    assert len((tmp_path / RUNS).read_text().splitlines()) == len(lines)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    RunLog(tmp_path, {"seed": 0, "threads": 1})
    with pytest.raises(ValueError, match="threads was 1 and is now 2"):
        RunLog(tmp_path, {"seed": 0, "threads": 2})


def test_disturbed_runs_are_repeated_and_the_quietest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([0.3, 0.2, 0.25, 0.0])

    def leave(self: Disturbance, *_: Any) -> None:
        self.seconds, self.waited, self.others = 1.0, next(waits), 0.5

    monkeypatch.setattr(Disturbance, "__exit__", leave)
    live = benchmark(tmp_path, [PLAIN], attempts=3)
    row = live._time(QUESTIONS[0], 0.0, PLAIN)
    assert (row["attempts"], row["waited"], row["disturbed"]) == (3, 0.2, True)
    row = live._time(QUESTIONS[0], 0.0, PLAIN)
    assert (row["attempts"], row["waited"], row["disturbed"]) == (1, 0.0, False)


def test_waiting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(0.0, 0.0, {"1": 1.0}, (0.0, 0.0)), (2.0, 1.0, {"1": 1.5, "2": 0.1}, (4.0, 0.0))])
    monkeypatch.setattr(live_module, "_clocks", lambda: next(readings))
    with Disturbance() as load:
        pass
    assert (load.seconds, load.waited, load.others, load.disturbed) == (2.0, 0.25, 1.5, True)


def test_rounding_excuses_half_precision_only() -> None:
    target, ids = tiny("llama"), prompt()[0].tolist()
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[5] * 1.001  # almost a tie, wherever 5 and 7 are likeliest
        for token in range(48):
            if token not in (5, 7):
                target.lm_head.weight[token] = -target.lm_head.weight[5]
        if float(target(torch.tensor([ids])).logits[0, -1, 5]) < 0:
            target.lm_head.weight.neg_()
    found = explain_parting(target, ids, [5], [7])
    assert (found["place"], found["tokens"]) == (0, [5, 7])
    assert explain_parting(target, ids, [5, 3], [5])["place"] == explain_parting(target, ids, [5], [5, 3])["place"] == 1
    assert 0.0 < found["gap"] < 0.01
    assert not found["near_tie"]
    assert explain_parting(target.to(torch.bfloat16), ids, [5], [7])["near_tie"]
    assert not explain_parting(target, ids, [5], [8])["near_tie"]
    assert not explain_parting(target, ids, [5], [])["near_tie"]


def test_a_wrong_text_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch, too: all rows of it are compared."""
    accept_everything(monkeypatch)
    live = benchmark(tmp_path, choose(all_contestants(False), ["fixed 3", "prompt lookup"]))
    asked = [*QUESTIONS, *in_batches(QUESTIONS, [2])]
    live.run(asked)
    found = mismatches(live.log.rows, asked, live.target, "w{}".format)
    assert {(each["set"], each["contestant"]) for each in found} == {("set", "fixed 3"), ("batches of 2", "fixed 3")}
    assert all(each["place"] > 0 and not each["near_tie"] for each in found)
    assert sum(each["set"] == "batches of 2" for each in found) == 2
    for each in found:
        assert each["texts"] == [f"w{token}" for token in each["tokens"]]
        assert f": 'w{each['tokens'][0]}' and 'w{each['tokens'][1]}', " in describe_mismatch(each)


def test_the_same_passes_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The baseline generates within the products that ours drafts and verifies in; plain generation does not."""
    target = tiny("llama")
    assistant = assistant_for(target)
    used: list[Any] = []

    @contextmanager
    def products(_: DraftSetup, given: Any) -> Iterator[None]:
        used.append(given)
        yield
        used.append(None)

    monkeypatch.setattr(DraftSetup, "products", products)
    for contestant in BASELINES:
        with contestant.arguments(assistant, target) as arguments:
            assert arguments == {}
            assert used == ([target] if contestant is SAME_PASSES else [])
    assert used == [target, None]


def test_ours_keeps_the_passes_of_the_assistant() -> None:
    """Contestants set what is drafted; how passes compute is the assistant's own setting."""
    target = tiny("llama")
    assistant = assistant_for(target, rule="fixed", cpu_products="off")
    for contestant in quick_contestants(has_head=False)[-2:]:
        with contestant.arguments(assistant, target):
            expected: Any = contestant.speculation
            assert assistant.speculation == replace(expected, cpu_products="off")
