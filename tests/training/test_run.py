"""`specdecpp train` from prompts to a repository, on a tiny model, through the command line."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from support.files.repos import WORDS, greedy, save_model
from support.runs.distillation_files import adapter_of, prepare, report_of
from support.runs.hub_server import HubServer, point_client_at
from support.targets.models import tiny
from transformers import AutoModelForCausalLM, Trainer
from typer.testing import CliRunner

import hf_specdecpp
from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.cli import app
from hf_specdecpp.texts import answers
from hf_specdecpp.training import recorded_chains, trainers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.targets import LocalTarget

CONFIGS = Path(hf_specdecpp.__file__).parent / "training" / "accelerate_configs"
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
SCRIPT = Path(__file__).parents[1] / "support" / "runs" / "distillation_files.py"
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
    monkeypatch.setattr(recorded_chains, "STARTS", 3)
    with HubServer() as hub:
        point_client_at(monkeypatch, hub, tmp_path / "cache", token="hf_x")
        result = CliRunner().invoke(app, [*arguments, "--push_to_hub", "tester/trained"])
        assert result.exit_code == 0, result.output
        uploaded = hub.files("tester/trained")
    assert not unfinished.exists()
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
    assert f"kept in {tmp_path / 'out-work'}: run the same command to continue" in result.output
    assert [path.name for path in (tmp_path / "out-work" / "rollouts").iterdir()] == ["rollouts.json"]


@pytest.mark.slow
def test_two_processes(tmp_path: Path, arguments: list[str]) -> None:
    """Every stage knows that it has a sibling: shards are shared, one repository comes out, and it works."""
    program = [*LAUNCH, str(CONFIGS / "multi_gpu.yaml"), "--num_processes", "2", "-m", "hf_specdecpp", *arguments]
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
    (["--stage", "card"], "'calibrate' and 'eval'"),
    (["--layers", "x"], "must be a number such as 4"),
    (["--data", "/nowhere.jsonl"], "nowhere.jsonl"),
    (["--layers", "50"], "layers=50 must be a number from 1 to"),
    (["--target", "/nowhere"], "There is no folder '/nowhere', and it cannot be a Hub id"),
    (["--draft", "OTHER"], "different tokenizers"),
    (["--target", ""], "Pass --target"),
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


# Distillation in several processes gives what one with as many gradient accumulation steps gives. --------------------


def launch(config: TrainingConfig, folder: Path, name: str) -> None:
    """Run with a shipped config. Without GPUs the same processes talk gloo."""
    described = folder / "run.json"
    described.write_text(json.dumps(asdict(config)))
    command = [*LAUNCH, str(CONFIGS / f"{name}.yaml"), "--main_process_port", "0", str(SCRIPT), str(described)]
    path = os.pathsep.join((str(SCRIPT.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("'eval_all/acceptance'") == 1, "one process reports"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["independent", "early_exit"])
def test_two_processes_distil_as_one(tmp_path: Path, kind: str) -> None:
    """Two gloo processes see batches 0, 2, ... and 1, 3, ... of the order in which one process takes two a step.

    Rounding differs (gradients are added in another order) and Adam divides by small numbers, so the weights, which
    move by up to 0.02, may differ by 1e-3, a fifth of the learning rate; in float16 they resolve 2e-4 or less."""
    single = prepare(tmp_path / "single", kind, epochs=1, gradient_accumulation_steps=2)
    distillation.run(single)
    double = prepare(tmp_path / "double", kind, epochs=1)
    launch(double, tmp_path, "multi_gpu")
    moved = 0.0
    for name, tensor in adapter_of(single).items():
        torch.testing.assert_close(adapter_of(double)[name].float(), tensor.float(), rtol=0, atol=1e-3, msg=name)
        if "lora_B" in name:  # begins at zero
            moved = max(moved, float(tensor.abs().max()))
    assert moved > 0.01
    reports = [report_of(config) for config in (single, double)]
    assert reports[0]["steps"] == reports[1]["steps"] == 8
    for stage in ("before", "after"):
        assert reports[1][stage]["all"] == pytest.approx(reports[0][stage]["all"], abs=1e-3)


@pytest.mark.parametrize("name", ["single_gpu", "multi_gpu", "fsdp"])
def test_shipped_configs_are_understood(name: str) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(CONFIGS / f"{name}.yaml"))
    assert config.distributed_type == {"single_gpu": "NO", "multi_gpu": "MULTI_GPU", "fsdp": "FSDP"}[name]
    assert "mixed_precision" not in yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), "the run's own setting"


# Settings that make no sense are refused before anything is loaded. ------------------------------------------------


PUBLISHED_BLOCK: dict[str, Any] = {"draft": "block", "distill": {"enabled": False, "start_from": "org/draft"}}


def settings(**changes: Any) -> TrainingConfig:
    """Nested settings, as a YAML file has them."""
    values = {"target": "org/target", "output": "out", **changes}
    values["rollouts"] = {"data": ["prompts.jsonl"], **values.get("rollouts", {})}
    return TrainingConfig.from_dict(values)


@pytest.mark.parametrize("changes", [
    {},
    {"dtype": "bfloat16", "target_id": "org/target", "target_revision": "abc"},
    {"draft": "/models/draft", "draft_id": "org/draft"},
    {"rollouts": {"temperatures": [0, 0.7, 1.2], "max_prompts": 2}},
    {"distill": {"learning_rate": "2e-4", "epochs": 2}, "report_to": ["tensorboard", "trackio"]},
    {"evaluation": {"data": ["a.jsonl"], "max_prompts": 1}},
])  # fmt: skip
def test_sensible_settings(changes: dict[str, Any]) -> None:
    config = settings(**changes)
    config.validate()
    assert TrainingConfig.from_dict(asdict(config)) == config


@pytest.mark.parametrize(("changes", "message"), [
    ({"target": ""}, "needs target. Pass --target"),
    ({"rollouts": {"data": []}}, "needs prompts. Pass --data"),
    ({"dtype": "float8"}, "dtype='float8' must be one of auto, bfloat16, float32"),
    ({"draft_id": "org/draft"}, "draft_id='org/draft' names an independent draft, but layers of the target"),
    ({"target_revision": "abc"}, "target_revision='abc' is a commit of target_id, which is not set. Set both"),
    ({"draft": "d", "draft_revision": "abc"}, "draft_revision='abc' is a commit of draft_id, which is not set"),
    ({"rollouts": {"heldout": 1.0}}, r"rollouts.heldout=1.0 must be between 0 and 1"),
    (
        {"rollouts": {"temperatures": [1.0, "hot"]}},
        r"temperatures=\[1.0, 'hot'\] must be a list, each item a number",
    ),
    ({"rollouts": {"temperatures": [1, 0.0, 1.0]}}, r"temperatures=\[1, 0.0, 1.0\] has a temperature twice"),
    ({"rollouts": {"max_prompts": 1}}, "rollouts.max_prompts=1 must be a whole number of at least 2"),
    ({"rollouts": {"data": "prompts.jsonl"}}, "rollouts.data='prompts.jsonl' must be a list, each item text"),
    ({"layers": [0, "last"]}, r"layers=\[0, 'last'\] must be a whole number or a list, each item a whole number"),
    ({"head": 64}, "head=64 must be a HeadConfig"),
    ({"distill": {"learning_rate": "nan"}}, "distill.learning_rate=nan must be a number"),
    ({"distill": {"bf16": "yes"}}, "distill.bf16='yes' must be true or false"),
    ({"rollouts": {"temperature": 1.0}}, "Unknown setting rollouts.temperature. rollouts takes .*temperatures"),
    ({"head": {"dropout": -0.1}}, "head.dropout=-0.1 must be at least 0 and under 1"),
    ({"speculation": {"treshold": 0.5}}, "Unknown setting speculation.treshold"),
    # What a kind of draft cannot do.
    ({"draft": "conditioned", "distill": {"enabled": False}}, "a conditioned draft has to be trained"),
    ({"draft": "eagle3", "distill": {"enabled": False}}, "enabled=False: the layer has to be trained.*draft=REPO"),
    ({"draft": "conditioned", "head": {"inputs": "after"}}, "Use head.inputs='before'"),
    ({"draft": "block"}, "draft='block': blocks are not trained .*published DFlash.*'conditioned' or draft='eagle3'"),
    ({"draft": "dflash", "distill": {"start_from": "org/draft"}}, "draft='dflash': blocks are not trained"),
    ({**PUBLISHED_BLOCK, "head": {"inputs": "after"}}, "head.inputs='after' judges the state at a candidate"),
    ({**PUBLISHED_BLOCK, "distill": {**PUBLISHED_BLOCK["distill"], "draft_vocab_size": 40}}, "40: a block has .*Leave"),
])  # fmt: skip
def test_senseless_settings(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**changes).validate()


@pytest.mark.parametrize("name", ["tensorflow", ["none", "tensorflow"]])
def test_missing_trackers(name: str | list[str]) -> None:
    with pytest.raises(ValueError, match="report_to=.*'tensorflow'.* is not supported, only .*tensorboard"):
        trainers.check_trackers(name)


def test_logs_outlive_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer's TensorBoard callback reads the variable when it is made."""
    monkeypatch.delenv(trainers.LOG_FOLDER, raising=False)
    with trainers.logging_to(tmp_path):
        assert os.environ[trainers.LOG_FOLDER] == str(tmp_path)
    assert trainers.LOG_FOLDER not in os.environ
    monkeypatch.setenv(trainers.LOG_FOLDER, "theirs")
    with trainers.logging_to(tmp_path):
        assert os.environ[trainers.LOG_FOLDER] == "theirs"
