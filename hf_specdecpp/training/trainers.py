"""What the stages share: processes, trackers, checkpoints, and records of what is made."""

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
LOGS = "logs"
LOG_FOLDER = "TENSORBOARD_LOGGING_DIR"  # the variable that Trainer's callback reads when it is made


def process_state() -> PartialState:
    """This process among those of the run; accelerate overlooks its siblings on a CPU unless told that it is meant."""
    return PartialState(cpu=not torch.accelerator.is_available())


def check_trackers(report_to: str | list[str]) -> None:
    """Raise `ValueError` before an hour of rollouts where a tracker is unknown to Trainer, or not installed."""
    try:
        for callback in get_reporting_integration_callbacks(report_to):
            callback()
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"report_to={report_to!r} cannot be used: {error} Install the tracker, or name another."
        ) from None


def logging_to(folder: Path) -> AbstractContextManager[None]:
    """A Trainer made within it writes TensorBoard's files to `folder`, not into checkpoints, which are deleted."""
    return patch_environment(**{LOG_FOLDER: os.environ.get(LOG_FOLDER, str(folder))})


def training_arguments(
    config: TrainingConfig, section: DistillConfig | HeadConfig, checkpoints: Path, **own: Any
) -> TrainingArguments:
    """The arguments that both fits have in common, those of a section of the settings, and `own`."""
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
    """The newest complete checkpoint of a Trainer. It writes `trainer_state.json` last; without it, it was killed."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None


# Records --------------------------------------------------------------------------------------------------------------


class Record:
    """The record of what is made with `settings`.

    Args:
        settings: all that what is made depends on; whatever JSON can hold.
        made: files and folders that are worth nothing once the settings are others.
    """

    def __init__(self, path: Path, settings: dict[str, Any], made: Sequence[Path] = ()) -> None:
        self.path, self.made = path, made
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))  # a tuple would not equal the list read back

    def result(self) -> dict[str, Any] | None:
        """What came of an earlier run with the same settings; `None` unless it has ended."""
        found = self._read()
        return found if found.get("complete") and found.get("settings") == self.settings else None

    def changes(self) -> list[str]:
        """How the settings of an earlier run differ from these, in words; empty where there was none."""
        found = self._read()
        return differences(found.get("settings", {}), self.settings) if found else []

    def begin(self) -> None:
        """Note the settings. What was made with others, or nobody knows with which, is removed first."""
        found = self._read()
        if found.get("settings") == self.settings:
            return
        if found:
            logger.warning(f"{self.path.parent} is of other settings and is made again: {'; '.join(self.changes())}.")
        for path in self.made:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        self._write({"settings": self.settings, "complete": False})

    def end(self, result: dict[str, Any]) -> None:
        """Note that all is made, and what came of it."""
        self._write({"settings": self.settings, "complete": True, **result})

    def _read(self) -> dict[str, Any]:
        return dict(read_json(self.path)) if self.path.is_file() else {}

    def _write(self, contents: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        save_json(contents, self.path)


def shards(
    record: Record, rows: Sequence[int], size: int, make: Callable[[int], dict[str, Tensor]], title: str
) -> list[Path]:
    """Safetensors files beside a record, where they are not there yet: the tensors that `make` returns for `size` of
    the `rows`, one after another. Rows for which it returns none are left out."""
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
    """Tensors of several parts, one after another; empty where there is no part."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]} if parts else {}


def save_json(contents: Any, path: Path) -> None:
    save_text(json.dumps(contents, indent=2) + "\n", path)
