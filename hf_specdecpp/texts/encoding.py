"""Tokens of prompts, with the target's chat template, and of answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase
from transformers.utils import logging

from hf_specdecpp.models.loading import load_model_config, load_tokenizer
from hf_specdecpp.texts.prompts import Prompt

logger = logging.get_logger(__name__)


@dataclass
class Encoded:
    """A prompt, its text with the chat template, and the tokens of that text."""

    prompt: Prompt
    text: str
    input_ids: list[int]


@dataclass
class Codec:
    """Config and tokenizer of a target, to encode prompts and answers without loading its weights."""

    config: Any
    tokenizer: PreTrainedTokenizerBase
    eos: list[int]  # ids that end an answer; may be empty
    context: int | None  # maximum length of prompt and answer in tokens, if the target has a limit

    @classmethod
    def from_pretrained(cls, target: str) -> Codec:
        config, tokenizer = load_model_config(target), load_tokenizer(target)
        try:
            eos = GenerationConfig.from_pretrained(target).eos_token_id
        except OSError:  # not every repository has a generation_config.json
            eos = config.get_text_config().eos_token_id
        ids = [eos] if isinstance(eos, int) else list(eos or [])
        if tokenizer.eos_token_id in ids:  # first: the token that `read_answer` appends
            ids.sort(key=lambda token: token != tokenizer.eos_token_id)
        context = getattr(config.get_text_config(), "max_position_embeddings", None)  # state-space models have none
        return cls(config, tokenizer, ids, context)

    def encode(self, prompt: Prompt) -> Encoded:
        """Return the text and tokens of a prompt, with the target's chat template if it has one. `ValueError` if the
        template refuses the conversation, or a conversation of several messages has no template."""
        if self.tokenizer.chat_template is None and len(prompt.messages) > 1:
            raise ValueError(
                f"Prompt {prompt.id!r} is a conversation of {len(prompt.messages)} messages, but the target's "
                "tokenizer has no chat template to write it with. Give plain prompts, or a chat model."
            )
        text = rendered(self.tokenizer, prompt.messages, f"prompt {prompt.id!r}")
        return Encoded(prompt, text, tokens_of(self.tokenizer, text))

    def encode_all(self, prompts: list[Prompt]) -> list[Encoded]:
        """Encode the prompts that leave room for an answer; a warning counts the others. `ValueError` if none does."""
        bar = logging.tqdm(prompts, desc="encoding prompts", disable=len(prompts) < 5000)
        encoded = [self.encode(prompt) for prompt in bar]
        kept = [item for item in encoded if self.num_fitting(item) > 0]
        if encoded and not kept:
            shortest = min(len(item.input_ids) for item in encoded)
            raise ValueError(
                f"Each of the {len(encoded)} prompts fills the target's context of {self.context} tokens: the shortest "
                f"has {shortest}. Give shorter prompts, or a target with a longer context."
            )
        if len(kept) < len(encoded):
            logger.warning(
                f"{len(encoded) - len(kept)} of {len(encoded)} prompts leave no room for an answer in the target's "
                f"context of {self.context} tokens and were left out."
            )
        return kept

    def num_fitting(self, item: Encoded, wanted: int = 1) -> int:
        """The number of answer tokens that fit into the context, at most `wanted`; below 1 if the prompt fills it."""
        return wanted if self.context is None else min(wanted, self.context - len(item.input_ids))

    def read_answer(self, item: Encoded, answer: str, finished: bool) -> tuple[list[int], bool]:
        """Tokenise an answer. Also returns whether an end-of-sequence token ends the tokens (added if `finished`)."""
        whole, length = tokens_of(self.tokenizer, item.text + answer), len(item.input_ids)
        # Tokenised with the prompt, as some tokenizers treat the beginning of a text differently; alone if a token
        # would cross the boundary.
        together = whole[:length] == item.input_ids
        tokens = whole[length:] if together else self.tokenizer(answer, add_special_tokens=False).input_ids
        for place, token in enumerate(tokens, 1):
            if token in self.eos:  # some servers include the end-of-sequence token in the text
                return tokens[:place], True
        return (tokens + self.eos[:1] if finished else tokens), finished


def rendered(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], name: str = "this conversation"
) -> str:
    """Return the text of a conversation up to the next answer's beginning; without a chat template, a line per message.
    `ValueError` if the template refuses the conversation, called `name` in the error."""
    if tokenizer.chat_template is None:
        return "\n".join(message["content"] for message in messages)
    try:
        text: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"The model's chat template refuses {name} with the roles {roles}: {error}.") from error
    return text


def tokens_of(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenise a text from `rendered`, without special tokens if a chat template has added them already."""
    return tokenizer(text, add_special_tokens=tokenizer.chat_template is None).input_ids


def padded(texts: Sequence[list[int]], pad: int = 0) -> dict[str, Tensor]:
    """Pad sequences on the left: `input_ids` and `attention_mask`, both `[batch, longest]`.

    Example: [[5, 6, 7], [8]] becomes ids [[5, 6, 7], [0, 0, 8]] and mask [[1, 1, 1], [0, 0, 1]]."""
    longest = max(map(len, texts))
    ids = [[pad] * (longest - len(text)) + text for text in texts]
    mask = [[0] * (longest - len(text)) + [1] * len(text) for text in texts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}
