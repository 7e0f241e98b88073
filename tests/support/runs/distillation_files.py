"""Rollouts and tiny models on disk for the tests of distillation, and a run of the stage as a process."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.files import save_text
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training import models
from hf_specdecpp.training.configuration import DistillConfig, TrainingConfig
from hf_specdecpp.training.distillation import distill as distillation
from hf_specdecpp.training.distillation.unrolling import unrolled
from support.files.repos import save_model
from support.targets.formulas import states_of
from support.targets.models import VOCAB_SIZE, quiet_later_layers, tiny

PROMPT_LENGTH = 4


def rows(count: int, seed: int, ids: int = VOCAB_SIZE) -> list[dict[str, Any]]:
    """Answers of 8 to 20 random tokens, of two sources."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 21, (count,), generator=random).tolist()
    return [
        {
            "prompt_id": f"{seed}-{index}",
            "source": ("code", "maths")[index % 2],
            "sample": 0,
            "input_ids": torch.randint(1, ids, (PROMPT_LENGTH + length,), generator=random).tolist(),
            "prompt_length": PROMPT_LENGTH,
            "finished": True,
        }
        for index, length in enumerate(lengths)
    ]


def write_rollouts(work: Path, train: list[dict[str, Any]], heldout: list[dict[str, Any]]) -> None:
    for split, answers in (("train", train), ("heldout", heldout)):
        shard = work / "rollouts" / split / "shard-00000.parquet"
        shard.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_list(answers).to_parquet(str(shard))
    save_text('{"complete": true}', work / "rollouts" / "rollouts.json")


def prepare(folder: Path, kind: str, family: str = "llama", answers: int = 64, **distill: Any) -> TrainingConfig:
    """A target and a draft that agree in part, rollouts, and a short run over them."""
    target = quiet_later_layers(tiny(family)).float()
    values: dict[str, Any] = {"target": save_model(target, folder / "target"), "output": str(folder / "out")}
    if kind == "independent":
        values["draft"] = save_model(astray(target), folder / "draft")
    elif kind in ("conditioned", "eagle3"):
        values |= {"draft": kind, "reads": [0, 1]}
    else:
        values["layers"] = [0, 2]
    knobs = {"rank": 8, "batch_size": 4, "learning_rate": 5e-3, "epochs": 3, **distill}
    config = TrainingConfig(**values, distill=DistillConfig(**knobs))
    write_rollouts(config.work, rows(answers, seed=1), rows(16, seed=2))
    return config


def report_of(config: TrainingConfig) -> dict[str, Any]:
    """What the stage has measured."""
    report: dict[str, Any] = json.loads((config.work / "distillation.json").read_text())
    return report


@torch.no_grad()
def measured(assistant: SpecDecPPAssistant, target: CausalLM) -> float:
    """Mean acceptance of the first candidate on the held-out answers, text by text."""
    drafter, chances = assistant.ready_drafter(), []
    for row in rows(16, seed=2):
        ids = torch.tensor([row["input_ids"]])
        p = target(ids).logits[0].softmax(-1)
        hidden = next(iter(unrolled(drafter, ids, states_of(target, drafter, ids), 1)))[0]
        q = drafter.logits(hidden, VOCAB_SIZE).softmax(-1)
        chances.append(torch.minimum(p, q).sum(-1)[max(PROMPT_LENGTH - 1, 3) : -1])
    return float(torch.cat(chances).mean())


def check_that_training_helps(config: TrainingConfig, repo: Path) -> tuple[SpecDecPPAssistant, CausalLM]:
    """Run the stage: three steps of a round get better, and what was measured is what is loaded, saved, loaded again.

    Returns:
        The assistant of `repo`, into which it was saved, and its target, which is untouched."""
    distillation.run(config)
    report = report_of(config)
    before, after = report["before"]["all"], report["after"]["all"]
    for step in ("", "_2", "_3"):
        assert after[f"acceptance{step}"] > before[f"acceptance{step}"] + 0.01, report
    target = AutoModelForCausalLM.from_pretrained(config.target, dtype=torch.float32)
    expected = {name: parameter.clone() for name, parameter in target.named_parameters()}
    assistant = models.load_assistant(config, target)
    assert measured(assistant, target) == pytest.approx(after["acceptance"], abs=2e-3)
    assert all(torch.equal(parameter, expected[name]) for name, parameter in target.named_parameters())
    assistant.save_pretrained(repo)
    again = SpecDecPPAssistant.from_pretrained(repo, target=target)
    assert measured(again, target) == pytest.approx(after["acceptance"], abs=2e-3)
    return again, target


def astray(target: Any, rank: int = 2) -> Any:
    """A draft that is the target plus noise of low rank, which an adapter can take back."""
    draft, random = copy.deepcopy(target), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for module in draft.get_decoder().modules():
            if isinstance(module, torch.nn.Linear):
                rows, columns = module.weight.shape
                noise = torch.randn(rows, rank, generator=random) @ torch.randn(rank, columns, generator=random)
                module.weight += 0.5 * module.weight.std() * noise
    return draft


def adapter_of(config: TrainingConfig) -> dict[str, Tensor]:
    return load_file(config.work / "adapter" / "adapter_model.safetensors")


if __name__ == "__main__":  # what `accelerate launch` starts
    distillation.run(TrainingConfig.from_dict(json.loads(Path(sys.argv[1]).read_text())))
