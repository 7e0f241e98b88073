"""A run that goes on from what another one trained."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.distillation_files import prepare, report_of
from support.models import VOCAB_SIZE

from hf_specdecpp.texts.answers import load as load_answers
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.distillation import stage as distillation
from hf_specdecpp.training.models import answer_counts


def goes_on(config: TrainingConfig, first: TrainingConfig, **settings: Any) -> TrainingConfig:
    """`config` of the first run's target, starting from what it trained."""
    shutil.copytree(first.target, config.target, dirs_exist_ok=True)
    config.distill.start_from = str(first.work)
    for name, value in settings.items():
        setattr(config.distill, name, value)
    return config


@pytest.mark.takes(4)
@pytest.mark.parametrize("kind", [pytest.param("early_exit", marks=pytest.mark.slow), "conditioned"])
def test_a_second_run_begins_where_the_first_ended(tmp_path: Path, kind: str) -> None:
    first, second = (prepare(tmp_path / name, kind, epochs=2) for name in ("first", "second"))
    distillation.run(first)
    distillation.run(goes_on(second, first))
    ended, begun = report_of(first)["after"]["all"], report_of(second)["before"]["all"]
    assert begun["acceptance"] == pytest.approx(ended["acceptance"], abs=1e-4)
    assert report_of(first)["before"]["all"]["acceptance"] < begun["acceptance"] - 0.01
    assert report_of(second)["after"]["all"]["acceptance"] > begun["acceptance"]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("earlier", "kept"), [("covers more", True), ("covers less", False), ("of another size", False)]
)
def test_the_draft_vocabulary_that_covers_more_is_kept(tmp_path: Path, earlier: str, kept: bool) -> None:
    """The earlier run may have seen more text than the one that goes on from it."""
    first, second = (prepare(tmp_path / n, "early_exit", answers=16, epochs=1, draft_vocab_size=20) for n in "ab")
    distillation.run(first)
    if earlier == "of another size":
        second.distill.draft_vocab_size = 24
    else:
        by_frequency = answer_counts(load_answers(first.work, "heldout"), VOCAB_SIZE).argsort(kind="stable")
        ids = by_frequency[-20:] if earlier == "covers more" else by_frequency[:20]
        save_file({"token_ids": torch.as_tensor(np.sort(ids))}, first.work / "draft_vocab.safetensors")
    distillation.run(goes_on(second, first))
    theirs, ours = (load_file(config.work / "draft_vocab.safetensors")["token_ids"] for config in (first, second))
    assert torch.equal(theirs, ours) is kept
    assert len(ours) == second.distill.draft_vocab_size


def test_what_does_not_fit(tmp_path: Path) -> None:
    first = prepare(tmp_path / "first", "conditioned", epochs=1, answers=8)
    distillation.run(first)
    for name, settings, message in (
        ("rank", {"rank": 3}, "Set layers and distill.rank as in that run"),
        ("fusion", {"fusion_rank": 4}, "Set reads and distill.fusion_rank as in that run"),
    ):
        config = goes_on(prepare(tmp_path / name, "conditioned", answers=8), first, **settings)
        with pytest.raises(ValueError, match=message):
            distillation.run(config)
    config = prepare(tmp_path / "nothing", "conditioned", answers=8)
    config.distill.start_from = str(tmp_path / "missing")
    with pytest.raises(ValueError, match="has no trained adapter"):
        distillation.run(config)
