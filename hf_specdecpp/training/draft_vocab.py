"""The draft vocabulary: the tokens that the target writes most, so that the draft's LM head can be small.

Drafting stays lossless: q is zero on every other token, so those are never proposed, and the target writes them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch import Tensor

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.vocabulary import tokenizer_of

CONVERSATION = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}]


def choose(
    answers: Dataset, size: int, always: Sequence[int], num_ids: int, prompts: Sequence[Sequence[int]] = ()
) -> Tensor:
    """The `size` most frequent tokens of the answers, ascending.

    Places that are left go to the most frequent tokens of the prompts, whose names and words answers repeat, and then
    to the lowest ids: tokenizers number their tokens about by frequency.

    Args:
        answers: rows with `input_ids` and `prompt_length`.
        always: token ids that are kept however rare they are.
        num_ids: rows of the draft's LM head.
        prompts: token ids of prompts, also of those that were not answered.

    Raises:
        ValueError: `size` is not between the number of tokens that are always kept and `num_ids`.
    """
    kept = check_size(size, always, num_ids)
    asked = np.bincount(np.concatenate([*map(np.asarray, prompts), []]).astype(np.int64), minlength=num_ids)[:num_ids]
    counts = answer_counts(answers, num_ids)[:num_ids] * (asked.sum() + 1) + asked
    counts[kept] = np.iinfo(counts.dtype).max
    # Stable, so that tokens that are equally frequent go by their id.
    return torch.as_tensor(np.sort(np.argsort(-counts, kind="stable")[:size]))


def check_size(size: int, always: Sequence[int], num_ids: int) -> list[int]:
    """Those of the tokens `always` that the draft has, ascending; `ValueError` as `choose` raises it."""
    kept = sorted({token for token in always if token < num_ids})
    if not len(kept) < size < num_ids:
        raise ValueError(
            f"distill.draft_vocab_size={size} must be over {len(kept)} (the end-of-text and chat tokens, always kept) "
            f"and under {num_ids} (the draft's whole vocabulary). Some thousands are usual; leave it out to keep all."
        )
    return kept


def most_ids(target: CausalLM, draft: CausalLM) -> int:
    """How many token ids both LM heads have."""
    return min(model.get_output_embeddings().weight.shape[0] for model in (target, draft))


def covered_mass(token_ids: Tensor, answers: Dataset) -> float:
    """The share of the answers' tokens that the draft vocabulary has: no draft with it can be accepted more often."""
    counts = answer_counts(answers, int(token_ids.max()) + 1)
    return float(counts[token_ids.numpy()].sum() / counts.sum())


def answer_counts(answers: Dataset, num_ids: int) -> np.ndarray:
    """How often each token id occurs in the answers, `[>= num_ids]`."""
    counts = np.zeros(num_ids, dtype=np.int64)
    for batch in answers.select_columns(["input_ids", "prompt_length"]).iter(batch_size=1000):
        pairs = zip(batch["input_ids"], batch["prompt_length"], strict=True)
        tokens = np.concatenate([np.asarray(ids[length:], dtype=np.int64) for ids, length in pairs])
        found = np.bincount(tokens, minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    return counts


def always_kept(target: CausalLM) -> list[int]:
    """The ids that end the target's texts, and the special tokens that its chat template puts around an answer."""
    ends = [target.generation_config.eos_token_id, target.config.get_text_config(decoder=True).eos_token_id]
    kept = {token for end in ends for token in (end if isinstance(end, list) else [end]) if token is not None}
    tokenizer = tokenizer_of(target.config.name_or_path)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        kept.add(tokenizer.eos_token_id)
    if tokenizer is not None and tokenizer.chat_template is not None:
        rendered: Any = tokenizer.apply_chat_template(CONVERSATION, tokenize=True, return_dict=True)
        kept |= set(rendered["input_ids"]) & set(tokenizer.all_special_ids)
    return sorted(kept)
