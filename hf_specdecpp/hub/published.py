"""The table of published drafts, by target (`published.json`)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Published:
    """A draft on the Hub for a target, its `form`, such as "EAGLE-3 draft", and the figure that `source` gives, if any.

    If `file` is "pickle", convert the draft first: `specdecpp inspect DRAFT --convert FOLDER`."""

    target: str
    draft: str
    form: str
    source: str
    tokens_per_pass: float | None = None
    speedup: float | None = None
    measured_on: str | None = None
    file: str = "safetensors"

    @property
    def measured(self) -> str:
        """The figure as text, such as "3.72 tokens a pass (MT-bench)"; empty if none was published."""
        if self.measured_on is None:
            return ""
        figure = f"{self.speedup} times the speed" if self.speedup else f"{self.tokens_per_pass} tokens a pass"
        return f"{figure} ({self.measured_on})"


@cache
def table() -> tuple[Published, ...]:
    """Return all published drafts, those of a target together in this order: drafts that one source compared, the best
    first; other drafts with a figure, which is not comparable; drafts without a figure."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    return tuple(Published(**row) for row in rows)


def published(target: str) -> list[Published]:
    """Return the drafts for `target`, a Hub id or a folder such as `models/Qwen3-8B`, in the order of `table`."""
    name = target.rstrip("/").lower()
    wanted = name if name in {each.target.lower() for each in table()} else Path(name).name
    return [each for each in table() if wanted in (each.target.lower(), each.target.lower().split("/")[1])]


def advice(target: str) -> str | None:
    """Return a line that names the best draft for `target` which needs no conversion; `None` if there is none."""
    best = next((each for each in published(target) if each.file == "safetensors"), None)
    if best is None:
        return None
    measured = f" Published: {best.measured}." if best.measured else ""
    return f"{best.target} has a published {best.form}: assist(model, {best.draft!r}).{measured}"
