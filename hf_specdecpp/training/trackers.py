"""Where TensorBoard's files go: Trainer puts them into its checkpoints, which are deleted when a stage has ended."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOGS = "logs"
VARIABLE = "TENSORBOARD_LOGGING_DIR"


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
