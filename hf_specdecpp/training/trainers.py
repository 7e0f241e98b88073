"""Processes, trackers, checkpoints, shards, and records of results, for all stages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import patch_environment
from torch import Tensor
from transformers import TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks
from transformers.utils import logging

from hf_specdecpp.files import differences, read_json, save_tensors, save_text
from hf_specdecpp.training.configuration import DistillConfig, HeadConfig, TrainingConfig

logger = logging.get_logger("hf_specdecpp")
LOGS, LOG_FOLDER = "logs", "TENSORBOARD_LOGGING_DIR"  # folder, and environment variable that Trainer's callback reads


def process_state() -> PartialState:
    """Return accelerate's state of this process. On a CPU, accelerate finds other processes only with `cpu=True`."""
    return PartialState(cpu=not torch.accelerator.is_available())


def check_trackers(report_to: str | list[str]) -> None:
    """Raise `ValueError` if Trainer does not know a tracker, or it is not installed. Called before the rollouts."""
    try:
        for callback in get_reporting_integration_callbacks(report_to):
            callback()
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"report_to={report_to!r} cannot be used: {error} Install the tracker, or name another."
        ) from None


def logging_to(folder: Path) -> AbstractContextManager[None]:
    """A context in which Trainers log for TensorBoard in `folder`, which stays when the checkpoints are deleted."""
    return patch_environment(**{LOG_FOLDER: os.environ.get(LOG_FOLDER, str(folder))})


def training_arguments(
    config: TrainingConfig, section: DistillConfig | HeadConfig, checkpoints: Path, **own: Any
) -> TrainingArguments:
    """Return Trainer's arguments: defaults of the stages `distill` and `head`, settings in `section`, and `own`."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=section.batch_size,
        per_device_eval_batch_size=section.batch_size,
        num_train_epochs=section.epochs,
        learning_rate=section.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # a share of all steps
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        report_to=config.report_to,
        seed=config.seed,
        **own,
    )


def last_checkpoint(folder: Path) -> str | None:
    """The latest complete checkpoint in `folder`, or `None`. Trainer writes `trainer_state.json` last."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None


# Records --------------------------------------------------------------------------------------------------------------


class Record:
    """A JSON file with the settings and the result of a stage.

    Args:
        settings: all settings that the result depends on, as JSON types.
        made: files and folders of the stage, which `begin` deletes if the settings have changed.
    """

    def __init__(self, path: Path, settings: dict[str, Any], made: Sequence[Path] = ()) -> None:
        self.path, self.made = path, made
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # a tuple would not equal the list read back

    def result(self) -> dict[str, Any] | None:
        """The record of a finished run with the same settings; otherwise `None`."""
        found = self._read()
        return found if found.get("complete") and found.get("settings") == self.settings else None

    def changes(self) -> list[str]:
        """Changed settings since an earlier run, such as "rank was 8 and is now 4"; empty without an earlier run."""
        found = self._read()
        return differences(found.get("settings", {}), self.settings) if found else []

    def begin(self) -> None:
        """Write the settings. Deletes `made` first, unless the file has these settings; warns if it has others."""
        found = self._read()
        if found.get("settings") == self.settings:
            return
        if found:
            logger.warning(f"{self.path.parent} has other settings and is rebuilt: {'; '.join(self.changes())}.")
        for path in self.made:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        save_json({"settings": self.settings, "complete": False}, self.path)

    def end(self, result: dict[str, Any]) -> None:
        """Write the result, which marks the record as complete."""
        save_json({"settings": self.settings, "complete": True, **result}, self.path)

    def _read(self) -> dict[str, Any]:
        return dict(read_json(self.path)) if self.path.is_file() else {}


def shards(
    record: Record, rows: Sequence[int], size: int, make: Callable[[int], dict[str, Tensor]], title: str
) -> list[Path]:
    """Write the missing safetensors shards in the folder of `record`, and return the paths of all shards. A shard has
    the tensors that `make` returns for `size` of the `rows`, joined along the first dimension."""
    record.begin()
    paths = []
    with logging.tqdm(total=len(rows), desc=title, unit="text") as bar:
        for number, start in enumerate(range(0, len(rows), size)):
            part = rows[start : start + size]
            path = record.path.with_name(f"shard-{number:05d}.safetensors")
            if not path.is_file():
                save_tensors(joined([tensors for row in part if (tensors := make(row))]), path)
            bar.update(len(part))
            paths.append(path)
    return paths


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Join the tensors of all parts along the first dimension; empty without parts."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def save_json(contents: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_text(json.dumps(contents, indent=2) + "\n", path)
