"""What a benchmark is told, and what it writes down so that a killed run goes on."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import is_sklearn_available, logging

from hf_specdecpp.benchmark.replay.sweep import PAPER, read_costs
from hf_specdecpp.files import differences, read_json, save_text
from hf_specdecpp.provenance import device_name
from hf_specdecpp.version import __version__

logger = logging.get_logger("hf_specdecpp")

RUNS, TREES, SETTINGS, RESULTS = "runs.jsonl", "trees.jsonl", "settings.json", "results.json"


@dataclass
class BenchmarkConfig:
    """A benchmark.

    Args:
        target: Hub id or folder of the model to speed up.
        assistant: Hub id or folder of its assistant; by default an untrained early exit after `layers`.
        layers: of that early exit: 4 for the first four, or a list of indices.
        draft: a copy of the draft that the assistant's repository names, where that cannot be reached.
        data: prompts: JSON Lines files, each a set of its own; a few of ours by default.
        max_prompts (prompts): the most taken of each set, chosen by `seed`; all by default.
        max_new_tokens (tokens): the longest answer.
        temperatures: every prompt is answered at each of them; 0 is greedy.
        contestants: patterns of the names of those who take part; all by default.
        output: folder of the results; a killed run goes on there.
        dtype: of the target; `"auto"` is what it is stored in.
        device: of the target; by default an accelerator if there is one.
        threads (threads): of torch; as many as torch takes by default.
        seed: of the choice of prompts and of all draws.
        cpu_products: of ours, `"auto"` or `"off"` (`SpeculationConfig`); by default as the assistant says.
        pack_weights: whether ours keeps packed copies of the weights (`SpeculationConfig`); by default as the assistant
            says.
        cost_ratio (target passes): make the target slower until a draft step costs this share of a pass.
        costs: what replays reckon with: `"measured"`, `"paper"`, ratios t_draft / t_target, or JSON files.
        rollouts: work folder of `specdecpp train`: replays take the target's answers to its test sets from there.
        live: time generations.
        replay: compare all rules on recorded texts.
        replay_trees: count the tokens per target pass of all trees along the texts.
        draws (records): made of each sampled text.
        attempts (generations): the most of one that other load disturbs; the quietest is kept.
        quick: a few contestants, prompts and tokens.
    """

    target: str
    assistant: str | None = None
    layers: int | list[int] = 4
    draft: str | None = None
    data: list[str] = field(default_factory=list)
    max_prompts: int | None = None
    max_new_tokens: int = 128
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    contestants: list[str] = field(default_factory=list)
    output: Path = Path("bench")
    dtype: str = "auto"
    device: str | None = None
    threads: int | None = None
    seed: int = 0
    cpu_products: str | None = None
    pack_weights: bool | None = None
    cost_ratio: float | None = None
    costs: list[str] = field(default_factory=lambda: ["measured", "paper"])
    rollouts: Path | None = None
    live: bool = True
    replay: bool = True
    replay_trees: bool = False
    draws: int = 1
    attempts: int = 3
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "draws", "attempts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if any(temperature < 0.0 for temperature in self.temperatures) or not self.temperatures:
            raise ValueError(f"temperatures={self.temperatures} must be numbers of at least 0 (greedy).")
        if self.cost_ratio is not None and not 0.0 < self.cost_ratio < 1.0:
            raise ValueError(
                f"cost_ratio={self.cost_ratio} must be between 0 and 1: the price of a draft step in passes."
            )
        read_costs(self.costs, lambda: PAPER)  # a mistake is found now, not after an hour of generations
        if self.rollouts is not None and not (self.rollouts / "rollouts").is_dir():
            raise ValueError(
                f"--rollouts {self.rollouts} has no folder `rollouts`. Give the work folder of a `specdecpp train`, "
                "such as my-assistant-work."
            )


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
