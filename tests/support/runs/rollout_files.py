"""A small run of the stage rollouts, and what it left on disk."""

import json
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.texts import answers
from hf_specdecpp.training.configuration import RolloutConfig, TrainingConfig
from support.files.repos import WORDS

NUM_PROMPTS, EOS = 14, 7
SPLITS, LENGTHS = ("train", "heldout"), [1 + 5 * n % 9 for n in range(NUM_PROMPTS)]
PROMPTS = [" ".join(WORDS[1 + (7 * n + 3 * i) % (len(WORDS) - 1)] for i in range(length))
           for n, length in enumerate(LENGTHS)]  # fmt: skip


def small_run(folder: Path, target: str, **changes: Any) -> TrainingConfig:
    """Greedy answers of `target` to the prompts, in four shards."""
    data = folder / "words.jsonl"
    data.write_text("".join(json.dumps({"id": f"p{n}", "prompt": text}) + "\n" for n, text in enumerate(PROMPTS)))
    options = {"max_new_tokens": 12, "batch_size": 3, "shard_size": 4, "heldout": 0.2, "temperatures": [0.0], **changes}
    return TrainingConfig(target, str(folder / "out"), rollouts=RolloutConfig([str(data)], **options))


def rows_of(config: TrainingConfig) -> list[dict[str, Any]]:
    return [row for split in SPLITS for row in answers.load(config.work, split)]


def files(config: TrainingConfig) -> list[str]:
    root = config.work / "rollouts"
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def greedy(target: str, ids: list[int], **arguments: Any) -> list[int]:
    """Prompt and answer of plain `generate()`, one by one and without padding."""
    with LOADING:
        model = _load(target)
    output = model.generate(torch.tensor([ids]), do_sample=False, **{"max_new_tokens": 12, **arguments})
    return output[0].tolist()


# A cache lets several threads of a server load at once, and `from_pretrained` sets the default dtype of all threads.
LOADING = Lock()


@cache
def _load(target: str) -> CausalLM:
    return AutoModelForCausalLM.from_pretrained(target)
