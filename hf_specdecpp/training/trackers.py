"""Trackers of the losses: are they there, and where TensorBoard's files go.

Trainer would put those into its checkpoints, which are deleted when a stage has ended.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.integrations import get_reporting_integration_callbacks

LOGS = "logs"
VARIABLE = "TENSORBOARD_LOGGING_DIR"


def check(report_to: str | list[str]) -> None:
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
def tensorboard_in(folder: Path) -> Iterator[None]:
    """A Trainer made within it logs to `folder`, unless the user has set another one in the environment."""
    if VARIABLE in os.environ:
        yield
        return
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        del os.environ[VARIABLE]
