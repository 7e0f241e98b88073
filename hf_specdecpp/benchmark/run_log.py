"""What a benchmark writes down while it runs, so that a killed run goes on."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_sklearn_available

from hf_specdecpp.files import differences, read_json, save_text
from hf_specdecpp.provenance import device_name
from hf_specdecpp.version import __version__

RUNS, ROUNDS, TEXTS, RECORDS = "runs.jsonl", "rounds.jsonl", "texts.jsonl", "records.jsonl"
SETTINGS, RESULTS = "settings.json", "results.json"


def environment(device: torch.device) -> dict[str, Any]:
    """Where and with what: goes into the results, and a run only goes on where it is the same."""
    return {
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "processors": os.cpu_count(),
        "machine": platform.node(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specdecpp": __version__,
        # With it transformers moves the confidence threshold of its default while it runs.
        "scikit-learn": is_sklearn_available(),
    }


class RunLog:
    """The generations so far, or what was made of them: one line each, written when it is finished.

    A run that is killed loses the generation that it was at. The next run with the same settings goes on, as another
    session: speeds are only compared within one.

    Args:
        folder: made if it is not there.
        settings: what the generations depend on.
        name: of the file.

    Raises:
        ValueError: the folder has generations from other settings.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], name: str = RUNS) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path, known = folder / name, folder / SETTINGS
        if not known.is_file():
            save_text(json.dumps(settings, indent=2) + "\n", known)
        elif different := differences(read_json(known), settings):
            raise ValueError(
                f"{folder} has results from other settings: {'; '.join(different)}. They cannot be compared: go on "
                "with the earlier settings, choose another --output, or delete the folder."
            )
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.is_file() else [""]
        if lines[-1]:  # killed within a line
            save_text("".join(line + "\n" for line in lines[:-1]), self.path)
        self.rows = [json.loads(line) for line in lines[:-1]]
        self._known: dict[tuple[Any, ...], dict[str, Any]] | None = None
        self.session = 1 + max((row["session"] for row in self.rows), default=0)

    def once(self, where: dict[str, Any], make: Callable[[], Any]) -> Any:
        """The row with the values `where`, of the same fields in all calls; made if it is not there yet."""
        if self._known is None:
            self._known = {tuple(row[name] for name in where): row for row in self.rows}
        if (key := tuple(where.values())) not in self._known:
            self._known[key] = self.add({**where, **make()})
        return self._known[key]

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, which is returned with its session."""
        row = {**row, "session": self.session}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row
