"""Generations with multi-token layers of every family; what all drafts do is in `tests/drafts/test_contract.py`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import prompt
from support.mtp_files import FAMILIES, HIDDEN, HYBRID, VOCAB, Files, dense
from support.repos import WORDS, tokenizer
from transformers.generation import candidate_generator
from typer.testing import CliRunner, Result

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig, assist
from hf_specdecpp.cli import app
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.mtp.model import MtpDraft
from hf_specdecpp.estimation.estimators import DraftProbability
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.throughput.known_costs import Rounds

TEXT = 1 + prompt(9) % (VOCAB - 1)
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 5}
DYSPEC: dict[str, Any] = {"rule": "threshold", "tree": "dyspec", "tree_budget": 8}


def check_equal(target: CausalLM, assistant: SpecDecPPAssistant) -> None:
    how: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    expected = target.generate(TEXT, **how)
    assert torch.equal(target.generate(TEXT, assistant_model=assistant, **how), expected)
    assert assistant.stats.drafted > 0


def assisted(target: CausalLM, **settings: Any) -> SpecDecPPAssistant:
    return assist(target, "mtp", speculation=SpeculationConfig(**(settings or FIXED)), default=False)


@pytest.mark.parametrize("num_layers", [1, 3])
def test_they_draft_further_than_there_are_layers(num_layers: int, tmp_path: Path) -> None:
    target = dense(num_layers).load(tmp_path)
    assistant = assisted(target)
    assert type(assistant.drafter) is (Drafter if num_layers == 1 else MtpDraft)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0
    assert len(assistant.stats.drafted_at) == 5
    described = Rounds(target, assistant.drafter, assistant.head or DraftProbability(), 4).conditions()
    assert described["reads"] == {"multi_token": True, "hidden_size": HIDDEN}
    assert described.get("multi_token_layers", 1) == num_layers


@pytest.mark.every(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_every_family(family: str, tmp_path: Path) -> None:
    """In chains; and in trees, where the target reads trees."""
    target = Files(family, seed=1).load(tmp_path)
    assistant = assisted(target)
    check_equal(target, assistant)
    assert assistant.stats.accepted > 0
    if family not in HYBRID:
        assistant.speculation = SpeculationConfig(**DYSPEC)
        check_equal(target, assistant)
        assert assistant.stats.accepted > 0


# Refused, and left alone. ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(
    not hasattr(candidate_generator, "MTPCandidateGenerator"), reason="this transformers has no use_mtp to refuse"
)
def test_transformers_own_is_left_alone_but_not_mixed_in(tmp_path: Path) -> None:
    target = Files("glm4_moe", seed=1).load(tmp_path)
    assistant = assisted(target)
    how: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with pytest.raises(ValueError, match="use_mtp=True is transformers' own speculation.*assist"):
        target.generate(TEXT, assistant_model=assistant, use_mtp=True, **how)
    assert torch.equal(target.generate(TEXT, use_mtp=True, **how), target.generate(TEXT, **how))
    assert assistant.stats.rounds == 0


# `--mtp`: the commands draft with the target's own multi-token layers. ------------------------------------------------


QUICK = ["--max_new_tokens", "8"]


@pytest.fixture
def target(tmp_path: Path) -> str:
    folder = dense(dtype=torch.float32).save(tmp_path / "target")
    tokenizer(WORDS[:VOCAB]).save_pretrained(folder)
    return str(folder)


def run(*arguments: str, said: str | None = None) -> Result:
    return CliRunner().invoke(app, list(arguments), input=said)


@pytest.mark.parametrize(
    ("options", "note"),
    [(("--mtp",), ""), (("--mtp", "--lookup"), ""), ((), " (without --assistant or --layers)")],
    ids=["alone", "with lookups", "by default"],
)
def test_demo(target: str, options: tuple[str, ...], note: str) -> None:
    result = run("demo", "--target", target, *options, *QUICK, "--prompt", "w1 w2 w3")
    assert result.exit_code == 0, result.output
    assert f"assistant  multi-token layers of {target}{note}\n" in result.output
    assert "equal: all 8 tokens" in result.output
    assert f"specdecpp bench --target {target} --mtp --quick" in result.output
    assert "use it      assist(model, 'mtp'); model.generate(...)" in result.output


def test_chat(target: str) -> None:
    result = run("chat", "--target", target, "--mtp", *QUICK, "--temperature", "0", said="w1 w2 w3\n")
    assert result.exit_code == 0, result.output
    assert f"assistant  multi-token layers of {target}\n" in result.output
    assert result.output.splitlines()[-1] == f"measure it  specdecpp bench --target {target} --mtp --quick"


@pytest.mark.parametrize("options", [("--mtp",), ()], ids=["asked for", "by default"])
def test_bench(target: str, tmp_path: Path, options: tuple[str, ...]) -> None:
    (tmp_path / "questions.jsonl").write_text(json.dumps({"prompt": "w1 w2 w3"}))
    result = run(
        "bench", "--target", target, *options, *QUICK, "--data", str(tmp_path / "questions.jsonl"), "--temperatures",
        "0", "--contestants", "plain,fixed 3", "--output", str(tmp_path / "bench"), "--device", "cpu",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert not json.loads((tmp_path / "bench" / "results.json").read_text())["mismatches"]
    assert f"multi-token layers of {target}" in (tmp_path / "bench" / "report.md").read_text()
    said = f"Without --assistant or --layers the draft is multi-token layers of {target}."
    assert (said in result.output) is not bool(options)


@pytest.mark.parametrize("command", ["demo", "chat", "bench"])
def test_beside_an_assistant(command: str) -> None:
    """Before anything is loaded."""
    result = run(command, "--target", "none", "--mtp", "--assistant", "org/assistant")
    assert result.exit_code == 1
    assert "--mtp takes no assistant, and --assistant names 'org/assistant'" in result.output


def test_bench_without_a_draft() -> None:
    result = run("bench", "--target", "none", "--mtp", "--lookup")
    assert result.exit_code == 1
    assert "--lookup takes neither --mtp nor an assistant" in result.output


@pytest.mark.parametrize("command", ["demo", "chat", "bench"])
def test_a_target_without_such_layers(command: str, tmp_path: Path) -> None:
    folder = dense(dtype=torch.float32).save(tmp_path / "target", with_layers=False)
    tokenizer(WORDS[:VOCAB]).save_pretrained(folder)
    result = run(command, "--target", str(folder), "--mtp")
    assert result.exit_code == 1
    assert "multi-token layers" in result.output
