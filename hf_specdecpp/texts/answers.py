"""The answers that the stage `rollouts` of `specdecpp train` has had the target write. Needs `datasets`.

A run's `work_dir` has a folder `rollouts` with a folder of parquet shards for `train`, for `heldout` and for each test
set, and `rollouts.json`, which says from which settings they were made and whether they are complete. A row of a shard
is one answer: `prompt_id`, `source`, `sample`, `temperature`, `input_ids` (prompt and answer), `prompt_length` and
`finished` (whether the target ended it).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import datasets

from hf_specdecpp.files import read_json

FOLDER, RECORD = "rollouts", "rollouts.json"
TRAIN, HELDOUT = "train", "heldout"


def record(work: Path) -> dict[str, Any]:
    """`settings` and how much was answered, by split; `ValueError` if the stage has not ended yet."""
    path = work / FOLDER / RECORD
    if not path.is_file() or not (found := read_json(path)).get("complete"):
        raise ValueError(f"{work / FOLDER} is not complete. Run the stage rollouts first; it goes on where it stopped.")
    return dict(found)


def load(work: Path, split: str) -> datasets.Dataset:
    """The answers of `train`, `heldout` or a test set; `ValueError` if the stage has not ended, or there are none."""
    record(work)
    shards = sorted((work / FOLDER / split).glob("shard-*.parquet"))
    if not shards:
        advice = "Set rollouts.heldout above 0" if split == HELDOUT else f"Give prompts for {split}"
        raise ValueError(f"{work / FOLDER / split} has no answers. {advice} and run rollouts anew.")
    return datasets.Dataset.from_parquet([str(path) for path in shards], cache_dir=str(work / "cache"))


def written_at(answers: datasets.Dataset, temperature: float) -> datasets.Dataset:
    """Those answers that the target wrote at a temperature; `ValueError` if there are none."""
    rows = [row for row, own in enumerate(answers["temperature"]) if math.isclose(own, temperature, rel_tol=1e-6)]
    if not rows:
        known = ", ".join(f"{own:g}" for own in sorted(set(answers["temperature"])))
        raise ValueError(
            f"No rollouts were written at temperature {temperature:g}, only at {known}. Choose one of these, or add it "
            "to rollouts.temperatures and make them anew."
        )
    return answers.select(rows)
