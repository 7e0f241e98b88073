"""What the stages with a `transformers.Trainer` share: processes, trackers, checkpoints and disks that fill up."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from transformers import Trainer, TrainingArguments
from transformers.integrations import get_reporting_integration_callbacks

from hf_specdecpp.training.configuration import TrainingConfig

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
LOGS = "logs"
LOG_FOLDER = "TENSORBOARD_LOGGING_DIR"  # the variable that Trainer's callback reads when it is made


def process_state() -> PartialState:
    """This process among those of the run (`accelerate launch`).

    accelerate overlooks its siblings on a machine without accelerator unless told that the CPU is meant, and then each
    would take itself for the only one and write the same files.
    """
    return PartialState(cpu=not torch.accelerator.is_available())


def check_trackers(report_to: str | list[str]) -> None:
    """Find a missing tracker before an hour of rollouts, not after it.

    Raises:
        ValueError: Trainer does not know one of the trackers, or it is not installed.
    """
    try:
        for callback in get_reporting_integration_callbacks(report_to):
            callback()
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"report_to={report_to!r} cannot be used: {error} Install the tracker, or name another."
        ) from None


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """A Trainer made within it writes TensorBoard's files to `folder`, unless the environment names another one.

    It would put them into its checkpoints, which are deleted when a stage has ended.
    """
    if LOG_FOLDER in os.environ:
        yield
        return
    os.environ[LOG_FOLDER] = str(folder)
    try:
        yield
    finally:
        del os.environ[LOG_FOLDER]


def training_arguments(config: TrainingConfig, checkpoints: Path, batch_size: int, **own: Any) -> TrainingArguments:
    """What both fits have in common, and `own`."""
    return TrainingArguments(
        output_dir=str(checkpoints),
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=batch_size,
        lr_scheduler_type="cosine",
        warmup_steps=0.03,  # a share of all steps
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
        report_to=config.report_to,
        seed=config.seed,
        **own,
    )


def go_on(trainer: Trainer) -> None:
    """Train, from the newest checkpoint if there is one.

    Raises:
        OSError: the disk is full, or the user's share of it.
    """
    folder = Path(str(trainer.args.output_dir))
    model: Any = trainer.model
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    with telling_of_full_disks(folder, 4 * trained):  # the parameters, two moments of each, and the rest
        trainer.train(resume_from_checkpoint=last_checkpoint(folder))


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a Trainer. It writes `trainer_state.json` last; without it, it was killed."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None


@contextmanager
def telling_of_full_disks(folder: Path, size: int) -> Iterator[None]:
    """Around a Trainer that writes checkpoints of `size` bytes to `folder`.

    Libraries hide the error of a full disk: safetensors and torch.save raise errors of their own without its number. So
    after any error that may come from writing, the free room is looked at.

    Raises:
        OSError: the disk is full, or the user's share of it.
    """
    try:
        yield
    except (OSError, SafetensorError, RuntimeError) as error:
        if getattr(error, "errno", None) not in NO_ROOM and shutil.disk_usage(folder).free >= size:
            raise
        raise OSError(
            f"A checkpoint in {folder} could not be written: the disk is full. Earlier ones are kept: make room and "
            "run the same command to go on."
        ) from error
