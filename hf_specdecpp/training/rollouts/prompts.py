"""Which prompts a run asks: those to train on, those held out, and the test sets."""

from __future__ import annotations

from pathlib import Path

from hf_specdecpp.texts.prompts import Prompt, read_prompts, sample_prompts, split_prompts
from hf_specdecpp.training.configuration import TrainingConfig


def sets_to_evaluate(config: TrainingConfig) -> dict[str, str]:
    """The name of each test set, and its file or data set.

    Raises:
        ValueError: two have one name.
    """
    named = {Path(source).stem.partition(":")[0]: source for source in config.evaluation.data}
    if len(named) < len(config.evaluation.data) or {"train", "heldout"} & set(named):
        raise ValueError(
            f"The test sets {config.evaluation.data} need names of their own, which are those of their files, other "
            "than train and heldout. Rename the files."
        )
    return named


def training_prompts(config: TrainingConfig) -> list[Prompt]:
    """All that may be trained on: the prompts that are neither held out nor in a test set, answered or not."""
    if not config.rollouts.data:
        return []
    unseen = {prompt.opening for source in config.evaluation.data for prompt in read_prompts(source)}
    return split_prompts(config.rollouts.data, config.rollouts.heldout, unseen=unseen)["train"]


def all_prompts(config: TrainingConfig) -> dict[str, list[Prompt]]:
    """The prompts of `train`, `heldout` and every test set."""
    rollouts = config.rollouts
    whole = {name: read_prompts(source) for name, source in sets_to_evaluate(config).items()}
    unseen = {prompt.opening for prompts in whole.values() for prompt in prompts}  # also those that are not measured
    prompts = split_prompts(rollouts.data, rollouts.heldout, rollouts.max_prompts, config.seed, unseen)
    tests = {name: sample_prompts(each, config.evaluation.max_prompts, config.seed) for name, each in whole.items()}
    return {**prompts, **tests}
