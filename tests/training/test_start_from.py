"""A run that goes on from what another one trained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.distillation_files import prepare

from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import stage as distillation


def report_of(config: TrainingConfig) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((config.work / "distillation.json").read_text())
    return report


def goes_on(config: TrainingConfig, first: TrainingConfig, **settings: Any) -> TrainingConfig:
    """`config` of the first run's target, starting from what it trained."""
    shutil.copytree(first.target, config.target, dirs_exist_ok=True)
    config.distill.start_from = str(first.work)
    for name, value in settings.items():
        setattr(config.distill, name, value)
    return config


@pytest.mark.parametrize("kind", ["early_exit", "conditioned"])
def test_a_second_run_begins_where_the_first_ended(tmp_path: Path, kind: str) -> None:
    first, second = (prepare(tmp_path / name, kind, epochs=2) for name in ("first", "second"))
    distillation.run(first)
    distillation.run(goes_on(second, first))
    ended, begun = report_of(first)["after"]["all"], report_of(second)["before"]["all"]
    assert begun["acceptance"] == pytest.approx(ended["acceptance"], abs=1e-4)
    assert report_of(first)["before"]["all"]["acceptance"] < begun["acceptance"] - 0.01
    assert report_of(second)["after"]["all"]["acceptance"] > begun["acceptance"]


def test_what_does_not_fit(tmp_path: Path) -> None:
    first = prepare(tmp_path / "first", "conditioned", epochs=1, answers=8)
    distillation.run(first)
    for name, settings, message in (
        ("rank", {"rank": 3}, "Set layers, distill.rank and distill.alpha as in that run"),
        ("fusion", {"fusion_rank": 4}, "Set reads and distill.fusion_rank as in that run"),
    ):
        config = goes_on(prepare(tmp_path / name, "conditioned", answers=8), first, **settings)
        with pytest.raises(ValueError, match=message):
            distillation.run(config)
    config = prepare(tmp_path / "nothing", "conditioned", answers=8)
    config.distill.start_from = str(tmp_path / "missing")
    with pytest.raises(ValueError, match="has no trained adapter"):
        distillation.run(config)
