"""Resume a Trainer after a kill at any moment."""

from __future__ import annotations

from pathlib import Path


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint of a Trainer. It writes `trainer_state.json` last; without it, it was killed."""
    complete = [path.parent for path in folder.glob("checkpoint-*/trainer_state.json")]
    return str(max(complete, key=lambda path: int(path.name.split("-")[1]))) if complete else None
