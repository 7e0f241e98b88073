"""The table of published drafts, by target (`published.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """A draft on the Hub, with its source, and the tokens per pass that its authors measured.

    If `file` is "pickle", convert the draft first: `specdecpp inspect DRAFT --convert FOLDER`.
    """

    target: str
    draft: str
    form: str
    source: str
    tokens_per_pass: float | None = None
    measured_on: str | None = None
    file: str = "safetensors"


@cache
def table() -> tuple[Published, ...]:
    """All published drafts; those of a target are in the recommended order."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Published(**row) for row in rows)


def published(target: str) -> list[Published]:
    """The drafts for `target`, a Hub id or a folder with the model's name, such as `models/Qwen3-8B`."""
    name = target.rstrip("/").lower()
    wanted = name if name in {each.target.lower() for each in table()} else Path(name).name
    return [each for each in table() if wanted in (each.target.lower(), each.target.lower().split("/")[1])]


def advice(target: str) -> str | None:
    """A line that names the first published draft of a model, among those usable without conversion; else `None`."""
    best = next((each for each in published(target) if each.file == "safetensors"), None)
    if best is None:
        return None
    return f"{best.target} has a published {best.form}: assist(model, {best.draft!r})"
