"""`specdecpp bench` from end to end."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.enumeration.mutants import accept_everything
from support.files.repos import TEXT, save_model
from support.targets.models import tiny
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.benchmark.contestants import all_contestants, choose
from hf_specdecpp.benchmark.report import markdown
from hf_specdecpp.cli import app

SOME = ["plain", "fixed 3", "threshold 0.5 (q)", "dyspec 4*", "transformers default", "prompt lookup"]


def run_bench(target: PreTrainedModel, folder: Path, *options: str, draft: tuple[str, ...] = ("--layers", "1")) -> Any:
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in (TEXT, "w3 w9 w4 w2")))
    arguments = ["bench", "--target", str(target.config.name_or_path), *draft, "--data", str(data), *options]
    return CliRunner().invoke(app, [*arguments, "--output", str(folder / "bench"), "--device", "cpu", "--threads", "1"])


def test_no_assistant(target: PreTrainedModel, tmp_path: Path) -> None:
    """Candidates are looked up."""
    result = run_bench(target, tmp_path, "--quick", "--max_new_tokens", "8", draft=())
    assert result.exit_code == 0, result.output
    assert "draft: lookups in earlier text" in " ".join(result.output.split())
    assert "cheaper draft" not in result.output
    assert re.search(r"\n>[ *]\w", result.output)
    options = r"assist\(|assistant\.|plain generate\(\), or a draft for this target: "
    assert re.search(rf"\nnext      ({options})", result.output)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """One benchmark, single prompts and batches: its folder, with the speeds for a card, and its result."""
    folder = tmp_path_factory.mktemp("benchmark")
    target = AutoModelForCausalLM.from_pretrained(save_model(tiny("llama"), folder / "target"))
    options = ("--max_new_tokens", "16", "--contestants", ",".join(SOME), "--card", str(folder / "bench/speeds.json"))
    return folder / "bench", run_bench(target, folder, *options, "--temperatures", "0,0.7", "--batch_size", "2")


def test_the_output(ran: tuple[Path, Any]) -> None:
    _, result = ran
    assert result.exit_code == 0, result.output
    assert max(map(len, result.output.splitlines())) <= 100 or "Written to" in result.output
    assert re.search(r"\n(Speculation (makes this|hardly)|The measured speeds vary)", result.output), "a verdict"
    for said in ("greedy, batches of 2: 1", "contestant ", "best setting of each kind of contestant"):
        assert said in result.output
    assert re.search(r"\n>[ *]\w", result.output), "the fastest is marked"
    assert re.search(r"\nnext      (assistant\.speculation = |assist\(|specdecpp train )", result.output)
    for noise in ("Loading weights", "[transformers]", "is deprecated", "…"):
        assert noise not in result.output


def test_the_results(ran: tuple[Path, Any]) -> None:
    folder, _ = ran
    results = json.loads((folder / "results.json").read_text())
    assert results["environment"]["threads"] == 1
    assert not results["mismatches"]
    batches = [row for row in results["summary"] if row["batch"]]
    chains = ("plain", "plain, same passes", "fixed 3", "threshold 0.5 (q)")  # trees and others' take single texts
    assert {(row["set"], row["temperature"], row["contestant"]) for row in batches} == {
        ("batches of 2", temperature, name) for temperature in (0.0, 0.7) for name in chains
    }
    for row in batches:
        assert row["prompts"] == 1
        if row["contestant"] == "plain":
            assert row["plain"][0] == row["tokens_per_pass"] == 1.0
        elif row["contestant"] == "fixed 3":
            assert row["tokens_per_pass"] > 1.0


def test_the_speeds_of_a_card(ran: tuple[Path, Any]) -> None:
    folder, _ = ran
    speeds = json.loads((folder / "speeds.json").read_text())
    assert {"command", "device", "dtype", "rows"} == set(speeds)
    fields = {"set", "temperature", "contestant", "tokens_per_second", "speedup", "interval", "same_passes",
              "same_passes_interval", "tokens_per_pass", "prompts"}  # fmt: skip
    assert all(set(row) == fields for row in speeds["rows"])
    assert len(speeds["rows"]) == 2 * len(choose(all_contestants(has_head=False), SOME))
    assert {row["prompts"] for row in speeds["rows"]} == {2}


def test_the_report(ran: tuple[Path, Any]) -> None:
    folder, _ = ran
    report = (folder / "report.md").read_text()
    assert "| batches of 2 | " in report
    assert re.search(
        r"- \d+ greedy answers were compared with plain generate\(\); 0 of hf_specdecpp differ. 0 of \d+ differ", report
    )


@pytest.mark.parametrize(("products", "copies", "partly"), [
    ("own", False, False), ("float16", True, False), ("float16 (2 of 4 layers), own (2 of 4 layers)", True, True),
])  # fmt: skip
def test_the_report_says_which_layers_have_copies(
    products: str, copies: bool, partly: bool, ran: tuple[Path, Any]
) -> None:
    results = json.loads((ran[0] / "results.json").read_text())
    assert results["settings"]["products"] == "own", "the target has no large layers"
    results["settings"]["products"] = products
    assert ("keeps copies of the weights" in markdown(results)) is copies
    assert (f"Some layers have no copy: {products}. " in markdown(results)) is partly


def test_wrong_texts_fail_the_command(target: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_everything(monkeypatch)
    options = ("--max_new_tokens", "16", "--contestants", "fixed 3", "--temperatures", "0")
    result = run_bench(target, tmp_path, *options)
    assert result.exit_code == 1
    report = (tmp_path / "bench" / "report.md").read_text()
    assert re.search(r" [1-9]\d* of \d+ differ from plain generation with the same passes\.", report)
    assert "fixed 3 differs from plain generate() from token" in " ".join(result.output.split())
    assert "FAILED: answers differ from plain generate()" in result.output


@pytest.mark.parametrize(("options", "says"), [
    (("--temperatures", "hot"), "must be numbers such as"),
    (("--contestants", "nobody"), "No contestant matches"),
    (("--batch_size", "9"), "batch_size=9, but there are only 2 prompts"),
    (("--data", "elsewhere/questions.jsonl"), "need different names, which are those of their files. Rename"),
])  # fmt: skip
def test_bad_options(target: PreTrainedModel, tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    result = run_bench(target, tmp_path, "--max_new_tokens", "4", *options)
    assert result.exit_code == 1
    assert says in " ".join(result.output.split())


@pytest.mark.takes(4)
def test_assistants_with_models_of_their_own(target: PreTrainedModel, draft: str, tmp_path: Path) -> None:
    head = AcceptanceHead(32, num_blocks=1, inputs="before", rank=4)
    SpecDecPPAssistant.from_draft(draft, target, head=head).save_pretrained(tmp_path / "assistant")
    some = "transformers default,threshold 0.5*,throughput*"
    options = ("--max_new_tokens", "12", "--contestants", some, "--temperatures", "0")
    result = run_bench(target, tmp_path, *options, "--assistant", str(tmp_path / "assistant"))
    assert result.exit_code == 0, result.output
    results = json.loads((tmp_path / "bench/results.json").read_text())
    assert {"threshold (head)", "threshold (q)", "transformers"} <= {row["family"] for row in results["summary"]}


def test_a_smaller_model_as_the_assistant(target: PreTrainedModel, draft: str, tmp_path: Path) -> None:
    options = ("--max_new_tokens", "8", "--contestants", "fixed 3", "--temperatures", "0")
    result = run_bench(target, tmp_path, *options, draft=("--assistant", draft))
    assert result.exit_code == 0, result.output
    assert f"draft: {draft}" in (tmp_path / "bench" / "report.md").read_text()
