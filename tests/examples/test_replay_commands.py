"""`examples/replay/sweep.py` and `rounds.py` from end to end."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import rounds
import sweep
from support.files.repos import TEXT, head_for, tokenizer
from support.runs.training_files import training_run
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specdecpp.assistant import SpecDecPPAssistant


@pytest.fixture
def options(target: PreTrainedModel, tmp_path: Path) -> list[str]:
    """A target, an assistant with a head, two prompts and an output folder."""
    assistant = SpecDecPPAssistant.from_early_exit(target, 1, head=head_for(target, inputs="before"))
    assistant.save_pretrained(tmp_path / "assistant")
    data = tmp_path / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT, "w3 w9 w4 w2")))
    named = {"target": target.config.name_or_path, "assistant": tmp_path / "assistant", "output": tmp_path / "out"}
    words = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    return [*words, "--max_new_tokens", "12", "--threads", "1", "--data", str(data)]


def run(main: Any, words: list[str], folder: Path) -> tuple[dict[str, Any], str]:
    main(words)
    results = json.loads((folder / "out/results.json").read_text(encoding="utf-8"))
    return results, (folder / "out/report.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_sweep(options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [*options, "--draws", "2", "--costs", "paper", "--costs", "0.1"]
    monkeypatch.setattr(sys, "argv", ["examples/replay/sweep.py", *words])
    results, report = run(sweep.main, words, tmp_path)
    assert [(each["temperature"], each["texts"]) for each in results["replays"]] == [(0.0, 2), (1.0, 4)]
    families = {"oracle", "threshold (head)", "throughput (q)", "svip", "adaedl", "confidence", "fixed"}
    for each in results["replays"]:
        assert families <= {row["family"] for row in each["rows"]}
    assert report.count("| oracle |") == 2 * 2
    pictures = [line.partition("(")[2][:-1] for line in report.splitlines() if line.startswith("![")]
    assert [(tmp_path / "out" / picture).is_file() for picture in pictures] == [True, True]
    assert "python examples/replay/sweep.py --target" in report
    assert "same passes" not in report, "nothing was timed"
    made = [(tmp_path / "out" / name).read_text() for name in ("texts.jsonl", "records.jsonl")]
    assert [text.count("\n") for text in made] == [2 + 2, 2 + 4]
    run(sweep.main, words, tmp_path)
    again = [(tmp_path / "out" / name).read_text() for name in ("texts.jsonl", "records.jsonl")]
    assert again == made, "nothing is written or recorded again"


@pytest.mark.takes(4)
def test_rounds(options: list[str], tmp_path: Path) -> None:
    words = [*options, "--contestants", "fixed 3,dyspec 4 (q),throughput*"]
    results, report = run(rounds.main, words, tmp_path)
    found = {(row["temperature"], row["contestant"]) for row in results["round_replays"]}
    assert found == {(temperature, name) for temperature in (0.0, 1.0) for name in ("fixed 3", "dyspec 4 (q)")}
    assert len([line for line in report.splitlines() if line.startswith("| questions |")]) == 4


@pytest.mark.slow
def test_rollouts(options: list[str], tmp_path: Path) -> None:
    training = training_run(tmp_path, tests=("sums", "tales"), temperatures=(1.0, 0.0))
    record = training.work / "rollouts/rollouts.json"
    record.write_text(json.dumps({"complete": True, "settings": {"top_k": 0, "max_new_tokens": 24}}))
    target = AutoModelForCausalLM.from_pretrained(training.target)
    tokenizer().save_pretrained(training.target)
    SpecDecPPAssistant.from_early_exit(target, 1).save_pretrained(tmp_path / "other")
    words = [*options, "--target", str(training.target), "--assistant", str(tmp_path / "other")]
    results, _ = run(sweep.main, [*words, "--rollouts", str(training.work)], tmp_path)
    found = {(each["set"], each["temperature"]): each["texts"] for each in results["replays"]}
    assert found == {("sums", 0.0): 2, ("tales", 0.0): 2, ("sums", 1.0): 4, ("tales", 1.0): 4}


def test_costs_that_are_none() -> None:
    assert sweep.costs_of("0.1").verify == (1.0,)
    with pytest.raises(SystemExit, match="neither `paper` nor a ratio"):
        sweep.costs_of("hot")


def test_drafts_that_read_the_target_are_not_recorded(target: PreTrainedModel, options: list[str]) -> None:
    folder = options[options.index("--assistant") + 1] + "-conditioned"
    SpecDecPPAssistant.from_conditioned(target, 1).save_pretrained(folder)
    with pytest.raises(SystemExit, match="one q a place"):
        sweep.main([*options, "--assistant", folder])
