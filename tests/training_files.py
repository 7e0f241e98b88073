"""What the first stages of a training run leave on disk, made in a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import torch
from models import VOCAB_SIZE, partly_agreeing, tiny
from repos import save_model

from hf_specdecpp.training.configuration import HeadConfig, RolloutConfig, TrainingConfig


def training_run(folder: Path, num_texts: int = 12, mix: float = 0.96, early_exit: bool = False, **head: Any) -> Any:
    """A `TrainingConfig` with a target, a partly agreeing draft and rollouts of `num_texts` training texts on disk."""
    target = tiny("llama").float()
    names: dict[str, Any] = {"target": save_model(target, folder / "target")}
    if not early_exit:
        names["draft"] = save_model(partly_agreeing(target, mix), folder / "draft")
    config = TrainingConfig(
        **names,
        layers=1,
        output=str(folder / "out"),
        rollouts=RolloutConfig(temperature=1.0, top_k=0),
        head=HeadConfig(**{"num_blocks": 1, "rank": 8, "batch_size": 4, "epochs": 2.0, "learning_rate": 1e-3, **head}),
    )
    for split, count in (("train", num_texts), ("heldout", 6)):
        write_rollouts(config.work, split, target, count)
    (config.work / "rollouts" / "rollouts.json").write_text(json.dumps({"complete": True}))
    return config


def write_rollouts(work: Path, split: str, target: Any, count: int) -> None:
    """Texts that the target wrote at temperature 1, two to a prompt, from two sources."""
    with torch.random.fork_rng():
        torch.manual_seed(len(split))
        prompts = torch.randint(1, VOCAB_SIZE, (count, 5))
        texts = target.generate(prompts, do_sample=True, max_new_tokens=24, top_k=0)
    rows = [
        {
            "prompt_id": f"{split}-{row // 2}",
            "source": f"source {row // 2 % 2}",
            "sample": row % 2,
            "input_ids": text.tolist(),
            "prompt_length": 5,
            "finished": True,
        }
        for row, text in enumerate(texts)
    ]
    folder = work / "rollouts" / split
    folder.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(rows).to_parquet(str(folder / "shard-00000.parquet"))
