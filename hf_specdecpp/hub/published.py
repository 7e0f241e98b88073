"""Drafts that others have published, by the model that they were trained for: the table `published.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """A draft that can be had from the Hub, with its source, and the tokens a pass that its authors measured.

    A `file` that is a pickle has to be converted first: `specdecpp inspect DRAFT --convert FOLDER`.
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
    """All of them. Those of a target stand in the order in which to try them."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Published(**row) for row in rows)


def published(target: str) -> list[Published]:
    """The drafts for a model, named by its Hub id or by a folder of the same name, such as `models/Qwen3-8B`."""
    name = target.rstrip("/").lower()
    wanted = name if name in {each.target.lower() for each in table()} else Path(name).name
    return [each for each in table() if wanted in (each.target.lower(), each.target.lower().split("/")[1])]


def advice(target: str) -> str | None:
    """The line that names the first draft for a model which `assist` takes as it is; `None` if there is none."""
    best = next((each for each in published(target) if each.file == "safetensors"), None)
    if best is None:
        return None
    return f"{best.target} has a published {best.form}: assist(model, {best.draft!r})"
