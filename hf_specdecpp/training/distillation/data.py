"""What distillation reads: the rollouts that are of use, in batches of similar length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers.utils import logging

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.draft_vocab import answer_counts

logger = logging.get_logger("hf_specdecpp")

IGNORED = -100  # label of the positions where the target wrote nothing
SORTED_BATCHES = 50  # batches that answers of similar length are grouped within


def useful(answers: Dataset, limit: int, target: CausalLM, config: TrainingConfig) -> Dataset:
    """The rollouts that have something to learn from within the first `limit` tokens."""
    begins, lengths = np.maximum(answers["prompt_length"], 1), np.minimum(lengths_of(answers), limit)
    kept = np.flatnonzero(begins < lengths)
    if len(kept) < len(answers):
        found = f"{len(answers) - len(kept)} of {len(answers)} rollouts in {config.work} have no answer within the "
        found += f"first {limit} tokens (prompts have {begins.min()} to {begins.max()})"
        if len(kept) == 0:
            raise ValueError(f"{found}, so there is nothing to learn from. Raise distill.max_length.")
        logger.warning(f"{found} and are left out.")
    largest = len(answer_counts(answers, 1)) - 1
    num_ids = target.get_output_embeddings().weight.shape[0]
    if largest >= num_ids:
        raise ValueError(
            f"The rollouts in {config.work} have token id {largest}, and {config.target!r} only {num_ids} ids: another "
            "model wrote them. Choose another work_dir for this target."
        )
    return answers.select(kept)


def lengths_of(answers: Dataset) -> list[int]:
    return [len(ids) for batch in answers.select_columns("input_ids").iter(1000) for ids in batch["input_ids"]]


def answer_tokens(answers: Dataset, limit: int) -> int:
    return int((np.minimum(lengths_of(answers), limit) - np.maximum(answers["prompt_length"], 1)).sum())


def by_length(lengths: Sequence[int], batch_size: int, seed: int) -> list[int]:
    """A random order in which the answers of a batch have about the same length, so that little is padding.

    It depends on nothing but its arguments: not on the number of processes, nor on what ran before a resume.
    """
    random = np.random.default_rng(seed)
    order, batches = random.permutation(len(lengths)), []
    for block in np.array_split(order, range(batch_size * SORTED_BATCHES, len(order), batch_size * SORTED_BATCHES)):
        block = block[np.argsort(-np.asarray(lengths)[block], kind="stable")]
        batches += np.array_split(block, range(batch_size, len(block), batch_size))
    # The one batch that may be smaller stays last.
    shuffled = [batches[i] for i in random.permutation(len(batches) - 1)] + batches[-1:]
    return np.concatenate(shuffled).tolist()


def collate(rows: list[dict[str, Any]], max_length: int, sources: list[str]) -> dict[str, Tensor]:
    """Pad on the right; labels are the answers' tokens, where a draft is to predict what the target wrote.

    `row` is a training text's number, for the cache of states; -1 for others.
    """
    ids = [torch.tensor(row["input_ids"][:max_length]) for row in rows]
    labels = [tokens.clone() for tokens in ids]
    for label, row in zip(labels, rows, strict=True):
        label[: max(row["prompt_length"], 1)] = IGNORED
    return {
        "input_ids": nn.utils.rnn.pad_sequence(ids, batch_first=True),
        "labels": nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED),
        "row": torch.tensor([row.get("row", -1) for row in rows]),
        "source": torch.tensor([sources.index(row["source"]) if row["source"] in sources else -1 for row in rows]),
    }
