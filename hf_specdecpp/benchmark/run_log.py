"""What a benchmark writes down while it runs, so that a killed run goes on."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_sklearn_available

from hf_specdecpp.files import differences, read_json, save_text
from hf_specdecpp.provenance import device_name
from hf_specdecpp.version import __version__

RUNS, ROUNDS, BATCHES = "runs.jsonl", "rounds.jsonl", "batches.jsonl"
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
    """The generations so far: one line each in `runs.jsonl`, written when it is finished.

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
        self.path = folder / name
        check_settings(folder, settings)
        self.rows = self._read()
        self.session = 1 + max((row["session"] for row in self.rows), default=0)

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        """Keep a row, which is returned with its session."""
        row = {**row, "session": self.session}
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return row

    def _read(self) -> list[dict[str, Any]]:
        lines = self.path.read_text(encoding="utf-8").split("\n") if self.path.is_file() else [""]
        if lines[-1]:  # killed within a line
            save_text("".join(line + "\n" for line in lines[:-1]), self.path)
        return [json.loads(line) for line in lines[:-1]]


def check_settings(folder: Path, settings: dict[str, Any]) -> None:
    """Write down the settings, or compare them with those of an earlier run.

    Raises:
        ValueError: they differ.
    """
    path = folder / SETTINGS
    if not path.is_file():
        save_text(json.dumps(settings, indent=2) + "\n", path)
        return
    if different := differences(read_json(path), settings):
        raise ValueError(
            f"{folder} has results from other settings: {'; '.join(different)}. They cannot be compared: go on with "
            "the earlier settings, choose another --output, or delete the folder."
        )
