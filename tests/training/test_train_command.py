"""`specdecpp train` from prompts to a repository, on a tiny model, through the command line."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from support.hub_server import HubServer, point_client_at
from support.models import tiny
from support.repos import WORDS, greedy, save_model
from transformers import AutoModelForCausalLM, Trainer
from typer.testing import CliRunner

import hf_specdecpp
from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.texts import answers
from hf_specdecpp.training import chains
from hf_specdecpp.training.targets import LocalTarget

SETTINGS = {
    "rollouts": {"max_new_tokens": 16, "batch_size": 8, "shard_size": 8, "heldout": 0.4, "top_k": 0},
    "distill": {"rank": 2, "batch_size": 2, "draft_vocab_size": 30},
    "head": {"num_blocks": 1, "rank": 4, "epochs": 1.0, "batch_size": 8},
}


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A target, twenty prompts and settings on disk."""
    target = save_model(tiny("llama").float(), tmp_path / "target")
    prompts = [{"prompt": " ".join(WORDS[1 + (i * 7 + j) % 40] for j in range(4))} for i in range(20)]
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(map(json.dumps, prompts)))
    settings = tmp_path / "settings.yaml"
    settings.write_text(yaml.safe_dump(SETTINGS))
    return [
        "train", "--target", target, "--data", str(data), "--output", str(tmp_path / "out"), "--layers", "1",
        "--config", str(settings),
    ]  # fmt: skip


@pytest.mark.apart
def test_from_prompts_to_a_repository(tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished = tmp_path / "out-work" / "features" / "train-00000.safetensors.123.tmp"  # of a run that was killed
    unfinished.parent.mkdir(parents=True)
    unfinished.touch()
    monkeypatch.setattr(chains, "STARTS", 3)
    with HubServer() as hub:
        point_client_at(monkeypatch, hub, tmp_path / "cache", token="hf_x")  # noqa: S106
        result = CliRunner().invoke(app, [*arguments, "--push_to_hub", "tester/trained"])
        assert result.exit_code == 0, result.output
        uploaded = hub.files("tester/trained")
    assert not unfinished.exists()
    assert "{'" not in result.output, "what a Trainer logs is a line, no dictionary"
    assert re.search(r"^epoch [\d.]+: loss [\d.]+, learning rate [\de.-]+$", result.output, flags=re.MULTILINE)
    check_the_summary(result.output, tmp_path)
    for path in (tmp_path / "out").rglob("*"):
        if path.is_file():
            assert str(tmp_path).encode() not in path.read_bytes(), f"{path.name} names a folder of this machine"
    target = AutoModelForCausalLM.from_pretrained(arguments[2])
    assistant = SpecDecPPAssistant.from_pretrained(tmp_path / "out", target=target)
    assert greedy(target, assistant) == greedy(target)
    assert assistant.head is not None
    assert set(assistant.head.calibration) == {"sampled", "greedy"}
    assert assistant.parts.draft_vocab is not None
    assert len(assistant.parts.draft_vocab) <= 30
    assert 0 < assistant.speculation.threshold < 1

    card = ModelCard((tmp_path / "out" / "README.md").read_text())
    here = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert set(uploaded) - {".gitattributes"} == here
    assert uploaded["README.md"].decode() == card.content.replace("THIS_REPO", "tester/trained")

    # Again: every stage finds what it has done, and the weights are not touched.
    def train_again(*_: Any, **__: Any) -> None:
        raise AssertionError("trained twice")

    monkeypatch.setattr(Trainer, "train", train_again)
    weights = (tmp_path / "out" / "acceptance_head.safetensors").read_bytes()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert (tmp_path / "out" / "acceptance_head.safetensors").read_bytes() == weights


def check_the_summary(output: str, folder: Path) -> None:
    """What was made, how good it is, and the next steps; no bars of loading, no warnings of libraries."""
    report = json.loads((folder / "out-work" / "evaluation" / "evaluation.json").read_text())
    lines = [line for line in output.splitlines() if line.strip()][-5:]
    assert lines[0].startswith(f"{folder / 'out'}: layer 0 of the target")
    assert f"{report['sets']['heldout']['1']['mean_acceptance']:.3f} of a candidate" in lines[1]
    assert f"assist(model, '{folder / 'out'}'); model.generate(**inputs)" in lines[2]
    assert "--stage card --push_to_hub" in lines[3]
    assert re.match(r"uploaded +http.*/tester/trained/commit/", lines[4])
    for noise in ("Loading weights", "Generating train split", "Warning", "mtime"):
        assert noise not in output


def test_ctrl_c_says_how_to_go_on(tmp_path: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    answer = LocalTarget._answer

    def interrupted(*given: Any) -> Any:
        for number, result in enumerate(answer(*given)):
            if number == 3:
                raise KeyboardInterrupt
            yield result

    monkeypatch.setattr(LocalTarget, "_answer", interrupted)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 130
    assert f"kept in {tmp_path / 'out-work'}: run the same command to go on" in result.output
    assert [path.name for path in (tmp_path / "out-work" / "rollouts").iterdir()] == ["rollouts.json"]


@pytest.mark.slow
def test_two_processes(tmp_path: Path, arguments: list[str]) -> None:
    """Every stage knows that it has a sibling: shards are shared, one repository comes out, and it works."""
    configs = Path(hf_specdecpp.__file__).parent / "training" / "accelerate_configs"
    launch = ["--config_file", str(configs / "multi_gpu.yaml"), "--num_processes", "2", "-m", "hf_specdecpp"]
    program = [sys.executable, "-m", "accelerate.commands.launch", *launch, *arguments]
    result = subprocess.run(program, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stderr.count("eval: ") == 1
    alone = [*arguments, "--stage", "rollouts", "--output", str(tmp_path / "alone")]
    assert CliRunner().invoke(app, alone).exit_code == 0
    for split in ("train", "heldout"):
        shared, expected = (list(answers.load(tmp_path / name, split)) for name in ("out-work", "alone-work"))
        assert shared == expected
    target = AutoModelForCausalLM.from_pretrained(arguments[2])
    assert greedy(target, SpecDecPPAssistant.from_pretrained(tmp_path / "out", target=target)) == greedy(target)


@pytest.mark.parametrize(("extra", "says"), [
    (["--stage", "cook"], "Unknown stage 'cook'"),
    (["--stage", "card"], "run the stages"),
    (["--layers", "x"], "must be a number such as 4"),
    (["--data", "/nowhere.jsonl"], "nowhere.jsonl"),
    (["--layers", "50"], "layers=50 must be a number from 1 to"),
    (["--target", "/nowhere"], "'/nowhere' cannot be loaded: it must be a folder or a Hub id"),
    (["--draft", "/nowhere"], "'/nowhere' cannot be loaded"),
    (["--draft", "OTHER"], "different tokenizers"),
    (["--target", ""], "Pass --target"),
    ("rollout: 1", "Unknown setting rollout"),
    ("head: {rnk: 1}", "head.rnk"),
    ("[1", "not valid YAML"),
    ("3", "int"),
])  # fmt: skip
def test_mistakes_are_one_line(tmp_path: Path, arguments: list[str], extra: list[str] | str, says: str) -> None:
    """In arguments or in the file of settings; models are checked before the rollouts."""
    if isinstance(extra, str):
        (tmp_path / "settings.yaml").write_text(extra)
        extra = []
    other = save_model(tiny("llama"), tmp_path / "other", words=[WORDS[0], *WORDS[:0:-1]])
    result = CliRunner().invoke(app, [*arguments, *[other if word == "OTHER" else word for word in extra]])
    assert result.exit_code == 1
    assert says in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out-work").exists()
