"""`specdecpp demo` on a tiny model: equal answers, speeds in CPU time, a picture, clean errors."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.enumeration.mutants import accept_everything
from support.files.repos import save_model
from support.targets.models import tiny
from typer.testing import CliRunner, Result

from hf_specdecpp.assistant_model import AssistantModel
from hf_specdecpp.cli import app
from hf_specdecpp.terminal import demo
from hf_specdecpp.texts.prompts import read_prompts
from hf_specdecpp.throughput.memory import LearnedOfLookups

ARGUMENTS = ["--layers", "1", "--max-new-tokens", "12", "--prompt", "w1 w2 w3", "--prompt", "w4"]
GAIN = re.compile(r"(\d+\.\d\d) times as fast as plain generate\(\), in CPU time")


@pytest.fixture
def target(tmp_path: Path) -> str:
    return save_model(tiny("llama").float(), tmp_path / "target")


def show(target: str, *options: str, exit_code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["demo", "--target", target, *options])
    assert result.exit_code == exit_code, result.output
    return result


def last_number(output: str) -> float:
    """The number of the last line, which has no other."""
    found = GAIN.fullmatch(output.splitlines()[-1])
    assert found is not None, output
    return float(found[1])


def test_demo_compares_and_reports(target: str) -> None:
    output = show(target, *ARGUMENTS).output
    for part in ("question 1: w1 w2 w3", "question 2: w4", "layer 0 of the target", "float32 on cpu", "by the clock"):
        assert part in output
    assert output.count("equal: all 12 tokens") == 2
    assert output.splitlines()[-2] == f"Measure more: specdecpp bench --target {target} --layers 1 --quick"
    assert last_number(output) > 0
    assert "Loading weights" not in output


def test_without_an_assistant_candidates_are_looked_up(target: str) -> None:
    output = show(target, "--max-new-tokens", "4").output
    assert "assistant  lookups in earlier text\n" in output
    for each in read_prompts(str(demo.QUESTIONS)):
        assert f"{each.id}: {each.messages[0]['content']}\n" in output
        assert re.search(rf"^ *{each.id} +4( +\d+\.\d\d){{3}} *$", output, flags=re.MULTILINE)


def spending(monkeypatch: pytest.MonkeyPatch, *, plain: float, assisted: float, waiting: float) -> list[Any]:
    """Let each answer take these seconds of the processor, and `waiting` seconds more by the clock; the assistants (or
    `None`) that `generate()` is called with, in order."""
    spent, waited, called = [0.0], [0.0], list[Any]()
    load = demo.load_model

    def loaded(name: str) -> Any:
        model = load(name)
        generate = model.generate

        def call(*arguments: Any, **named: Any) -> Any:
            called.append(named["assistant_model"])
            spent[0] += plain if called[-1] is None else assisted
            waited[0] += waiting
            return generate(*arguments, **named)

        model.generate = call
        return model

    monkeypatch.setattr(demo, "load_model", loaded)
    clocks = SimpleNamespace(process_time=lambda: spent[0], perf_counter=lambda: spent[0] + waited[0])
    monkeypatch.setattr(demo, "time", clocks)
    return called


def test_speeds_go_by_the_processor_in_turns(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain and assisted answers alternate, the first call of each is not counted, and what other programs take does
    not change the last line."""
    called = spending(monkeypatch, plain=3.0, assisted=1.0, waiting=2.0)
    output = show(target, *ARGUMENTS).output
    assert [each is None for each in called] == [True, False] * 5
    assert last_number(output) == 3.0
    assert re.search(r"question 1 +12 +\d\.\d\d +3\.00 +1\.67 *$", output, flags=re.MULTILINE)
    assert "plain 12 tokens in 3.00 s, 4.0 tokens/s; assisted 12 tokens in 1.00 s, 12.0 tokens/s" in output


def test_nothing_is_learned_from_the_same_answer_before(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both assisted answers to a question begin with an empty memory."""
    found, answer, key = list[bool](), demo.Demo._answer, ("from the answer before",)

    def noted(self: demo.Demo, *how: Any) -> Any:
        memory = self.assistant.memory
        memory.lookups[self.model] = {key: LearnedOfLookups()}
        made = answer(self, *how)
        found.append(key in memory.lookups.get(self.model, {}))
        return made

    monkeypatch.setattr(demo.Demo, "_answer", noted)
    show(target, *ARGUMENTS)
    assert found == [False] * 10


def test_copies_of_weights_are_waited_for_first(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    warm_up, answer = AssistantModel.warm_up, demo.Demo._answer

    def noted(name: str, method: Any) -> Any:
        def call(*arguments: Any) -> Any:
            order.append(name)
            return method(*arguments)

        return call

    monkeypatch.setattr(AssistantModel, "warm_up", noted("warm up", warm_up))
    monkeypatch.setattr(demo.Demo, "_answer", noted("answer", answer))
    show(target, *ARGUMENTS)
    assert order == ["warm up"] + ["answer"] * 10


@pytest.mark.usefixtures("assumed_costs")
def test_demo_fails_when_an_answer_differs(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison is real: with a verifier that accepts everything, the demo says so and exits with 1."""
    accept_everything(monkeypatch)
    output = show(target, *ARGUMENTS, exit_code=1).output
    assert re.search(r"different from token \d+ on: plain 'w\d+', assisted 'w\d+'", " ".join(output.split()))
    assert "answers differ: please report this." in output
    assert "times as fast as" not in output


@pytest.mark.parametrize("is_tied", [True, False])
def test_rounding_excuses_near_ties_alone(is_tied: bool, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"place": 2, "tokens": [5, None], "near_tie": is_tied}
    monkeypatch.setattr(demo, "explain_parting", lambda *_: found)
    accept_everything(monkeypatch)
    output = show(target, *ARGUMENTS, exit_code=0 if is_tied else 1).output
    assert "different from token 2 on: plain 'w5', assisted the end" in output
    assert ("nearly tied, and float32 rounds either way" in output) == is_tied


def test_brackets_are_printed_as_they_are(target: str) -> None:
    """rich would take them for markup: a prompt with a closing tag is an error."""
    output = show(target, *ARGUMENTS[:4], "--prompt", "w1 [/INST]", "--prompt", "[bold red]w2").output
    assert "question 1: w1 [/INST]\n" in output
    assert "question 2: [bold red]w2\n" in output


def test_demo_shows_a_tree_and_writes_no_file(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    output = show(target, *ARGUMENTS, "--tree").output
    assert output.count("equal: all 12 tokens") == 2
    for part in ("The most branched tree", "draft passes", "a=0."):
        assert part in output
    assert list(here.iterdir()) == []


def test_demo_draws_the_last_answer(target: str, tmp_path: Path) -> None:
    file = tmp_path / "demo.svg"
    output = show(target, *ARGUMENTS, "--svg", str(file)).output
    assert f"Picture of the last answer: {file}" in output
    svg = file.read_text(encoding="utf-8").replace("&#160;", " ")
    assert "<title>w4: 12 tokens in " in svg
    assert svg.count("12 tokens in") == 4  # the title has both speeds, and so have the panes
    answer = output.split("question 2: w4\n")[1].splitlines()[1].split()
    shown = " ".join(re.findall(r">([^<]*)</text>", svg)).split()
    assert all(shown.count(word) >= 2 * answer.count(word) for word in answer)
    assert "target, float32 on cpu" in svg
    assert str(tmp_path) not in svg
