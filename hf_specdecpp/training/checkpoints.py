"""Resume a Trainer after a kill at any moment, or after the disk was full."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

NO_SPACE = "os error 28"  # safetensors' words for ENOSPC; torch.save has none


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a Trainer. It writes `trainer_state.json` last; without it, it was killed."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None


@contextmanager
def telling_of_full_disks(folder: Path) -> Iterator[None]:
    """Around a Trainer that writes its checkpoints to `folder`.

    Raises:
        OSError: the disk is full, which reaches here as an error of safetensors, or as "unexpected pos" from torch.
    """
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        if NO_SPACE not in str(error) and shutil.disk_usage(folder).free > 2**20:
            raise
        raise OSError(
            f"A checkpoint in {folder} could not be written: the disk is full. Earlier ones are kept: make room and "
            "run the same command to go on."
        ) from error
