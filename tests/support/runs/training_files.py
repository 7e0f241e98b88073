"""What the first stages of a training run leave on disk, made in a second."""

import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from hf_specdecpp.training import calibration, evaluation, recorded_chains
from hf_specdecpp.training import head as head_fitting
from hf_specdecpp.training.configuration import DistillConfig, EvalConfig, HeadConfig, RolloutConfig, TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from support.files.repos import save_model
from support.targets.models import VOCAB_SIZE, partly_agreeing, tiny

KEPT = tempfile.TemporaryDirectory(prefix="training-run-")  # removed when the process ends


def training_run(
    folder: Path,
    num_texts: int = 12,
    mix: float = 0.96,
    early_exit: bool = False,
    temperatures: Sequence[float] = (1.0,),
    tests: Sequence[str] = (),
    **head: Any,
) -> Any:
    """A `TrainingConfig` with a target, a partly agreeing draft and rollouts of `num_texts` training texts on disk."""
    made = _prototype(num_texts, mix, early_exit, tuple(temperatures), tuple(tests))
    shutil.copytree(made, folder, dirs_exist_ok=True)
    names: dict[str, Any] = {"target": str(folder / "target")}
    if not early_exit:
        names["draft"] = str(folder / "draft")
    return TrainingConfig(
        **names,
        layers=1,
        output=str(folder / "out"),
        rollouts=RolloutConfig(temperatures=list(temperatures), top_k=0),
        head=HeadConfig(**{"num_blocks": 1, "rank": 8, "batch_size": 4, "epochs": 2.0, "learning_rate": 1e-3, **head}),
        evaluation=EvalConfig([f"{name}.jsonl" for name in tests]),
    )


@cache
def evaluated(inputs: str) -> TrainingConfig:
    """A distilled draft with a head that judges before its forward, or, `"after"`, the paper's setting.

    It has got to its evaluation; made once a session, for tests that only read it."""
    options: dict[str, Any] = {"mix": 0.9, "temperatures": (1.0, 0.0), "tests": ["sums"], "epochs": 1.0}
    is_paper = inputs == "after"
    head: dict[str, Any] = {"inputs": "after", "rejection_weight": 6.0} if is_paper else {}
    config: TrainingConfig = training_run(Path(tempfile.mkdtemp(dir=KEPT.name)), **head, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorded_chains, "STARTS", 4)
        if not is_paper:
            config.rollouts.data = ["prompts.jsonl"]
            config.distill = DistillConfig(rank=2, batch_size=4, epochs=1)
            config.target_id, config.target_revision, config.draft_id = "org/target", "abc123", "org/draft"
            config.validate()
            distillation.run(config)
        for stage in (head_fitting, calibration, evaluation):
            stage.run(config)
    return config


@cache
def _prototype(
    num_texts: int, mix: float, early_exit: bool, temperatures: tuple[float, ...], tests: tuple[str, ...]
) -> Path:
    """The same files, made once a session."""
    folder, target = Path(tempfile.mkdtemp(dir=KEPT.name)), tiny("llama").float()
    save_model(target, folder / "target")
    if not early_exit:
        save_model(partly_agreeing(target, mix), folder / "draft")
    work = folder / "out-work"
    for split, count in (("train", num_texts), ("heldout", 6), *((name, 4) for name in tests)):
        for temperature in temperatures:
            write_rollouts(work, split, target, count, temperature)
    (work / "rollouts" / "rollouts.json").write_text(
        json.dumps({"complete": True, "train": {"answers": 20, "answer_tokens": 500, "finished": 20}})
    )
    return folder


def write_rollouts(work: Path, split: str, target: Any, count: int, temperature: float = 1.0) -> None:
    """Texts that the target wrote: `count` sampled ones, two to a prompt, or one greedy one a prompt."""
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    samples = 2 if temperature else 1
    with torch.random.fork_rng():
        torch.manual_seed(len(split))
        prompts = torch.randint(1, VOCAB_SIZE, (count, 5))[:: 3 - samples]
        texts = target.generate(prompts, max_new_tokens=24, **options)
    rows = [
        {
            "prompt_id": f"{split}-{row // samples}",
            "source": f"source {row // samples % 2}",
            "sample": row % samples,
            "temperature": temperature,
            "input_ids": text.tolist(),
            "prompt_length": 5,
            "finished": True,
        }
        for row, text in enumerate(texts)
    ]
    folder = work / "rollouts" / split
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(folder / f"shard-0-{temperature:g}-00000.parquet"))
