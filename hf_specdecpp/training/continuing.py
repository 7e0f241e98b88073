"""`specdecpp train --continue ASSISTANT`: teach a draft on answers that its target wrote before, as `learn` does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.files import Repository
from hf_specdecpp.hub.repository import load_config
from hf_specdecpp.learning.kept import kept_of
from hf_specdecpp.learning.learner import STEP, Lesson
from hf_specdecpp.models.loading import load_model
from hf_specdecpp.texts.encoding import Codec
from hf_specdecpp.texts.prompts import read_prompts

logger = logging.get_logger("hf_specdecpp")

AT_ONCE = 100_000  # tokens whose states are in memory
PASSES = 3  # over the texts


def go_on(assistant: str, data: Sequence[str], output: Path, target: str | None = None) -> Iterator[Lesson]:
    """Teach the draft of an assistant on the answers of files or data sets, and write the assistant that comes of it.

    The target reads each answer once. They are learned from in parts of about `AT_ONCE` tokens, so memory is bounded.
    The acceptance head stays as it is.

    Args:
        assistant: Hub id or folder of its repository.
        data: as in `read_prompts`, of which rows with an `answer` or with one at the end of `messages` count.
        output: a new or empty folder.
        target: where the target is, by default what the repository names.

    Yields:
        What each part did.

    Raises:
        ValueError: there are no answers, the draft does not learn, or nothing that it learned helped.
    """
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty, and its files would be mixed with new ones. Name a new folder.")
    name = target or load_config(Repository(assistant)).target_id
    if name is None:
        raise ValueError(f"{assistant} does not name its target. Name it: --target ID_OR_FOLDER.")
    texts = _answered(data, Codec.from_pretrained(name))
    model = load_model(name)
    taught = SpecDecPPAssistant.from_pretrained(assistant, target=model)
    drafter, kept, helped = taught.ready_drafter(), taught.memory.texts, False
    kept.most = 2 * AT_ONCE
    for part in _parts(texts):
        kept.clear()
        for tokens, begin in part:
            if (text := kept_of(model, drafter.reads, tokens, begin)) is not None:
                kept.add(text)
        lesson = taught.learn(steps=math.ceil(PASSES * len(kept) / STEP))
        helped |= lesson.is_kept
        yield lesson
    if not helped:
        raise ValueError(
            f"Nothing of what the draft learned from {len(texts)} answers helped on those held out, so {output} is not "
            "written. Give more answers, or others than it was trained on."
        )
    taught.save_pretrained(output)


def _answered(data: Sequence[str], codec: Codec) -> list[tuple[Tensor, int]]:
    """The tokens `[n]` of each answered prompt, and where its answer begins."""
    prompts = [prompt for source in data for prompt in read_prompts(source)]
    answered = [prompt for prompt in prompts if prompt.answer]
    if len(answered) < 2:
        raise ValueError(
            f"{len(answered)} of {len(prompts)} rows of {', '.join(data)} have an answer, and two are the least: one "
            'to learn from and one to measure. Give rows such as {"prompt": "...", "answer": "..."}, or messages that '
            "end with the assistant's."
        )
    if len(answered) < len(prompts):
        logger.warning(f"{len(prompts) - len(answered)} of {len(prompts)} rows have no answer and are left out.")
    texts = []
    for prompt in answered:
        item = codec.encode(prompt)
        tokens, _ = codec.read_answer(item, str(prompt.answer), finished=True)
        whole = torch.tensor(item.input_ids + tokens)[: codec.context]
        if 0 < len(item.input_ids) < len(whole):
            texts.append((whole, len(item.input_ids)))
    return texts


def _parts(texts: Sequence[tuple[Tensor, int]]) -> Iterator[list[tuple[Tensor, int]]]:
    """Parts of the texts, of at least `AT_ONCE` tokens on average where there are so many."""
    count = sum(len(tokens) for tokens, _ in texts)
    parts = max(count // AT_ONCE, 1)
    for place in range(parts):
        yield list(texts[place * len(texts) // parts : (place + 1) * len(texts) // parts])
