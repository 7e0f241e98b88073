"""Reads the answers of the stage `rollouts` of `specdecpp train`. Needs `datasets`.

The folder `rollouts` in a run's `work_dir` has a folder of parquet shards for `train`, for `heldout` and for each test
set, and `rollouts.json` with the settings and whether all shards are complete. A row of a shard is one answer:
`prompt_id`, `source`, `sample`, `temperature`, `input_ids` (prompt and answer), `prompt_length` and `finished` (whether
an end-of-sequence token ended the answer)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets

from hf_specdecpp.files import read_json

FOLDER, RECORD = "rollouts", "rollouts.json"
TRAIN, HELDOUT = "train", "heldout"


def record(work: Path) -> dict[str, Any]:
    """Return `settings`, and the numbers of answers and tokens by split. `ValueError` if the stage is not finished."""
    path = work / FOLDER / RECORD
    if not path.is_file() or not (found := read_json(path)).get("complete"):
        raise ValueError(f"{work / FOLDER} is not complete. Run the stage rollouts first; it resumes where it stopped.")
    return dict(found)


def load(work: Path, split: str, temperature: float | None = None) -> datasets.Dataset:
    """Return the answers of `train`, `heldout` or a test set, of one temperature or all. `ValueError` if the stage is
    not finished, or there are none."""
    record(work)
    shards = sorted((work / FOLDER / split).glob("shard-*.parquet"))
    if not shards:
        advice = "Set rollouts.heldout above 0" if split == HELDOUT else f"Give prompts for {split}"
        raise ValueError(f"{work / FOLDER / split} has no answers. {advice} and run rollouts again.")
    answers = datasets.Dataset.from_parquet([str(path) for path in shards], cache_dir=str(work / "cache"))
    if temperature is None:
        return answers
    rows = [row for row, own in enumerate(answers["temperature"]) if math.isclose(own, temperature, rel_tol=1e-6)]
    if not rows:
        known = ", ".join(f"{own:g}" for own in sorted(set(answers["temperature"])))
        raise ValueError(
            f"No rollouts were generated at temperature {temperature:g}, only at {known}. Choose one of these, or add "
            "the temperature to rollouts.temperatures and generate the rollouts again."
        )
    return answers.select(rows)
