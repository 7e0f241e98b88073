"""Stage `card`: put what the stages made into one folder, the assistant's repository, with its card."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from hf_specdecpp import publishing
from hf_specdecpp.configuration import SpeculationConfig
from hf_specdecpp.repository import CARD, read_json, save_text
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import REPORT
from hf_specdecpp.training.evaluation import COST_RATIO, time_per_token
from hf_specdecpp.training.metrics import Outcome
from hf_specdecpp.training.models import load_assistant, load_target
from hf_specdecpp.version import __version__


def run(config: TrainingConfig) -> Path:
    """Write the repository into `config.output`; its path. The card there is replaced.

    Raises:
        ValueError: the head has not been fitted or evaluated yet.
    """
    evaluation = config.work / "evaluation" / "evaluation.json"
    if not evaluation.is_file():
        raise ValueError(f"{evaluation} is missing: run the stages 'head', 'calibrate' and 'eval' before 'card'.")
    measured = read_json(evaluation)
    assistant = load_assistant(config, load_target(config))
    assistant.speculation = SpeculationConfig(threshold=best_threshold(measured))
    folder = Path(config.output)
    assistant.save_pretrained(folder)
    distilled = config.work / REPORT
    training = {
        "config": config.to_dict(),
        "evaluation": measured,
        "distillation": read_json(distilled) if distilled.is_file() else None,
        "provenance": provenance(),
    }
    save_text(str(publishing.make_card(assistant, training)), folder / CARD)
    return folder


def best_threshold(measured: dict[str, Any]) -> float:
    """The threshold at which the head's rule spends the least time a token, a draft token costing `COST_RATIO`."""
    first = next(iter(measured["temperatures"].values()))
    points = [Outcome(**point) for point in first["curves"]["head"]]
    return min(points, key=lambda point: time_per_token(point, COST_RATIO)).setting


def provenance() -> dict[str, str | None]:
    """The command, the versions and the commit that made the repository."""
    found = subprocess.run(  # noqa: S603 - a fixed command
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"],  # noqa: S607 - whatever git the user has
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "hf_specdecpp": __version__,
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "git_commit": found.stdout.strip() or None,
    }
