"""Where a draft is written for other engines (`Destination`), and what came of it (`Exported`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Destination:
    """Where a draft is written, and what for.

    Attributes:
        folder: empty; what is written into it becomes `output` once all of it is there and right.
        output: the folder that the user asked for, as commands name it.
        target: Hub id or folder of the target, `None` where nobody has named it.
        revision: of the target.
        num_tokens: candidates a round, for engines that draft a fixed number.
    """

    folder: Path
    output: Path
    target: str | None
    revision: str | None
    num_tokens: int


@dataclass(frozen=True)
class Exported:
    """What is known of a draft that was written.

    Attributes:
        commands: that serve it, by the name of the engine.
        notes: whole sentences about what differs from the draft as this package runs it.
    """

    commands: dict[str, list[str]]
    notes: list[str] = field(default_factory=list)
