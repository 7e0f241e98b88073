"""Timed runs: rounds, resuming, losslessness, disturbances, and the command from end to end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.models import assistant_for, prompt, tiny
from support.repos import TEXT, head_for, tokenizer
from support.training_files import training_run
from support.zoo import tiny_of
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import (
    BASELINES,
    PLAIN,
    SAME_PASSES,
    Contestant,
    all_contestants,
    choose,
    quick_contestants,
    without_draft,
)
from hf_specdecpp.benchmark.live import clock, runner
from hf_specdecpp.benchmark.live.batches import summarise_batches
from hf_specdecpp.benchmark.live.clock import Disturbance, RoundClock
from hf_specdecpp.benchmark.live.losslessness import explain_parting, parting
from hf_specdecpp.benchmark.live.runner import LiveBenchmark, Question, mismatches, rotated
from hf_specdecpp.benchmark.replay import runner as replaying
from hf_specdecpp.benchmark.report import notes
from hf_specdecpp.benchmark.run_log import RUNS, RunLog
from hf_specdecpp.benchmark.summary import comparable, next_step, summarise, verdict
from hf_specdecpp.cli import app
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.drafts.kind import Parts
from hf_specdecpp.generation import verification
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.models.causal_lm import until_end
from hf_specdecpp.texts.encoding import padded

SOME = ["plain", "fixed 3", "threshold 0.5 (q)", "dyspec 4*", "transformers default", "prompt lookup"]
QUESTIONS = [Question("set", f"prompt-{seed}", prompt(seed=seed)[0].tolist()) for seed in range(2)]


def some_contestants() -> list[Contestant]:
    return choose(all_contestants(has_head=False), SOME)


def benchmark(folder: Path, target: Any = None, settings: dict[str, Any] | None = None) -> LiveBenchmark:
    target = target or tiny("llama")
    log = RunLog(folder, settings or {"seed": 0})
    return LiveBenchmark(target, assistant_for(target), log, max_new_tokens=24, seed=0, attempts=1)


# Rounds ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_add_up(tmp_path: Path, temperature: float) -> None:
    live = benchmark(tmp_path)
    live.run(QUESTIONS, some_contestants(), [temperature])
    assert len(live.log.rows) == 2 * len(some_contestants())
    for row in live.log.rows:
        assert row["tokens"] == 24 == len(row["ids"]) - row["prompt_length"]
        *rounds, last = row["rounds"]
        emitted = 24 - sum(accepted + 1 for _, accepted, _, _ in rounds)
        assert emitted in (last[1], last[1] + 1)  # a text may end with a candidate
        assert all(0 <= accepted <= drafted for drafted, accepted, _, _ in row["rounds"])
        spent = sum(between + target for _, _, between, target in row["rounds"])
        assert 0.0 < spent <= row["seconds"]
    drafted = {row["contestant"]: sum(each[0] for each in row["rounds"]) for row in live.log.rows}
    idle = {each.name for each in BASELINES}
    assert {drafted[name] for name in idle} == {0}
    assert min(count for name, count in drafted.items() if name not in idle and "lookup" not in name) > 0


@pytest.mark.parametrize("family", ["llama", "granitemoehybrid"])
def test_rounds_are_those_that_the_assistant_counts(family: str) -> None:
    """Also where a target with recurrent layers reads tokens again."""
    target = tiny_of(family)
    assistant = assistant_for(target)
    for seed in range(3):
        ids = prompt(seed=seed)
        plain = target.generate(ids, max_new_tokens=30, do_sample=False)[0].tolist()
        target.generation_config.eos_token_id = plain[-4]  # perhaps a candidate, perhaps not
        with RoundClock(target) as watch:
            text = target.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=assistant)[0].tolist()
        rounds = watch.rounds(text, ids.shape[1])
        assert len(rounds) == assistant.stats.target_passes
        assert sum(each.drafted for each in rounds) == assistant.stats.drafted
        assert sum(each.accepted for each in rounds) == assistant.stats.accepted
        target.generation_config.eos_token_id = None


def test_everyone_begins_once() -> None:
    everyone = some_contestants()
    firsts = [rotated(everyone, number)[0] for number in range(len(everyone))]
    assert sorted(each.name for each in firsts) == sorted(each.name for each in everyone)


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
    assert len(choose(contestants, ["fixed*"])) == 16
    assert choose(contestants, []) == contestants
    with pytest.raises(ValueError, match="No contestant is called 'fxied'"):
        choose(contestants, ["fxied"])
    assert {each.name for each in quick_contestants(False)} < {each.name for each in all_contestants(False)}


# Resuming -------------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("answers", [3, 8, 12, 13])  # the baselines come last for the second prompt
def test_a_killed_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int) -> None:
    live, left = benchmark(tmp_path), [answers + len(some_contestants())]  # the warm-up counts, too
    generate = runner.answer

    def killed(*args: Any) -> list[int]:
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return generate(*args)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "answer", killed)
        with pytest.raises(KeyboardInterrupt):
            live.run(QUESTIONS, some_contestants(), [0.0])
    with (tmp_path / RUNS).open("a") as file:
        file.write('{"set": "torn')  # killed while it wrote
    again = benchmark(tmp_path)
    assert len(again.log.rows) == len(live.log.rows) == answers
    again.run(QUESTIONS, some_contestants(), [0.0])
    lines = [json.loads(line) for line in (tmp_path / RUNS).read_text().splitlines()]
    assert lines == again.log.rows
    assert {row["session"] for row in lines} == {1, 2}
    compared = comparable(lines)
    assert len({(row["prompt"], row["contestant"]) for row in compared}) == 2 * len(some_contestants())
    for baseline in BASELINES:  # every speed has something to compare with
        there = {(row["prompt"], row["session"]) for row in lines if row["contestant"] == baseline.name}
        assert {(row["prompt"], row["session"]) for row in compared} <= there
    assert len(lines) - len(compared) == max(0, answers - len(some_contestants()))
    summarise(compared, some_contestants())
    benchmark(tmp_path).run(QUESTIONS, some_contestants(), [0.0])
    assert len((tmp_path / RUNS).read_text().splitlines()) == len(lines)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    RunLog(tmp_path, {"seed": 0, "threads": 1})
    with pytest.raises(ValueError, match="threads was 1 and is now 2"):
        RunLog(tmp_path, {"seed": 0, "threads": 2})


# Disturbances ---------------------------------------------------------------------------------------------------------


def test_disturbed_runs_are_repeated_and_the_quietest_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = iter([0.3, 0.2, 0.25, 0.0])

    def leave(self: Disturbance, *_: Any) -> None:
        self.seconds, self.waited, self.others = 1.0, next(waits), 0.5

    monkeypatch.setattr(Disturbance, "__exit__", leave)
    live = benchmark(tmp_path)
    live.attempts = 3
    row = live._time(QUESTIONS[0], 0.0, PLAIN)
    assert (row["attempts"], row["waited"], row["disturbed"]) == (3, 0.2, True)
    row = live._time(QUESTIONS[0], 0.0, PLAIN)
    assert (row["attempts"], row["waited"], row["disturbed"]) == (1, 0.0, False)


def test_waiting_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([(0.0, 0.0, {"1": 1.0}, (0.0, 0.0)), (2.0, 1.0, {"1": 1.5, "2": 0.1}, (4.0, 0.0))])
    monkeypatch.setattr(Disturbance, "_read", staticmethod(lambda: next(readings)))
    with Disturbance() as load:
        pass
    assert (load.seconds, load.waited, load.others, load.disturbed) == (2.0, 0.25, 1.5, True)


def test_where_the_system_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_delays", lambda: None)
    monkeypatch.setattr(clock, "_machine", lambda: None)
    with Disturbance() as load:
        sum(range(1000))
    assert load.others is None
    assert 0.0 <= load.waited <= 1.0


def test_the_report_says_what_others_did() -> None:
    where = {"threads": 1, "device": "CPU", "processors": 2}
    settings: dict[str, Any] = {"dtype": "float32", "target": "t", "draft_name": "d"}
    settings |= {"pack_weights": False, "int8_draft": True}
    for others, said in ((1.0, True), (0.02, False), (None, False)):
        row = {"contestant": "plain", "rounds": [], "disturbed": False, "others": others}
        lines = notes({"settings": settings, "environment": where, "runs": [row] * 3, "batches": []})
        assert any("1.0 of the machine's 2 processors" in line for line in lines) == said
        assert any("int8" in line for line in lines)
    half = notes({"settings": settings | {"dtype": "bfloat16"}, "environment": where, "runs": [row], "batches": []})
    assert not any("int8" in line for line in half), "only float32 layers compute in int8"


# Losslessness ---------------------------------------------------------------------------------------------------------


def test_parting() -> None:
    assert parting([1, 2, 3], [1, 2, 3]) is None
    assert parting([1, 2, 3], [1, 4, 3]) == 1
    assert parting([1, 2, 3], [1, 2]) == 2


def test_rounding_excuses_half_precision_only() -> None:
    target = tiny("llama")
    ids = prompt()[0].tolist()
    with torch.no_grad():
        target.lm_head.weight[7] = target.lm_head.weight[5] * 1.001  # almost a tie, wherever 5 and 7 are likeliest
        for token in range(48):
            if token not in (5, 7):
                target.lm_head.weight[token] = -target.lm_head.weight[5]
        if float(target(torch.tensor([ids])).logits[0, -1, 5]) < 0:
            target.lm_head.weight.neg_()
    found = explain_parting(target, [*ids, 5], [*ids, 7], len(ids))
    assert 0.0 < found["gap"] < 0.01
    assert not found["near_tie"]
    assert explain_parting(target.to(torch.bfloat16), [*ids, 5], [*ids, 7], len(ids))["near_tie"]
    assert not explain_parting(target, [*ids, 5], [*ids, 8], len(ids))["near_tie"]
    assert not explain_parting(target, [*ids, 5], ids, len(ids))["near_tie"]


def test_a_wrong_text_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts_all(candidates: list[int], scores: torch.Tensor) -> tuple[int, int]:
        return len(candidates), int(scores[-1].argmax())

    monkeypatch.setattr(verification, "verify_greedy", accepts_all)
    live = benchmark(tmp_path)
    contestants = choose(all_contestants(False), ["fixed 3", "prompt lookup"])
    live.run(QUESTIONS, contestants, [0.0])
    found = mismatches(live.log.rows, live.target)
    assert {each["contestant"] for each in found} == {"fixed 3"}
    assert all(each["place"] >= each["prompt_length"] and not each["near_tie"] for each in found)


# Verdict --------------------------------------------------------------------------------------------------------------


def summary_row(contestant: str, speedup: float, same_passes: float, **fields: Any) -> dict[str, Any]:
    spread = {
        "interval": [speedup - 0.05, speedup + 0.05],
        "same_passes_interval": [same_passes - 0.05, same_passes + 0.05],
    }
    row = {
        "contestant": contestant,
        "speedup": speedup,
        "same_passes": same_passes,
        "ours": True,
        "tokens_per_pass": 2.0,
        "tokens_per_second": 10 * speedup,
    }
    return row | spread | {"disturbed": 0, "prompts": 9} | fields


@pytest.mark.parametrize(
    ("row", "passes", "says"),
    [
        (summary_row("x", 1.4, 1.4), 1.0, "Speculation pays here: the fastest, x, runs at 1.40 (1.35 to 1.45) times"),
        (summary_row("x", 2.1, 1.3), 1.6, "Speculation pays here"),
        (summary_row("x", 2.1, 1.3), 1.6, "1.30 (1.25 to 1.35) times that of plain generate() with the same passes."),
        (summary_row("x", 2.1, 1.3), 1.6, "take plain generate() to 1.60, so most of the speed comes from the passes."),
        (summary_row("x", 0.7, 1.2), 0.6, "take plain generate() to 0.60: turn them off (cpu_products)."),
        (summary_row("x", 2.1, 1.9), 1.1, "take plain generate() to 1.10."),
        (summary_row("x", 1.4, 1.4, same_passes_interval=[0.9, 1.5]), 1.0, "neither pays nor costs here"),
        (summary_row("x", 1.5, 1.0), 1.5, "neither pays nor costs here"),
        (summary_row("x", 1.5, 0.8), 1.9, "does not pay here: even the fastest, x"),
        (summary_row("x", 1.2, 1.0, tokens_per_pass=1.0), 1.2, "does not pay here, and all but stops: the fastest, x"),
        (summary_row("x", 0.8, 0.8, tokens_per_pass=1.0), 1.0, "does not pay here: even the fastest, x"),
        (summary_row("theirs", 1.4, 0.9, ours=False), 1.6, "Speculation pays here: the fastest, theirs, runs at 1.40"),
    ],
)
def test_verdict(row: dict[str, Any], passes: float, says: str) -> None:
    """What speculation gains is the ratio to plain generation with the same passes; faster passes are named as such."""
    found = verdict([row, summary_row("plain, same passes", passes, 1.0)])
    assert says in found
    assert ("same passes" in found) == row["ours"]
    assert "quiet machine" not in found
    assert "quiet machine" in verdict([{**row, "disturbed": 1}])


def test_the_next_step_is_the_fastest_of_ours() -> None:
    """Also where somebody else is faster, as it may be kept; not where even it is slower than plain generation."""
    target = tiny("llama")
    settings = SpeculationConfig(pack_weights=True)
    assistant: Any = SpecDecPPAssistant.from_early_exit(target, 1, speculation=settings, head=head_for(target))
    contestants = [
        Contestant("theirs", "theirs"),
        Contestant("looked up", "lookup", SpeculationConfig(lookup=True), alone=True),
        Contestant("q", "q", SpeculationConfig("threshold", threshold=0.5), with_head=False),
        Contestant("fixed 3", "fixed", SpeculationConfig("fixed", num_tokens=3)),
    ]
    rows = [summary_row(each.name, 1.9 - 0.2 * place, 1.2) for place, each in enumerate(contestants)]
    assert next_step(rows, contestants, assistant) == "assistant = SpecDecPPAssistant.from_lookup(model)"
    says = "assistant.speculation = SpeculationConfig(threshold=0.5, pack_weights=True); assistant.head = None"
    assert next_step([rows[0], *rows[2:]], contestants, assistant) == says
    fixed = "assistant.speculation = SpeculationConfig(rule='fixed', num_tokens=3, pack_weights=True)"
    assert next_step(rows[3:], contestants, assistant) == fixed
    assistant.parts = Parts(adapter=Mock())
    for slow in ([], rows[:1], [summary_row("fixed 3", 1.0, 1.0)]):
        says = "plain generate(), or another draft for this target"
        assert next_step(slow, contestants, assistant) == says, "lookups took part"
        says = "plain generate(), lookups (--lookup) or another draft for this target"
        assert next_step(slow, [contestants[0], *contestants[2:]], assistant) == says


@pytest.mark.parametrize("kind", ["lookup", "untrained"])
def test_what_did_not_pay_is_not_advised_again(kind: str) -> None:
    """Nor a cheaper draft where nothing drafts, which the verdict left to the next step."""
    target = tiny("llama")
    make = SpecDecPPAssistant
    assistant: Any = make.from_lookup(target) if kind == "lookup" else make.from_early_exit(target, 1)
    assistant.config.target_id = "org/target"
    contestants = without_draft() if kind == "lookup" else quick_contestants(has_head=False)
    rows = [summary_row(contestants[-1].name, 0.9, 0.9), summary_row("plain", 1.0, 1.0)]
    says = {
        "lookup": "plain generate(), or a draft for this target: --assistant REPO, or specdecpp train",
        "untrained": "specdecpp train --target org/target --data FILE --output DIR, a draft for this target",
    }
    assert next_step(rows, contestants, assistant) == says[kind]
    assert "cheaper draft" not in verdict(rows)


def test_what_overlaps_is_too_close_to_tell() -> None:
    assistant: Any = SpecDecPPAssistant.from_early_exit(tiny("llama"), 1)
    contestants = quick_contestants(has_head=False)
    fixed = summary_row("fixed 5", 1.65, 1.65, interval=[0.94, 2.90], tokens_per_second=40.0)
    throughput = summary_row("throughput (q)", 1.56, 1.56, interval=[1.28, 2.11], tokens_per_second=45.0)
    plain = summary_row("plain", 1.0, 1.0, interval=[1.0, 1.0])
    said = next_step([fixed, throughput, plain], contestants, assistant)
    assert said == (
        "assistant.speculation = SpeculationConfig(rule='throughput')  # throughput (q), too close to tell from fixed "
        "5: take more prompts (--data FILE)"
    )
    said = next_step([{**fixed, "tokens_per_second": 50.0}, throughput, plain], contestants, assistant)
    assert "# fixed 5, too close to tell from throughput (q), plain generate(): take" in said
    assert "Too close to tell from it: throughput (q), plain" not in verdict([fixed, throughput, plain])
    assert "Too close to tell from it: throughput (q)." in verdict([fixed, throughput, plain])
    others = [summary_row(f"fixed {length}", 1.6, 1.6) for length in (2, 3, 4, 5)]
    assert "Too close to tell from it: fixed 3, fixed 4 and 1 more." in verdict([*others, plain])
    assert "Too close" not in verdict([summary_row("fixed 5", 1.65, 1.65), summary_row("throughput (q)", 1.5, 1.5)])


def test_both_ratios_are_paired_by_prompt() -> None:
    seconds = {"plain": [4.0, 8.0], "plain, same passes": [2.0, 8.0], "fixed 3": [1.0, 2.0]}
    rows = [
        {"set": "s", "prompt": number, "temperature": 0.0, "contestant": name, "session": 1, "tokens": 8,
         "seconds": each, "rounds": [[0, 0, 0.0, 0.1]], "disturbed": False}
        for name, times in seconds.items() for number, each in enumerate(times)
    ]  # fmt: skip
    found = {row["contestant"]: row for row in summarise(rows, choose(all_contestants(False), ["fixed 3"]))}
    assert (found["fixed 3"]["speedup"], found["fixed 3"]["same_passes"]) == (4.0, 3.0)  # medians of 4, 4 and of 2, 4
    assert found["fixed 3"]["same_passes_interval"] == [2.0, 4.0]
    assert (found["plain, same passes"]["speedup"], found["plain, same passes"]["same_passes"]) == (1.5, 1.0)
    assert (found["plain"]["speedup"], found["plain"]["same_passes"]) == (1.0, 0.75)
    assert comparable(rows[:2] + rows[4:]) == []


def test_speeds_over_the_best_constant_length() -> None:
    """The one with the largest median gain over all prompts of all sets, whatever is the best of one of them."""
    seconds: dict[str, list[float]] = {
        "plain": [4.0] * 4, "plain, same passes": [4.0] * 4, "fixed 3": [2.0, 2.0, 2.0, 8.0], "fixed 9": [1.0] * 4,
        "threshold 0.5 (q)": [2.5, 2.5, 2.5, 2.5], "throughput (q)": [1.0, 2.0, 4.0, 4.0],
    }  # fmt: skip
    rows = [
        {"set": "ab"[number // 2], "prompt": number, "temperature": 0.0, "contestant": name, "session": 1, "tokens": 8,
         "seconds": each, "rounds": [[0, 0, 0.0, 0.1]], "disturbed": False, "split": [0.0] * 4}
        for name, times in seconds.items() for number, each in enumerate(times)
    ]  # fmt: skip
    contestants = choose(all_contestants(False), ["fixed 3", "fixed 9", "threshold 0.5 (q)", "throughput (q)"])
    found = {(row["set"], row["contestant"]): row["of_constant"] for row in summarise(rows, contestants)}
    assert found["all", "throughput (q)"][0] == 1.5, "the median of 2, 1, 0.5 and 2"
    assert found["b", "throughput (q)"][0] == 1.25
    assert found["b", "threshold 0.5 (q)"][0] == pytest.approx((2.0 / 2.5 + 8.0 / 2.5) / 2.0)
    assert found["all", "fixed 3"] == [1.0, 1.0, 1.0]
    only = summarise([row for row in rows if str(row["contestant"]).startswith("plain")], contestants)
    assert {row["of_constant"] for row in only} == {None}


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
    for passes in ({"pack_weights": True}, {"cpu_products": "off"}):
        assistant = assistant_for(target, rule="fixed", **passes)
        for contestant in quick_contestants(has_head=False)[-2:]:
            with contestant.arguments(assistant, target):
                assert assistant.speculation == SpeculationConfig(**vars(contestant.speculation) | passes)


def test_another_benchmark_looks_up_for_its_own_target() -> None:
    """Also in the process of an earlier one, whose target it does not keep."""
    helpers = []
    for _ in range(2):
        target = tiny("llama")
        with without_draft()[-1].arguments(SpecDecPPAssistant.from_lookup(target), target) as arguments:
            helpers.append(arguments["assistant_model"])
            target.generate(prompt(), max_new_tokens=4, do_sample=False, **arguments)
    assert helpers[0] is not helpers[1]


# The command ----------------------------------------------------------------------------------------------------------


def run_command(target: PreTrainedModel, folder: Path, *options: str) -> Any:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT, "w3 w9 w4 w2")))
    arguments = ["bench", "--target", str(target.config.name_or_path), "--layers", "1", "--data", str(data), *options]
    return CliRunner().invoke(app, [*arguments, "--output", str(folder / "bench"), "--device", "cpu", "--threads", "1"])


def test_without_an_assistant_candidates_are_looked_up(target: PreTrainedModel, tmp_path: Path) -> None:
    data = tmp_path / "questions.jsonl"
    data.write_text(json.dumps({"prompt": TEXT}))
    arguments = [
        "bench",
        "--target",
        str(target.config.name_or_path),
        "--data",
        str(data),
        "--quick",
        "--device",
        "cpu",
    ]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "bench"), "--max_new_tokens", "8"])
    assert result.exit_code == 0, result.output
    assert "Without --assistant or --layers the draft is text that was seen before." in result.output
    assert "cheaper draft" not in result.output
    assert re.search(r"\nnext      (assistant = |plain generate\(\), or a draft for this target: )", result.output)


def test_command(target: PreTrainedModel, tmp_path: Path) -> None:
    card = tmp_path / "speeds.json"
    some = ",".join(SOME)
    options = ("--max_new_tokens", "16", "--contestants", some, "--card", str(card), "--temperatures", "0,0.7")
    result = run_command(target, tmp_path, *options)
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100 or "Written to" in result.output
    assert "> " in result.output
    assert "Speculation" in result.output
    assert re.search(r"\nnext      (assistant\.speculation = SpeculationConfig\(|specdecpp train )", result.output)
    for noise in ("Loading weights", "[transformers]", "is deprecated"):
        assert noise not in result.output
    results = json.loads((tmp_path / "bench/results.json").read_text())
    assert results["replay_agreement"]["compared"] == results["replay_agreement"]["equal"] > 0
    assert results["environment"]["threads"] == 1
    assert not results["mismatches"]
    assert {(each["set"], each["temperature"]) for each in results["replays"]} == {
        ("questions", 0.0),
        ("questions", 0.7),
    }
    assert set(results["costs"]) == {"measured", "paper"}
    speeds = json.loads(card.read_text())
    assert {"command", "device", "dtype", "rows"} == set(speeds)
    fields = {"set", "temperature", "contestant", "tokens_per_second", "speedup", "interval", "same_passes",
              "same_passes_interval", "tokens_per_pass", "prompts"}  # fmt: skip
    assert all(set(row) == fields for row in speeds["rows"])
    assert len(speeds["rows"]) == 2 * len(some_contestants())
    assert {row["prompts"] for row in speeds["rows"]} == {2}
    text = (tmp_path / "bench/report.md").read_text()
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / "bench" / line.partition("(")[2][:-1]).is_file()
    assert "| oracle |" in text


def test_batches(target: PreTrainedModel, tmp_path: Path) -> None:
    options = ("--max_new_tokens", "12", "--contestants", "fixed 3,dyspec 4*,prompt*", "--temperatures", "0,0.7")
    alone = ("--no-replay", "--no-live", "--batch_size")
    result = run_command(target, tmp_path, *options, *alone, "1,2")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100 or "Written to" in result.output
    assert "rows in a batch: 2" in result.output
    found = json.loads((tmp_path / "bench/results.json").read_text())["batches"]
    contestants = {"plain", "plain, same passes", "fixed 3"}  # trees and transformers' own take single texts
    assert {(row["temperature"], row["size"], row["contestant"]) for row in found} == {
        (temperature, size, name) for temperature in (0.0, 0.7) for size in (1, 2) for name in contestants
    }
    assert {row["batches"] for row in found if row["size"] == 1} == {2}
    assert all(
        row["speedup"][0] == 1.0 and row["tokens_per_pass"] == 1.0 for row in found if row["contestant"] == "plain"
    )
    assert all(row["tokens_per_pass"] > 1.0 for row in found if row["contestant"] == "fixed 3")
    assert [row["different"] for row in found if row["temperature"] == 0.0] == [0] * 6
    assert "| greedy | 2 | fixed 3 |" in (tmp_path / "bench/report.md").read_text()
    lines = len((tmp_path / "bench/batches.jsonl").read_text().splitlines())
    assert run_command(target, tmp_path, *options, *alone, "1,2").exit_code == 0
    assert len((tmp_path / "bench/batches.jsonl").read_text().splitlines()) == lines == 18, "nothing is timed again"
    result = run_command(target, tmp_path, *options, *alone, "9")
    assert result.exit_code == 1, result.output
    assert "batch_size=9, and there are 2 prompts" in result.output


def test_batches_that_part_from_plain_generation_are_counted() -> None:
    rows = [
        {"temperature": 0.0, "size": 2, "batch": 0, "session": 1, "contestant": name, "seconds": seconds, "tokens": 4,
         "tokens_per_pass": 1.0, "disturbed": False, "texts": texts}
        for name, seconds, texts in (
            ("plain", 1.0, [[1, 2], [3, 4]]), ("plain, same passes", 0.8, [[1, 2], [3, 4]]),
            ("fixed 3", 0.5, [[1, 2], [3, 5]]),
        )
    ]  # fmt: skip
    ours, same, plain = summarise_batches(rows)
    assert (ours["contestant"], ours["different"]) == ("fixed 3", 1)
    assert (ours["speedup"][0], ours["same_passes"][0]) == pytest.approx((2.0, 1.6))
    assert plain["different"] == same["different"] == 0
    assert summarise_batches(rows[:1]) == [], "a session that was killed before its second baseline"


def test_padding_and_ends_of_rows() -> None:
    inputs = padded([[5, 6, 7], [8]])
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert until_end([1, 7, 0, 0], frozenset({7})) == [1, 7]
    assert until_end([1, 2], frozenset({7})) == [1, 2]


def test_a_conditioned_assistant_in_half_precision(target: PreTrainedModel, tmp_path: Path) -> None:
    reading = AutoModelForCausalLM.from_pretrained(str(target.config.name_or_path))
    SpecDecPPAssistant.from_conditioned(reading, [0]).save_pretrained(tmp_path / "assistant")
    options = ("--assistant", str(tmp_path / "assistant"), "--dtype", "bfloat16", "--temperatures", "0", "--no-replay")
    result = run_command(target, tmp_path, *options, "--max_new_tokens", "4", "--contestants", "fixed 2")
    assert result.exit_code == 0, result.output


def test_wrong_texts_fail_the_command(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification, "verify_greedy", lambda candidates, scores: (len(candidates), int(scores[-1].argmax()))
    )
    options = ("--max_new_tokens", "16", "--contestants", "fixed 3", "--temperatures", "0", "--no-replay")
    result = run_command(target, tmp_path, *options)
    assert result.exit_code == 1
    assert "fixed 3 left the text of plain generate() at token" in " ".join(result.output.split())
    assert "FAILED: not the texts of plain generate()" in result.output


def test_replays_alone(target: PreTrainedModel, tmp_path: Path) -> None:
    options = ("--max_new_tokens", "12", "--no-live", "--temperatures", "0,1", "--draws", "2", "--costs", "0.1")
    result = run_command(target, tmp_path, *options)
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench/results.json").read_text())
    assert results["costs"]["0.1"]["verify"] == [1.0]
    assert [(each["temperature"], each["texts"]) for each in results["replays"]] == [(0.0, 2), (1.0, 4)]
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "bench" / replaying.RECORDS).rglob("*.*")}
    assert len(files) == 2 + 2 + 2 + 4
    run_command(target, tmp_path, *options)
    assert {path: path.stat().st_mtime_ns for path in files} == files


def test_replays_of_rollouts(tmp_path: Path) -> None:
    training = training_run(tmp_path, tests=("sums", "tales"), temperatures=(1.0, 0.0))
    record = training.work / "rollouts/rollouts.json"
    record.write_text(json.dumps({"complete": True, "settings": {"top_k": 0, "max_new_tokens": 24}}))
    target = AutoModelForCausalLM.from_pretrained(training.target)
    tokenizer().save_pretrained(training.target)
    result = run_command(target, tmp_path, "--no-live", "--rollouts", str(training.work), "--costs", "paper")
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench/results.json").read_text())
    found = {(each["set"], each["temperature"]): each["texts"] for each in results["replays"]}
    assert found == {("sums", 0.0): 2, ("tales", 0.0): 2, ("sums", 1.0): 4, ("tales", 1.0): 4}
    report = (tmp_path / "bench/report.md").read_text()
    assert "texts of the rollouts" in report
    assert "same passes" not in report, "nothing was timed"
    assert "greedy texts were compared" not in report, "nothing was generated"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--temperatures", "hot"), "must be numbers such as"),
        (("--contestants", "nobody"), "No contestant is called"),
        (("--costs", "nowhere.json"), "a ratio such as 0.1, nor a file"),
        (("--rollouts", "nowhere"), "has no folder `rollouts`"),
    ],
)
def test_bad_options(target: PreTrainedModel, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    result = run_command(target, tmp_path, "--max_new_tokens", "4", *options)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


def test_assistants_with_models_of_their_own(target: PreTrainedModel, draft: str, tmp_path: Path) -> None:
    head = AcceptanceHead(32, num_blocks=1, inputs="before", rank=4)
    SpecDecPPAssistant.from_draft(draft, target, head=head).save_pretrained(tmp_path / "assistant")
    some = "transformers default,threshold 0.5*,throughput*"
    options = ("--max_new_tokens", "12", "--contestants", some, "--temperatures", "0", "--costs", "paper")
    result = run_command(target, tmp_path, *options, "--assistant", str(tmp_path / "assistant"))
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench/results.json").read_text())
    assert {"threshold (head)", "threshold (q)", "transformers"} <= {row["family"] for row in results["summary"]}
    assert {"threshold (head)", "threshold (q)"} <= {row["family"] for row in results["replays"][0]["rows"]}
    assert results["replay_agreement"]["compared"] == results["replay_agreement"]["equal"] == 2 * 2


@pytest.mark.slow
def test_half_precision(target: PreTrainedModel, tmp_path: Path) -> None:
    some = ("--contestants", "fixed 3,dyspec 8*", "--max_new_tokens", "16", "--dtype", "bfloat16")
    result = run_command(target, tmp_path, *some, "--no-replay")
    assert result.exit_code == 0, result.output
    result = run_command(target, tmp_path, *some, "--temperatures", "0", "--costs", "paper")
    assert result.exit_code == 0, result.output
    assert "bfloat16" in (tmp_path / "bench/report.md").read_text()
