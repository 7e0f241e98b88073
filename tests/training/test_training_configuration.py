"""Settings of a training run that make no sense are refused before anything is loaded."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets", reason="needs the [train] extra")

from hf_specdecpp.training import trainers
from hf_specdecpp.training.configuration import TrainingConfig

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
    ({"draft_id": "org/draft"}, "draft_id='org/draft' names a draft of its own, but layers of the target"),
    ({"target_revision": "abc"}, "target_revision='abc' is a commit of target_id, which is not set. Set both"),
    ({"draft": "d", "draft_revision": "abc"}, "draft_revision='abc' is a commit of draft_id, which is not set"),
    ({"rollouts": {"heldout": 1.0}}, r"rollouts.heldout=1.0 must be between 0 and 1"),
    ({"rollouts": {"temperatures": []}}, r"rollouts.temperatures=\[\] must be a list of numbers of at least 0"),
    (
        {"rollouts": {"temperatures": [1.0, "hot"]}},
        r"temperatures=\[1.0, 'hot'\] must be a list, each item a number",
    ),
    ({"rollouts": {"temperatures": [1, 0.0, 1.0]}}, r"temperatures=\[1, 0.0, 1.0\] has one of them twice"),
    ({"rollouts": {"max_prompts": 1}}, "rollouts.max_prompts=1 must be a whole number of at least 2"),
    ({"rollouts": {"data": "prompts.jsonl"}}, "rollouts.data='prompts.jsonl' must be a list, each item text"),
    ({"seed": True}, "seed=True must be a whole number"),
    ({"layers": [0, "last"]}, r"layers=\[0, 'last'\] must be a whole number or a list, each item a whole number"),
    ({"head": 64}, "head=64 must be a mapping"),
    ({"distill": {"learning_rate": "fast"}}, "distill.learning_rate='fast' must be a number"),
    ({"distill": {"learning_rate": "nan"}}, "distill.learning_rate=nan must be a number"),
    ({"distill": {"bf16": "yes"}}, "distill.bf16='yes' must be true or false"),
    ({"distill": {"rank": 0}}, "distill.rank=0 must be a whole number of at least 1"),
    ({"rollouts": {"temperature": 1.0}}, "Unknown setting rollouts.temperature. rollouts takes .*temperatures"),
    ({"head": {"dropout": -0.1}}, "head.dropout=-0.1 must be at least 0 and under 1"),
    ({"speculation": {"treshold": 0.5}}, "Unknown setting speculation.treshold"),
    ({"speculation": {"threshold": 5}}, "threshold=5 must be between 0 and 1"),
    # What a kind of draft cannot do.
    ({"draft": "conditioned", "distill": {"enabled": False}}, "a conditioned draft has to be trained"),
    ({"draft": "eagle3", "distill": {"enabled": False}}, "enabled=False: the layer has to be trained.*draft=REPO"),
    ({"draft": "conditioned", "head": {"inputs": "after"}}, "Use head.inputs='before'"),
    ({"draft": "block"}, "draft='block': blocks are not trained .*published DFlash.*'conditioned' or draft='eagle3'"),
    ({"draft": "dflash", "distill": {"start_from": "org/draft"}}, "draft='dflash': blocks are not trained"),
    ({"distill": {"block_size": 8}}, "Unknown setting distill.block_size"),
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
