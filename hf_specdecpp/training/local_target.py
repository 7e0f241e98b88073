"""The target answers on this machine, in batches."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessor, LogitsProcessorList

from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.encoding import Codec, Encoded
from hf_specdecpp.training.processes import process_state
from hf_specdecpp.typing import CausalLM


class LocalTarget:
    """Answers prompts with `model.generate`; the same prompts and seed give the same answers.

    Of the target's own generation settings only the tokens that end an answer are kept: temperature and top-k alone
    shape p, as they do in the labels of the head.
    """

    def __init__(self, config: TrainingConfig, codec: Codec) -> None:
        self.settings, self.codec = config.rollouts, codec
        self.device = process_state().device
        self.model: CausalLM = AutoModelForCausalLM.from_pretrained(config.target, dtype="auto").eval().to(self.device)
        if self.device.type == "cpu" and self.model.dtype.itemsize < 4:
            self.model.float()  # half precision is slow there
        sampling = {"temperature": self.settings.temperature, "top_k": self.settings.top_k}
        self.padding = self.codec.eos[0] if self.codec.eos else 0
        self.model.generation_config = GenerationConfig(
            do_sample=self.settings.temperature > 0,
            eos_token_id=self.codec.eos or None,
            pad_token_id=self.padding,
            **(sampling if self.settings.temperature > 0 else {}),
        )

    def __call__(self, items: list[Encoded], seed: int) -> Iterator[tuple[int, list[int], bool]]:
        """Index of an item, the new tokens, and whether the target ended them; in any order.

        Raises:
            ValueError: the target computes NaN.
        """
        torch.manual_seed(seed)
        for batch in self._batches(items):
            output = self._generate([items[index] for index in batch])
            for index, tokens in zip(batch, output.tolist(), strict=True):
                yield index, *self.codec.trim(tokens)

    def _batches(self, items: list[Encoded]) -> Iterator[list[int]]:
        """Indices of prompts of like length; those whose answers the context may cut short go alone."""
        order = sorted(range(len(items)), key=lambda index: len(items[index].input_ids))
        wanted = self.settings.max_new_tokens
        roomy = [index for index in order if self.codec.room(items[index], wanted) == wanted]
        for start in range(0, len(roomy), self.settings.batch_size):
            yield roomy[start : start + self.settings.batch_size]
        yield from ([index] for index in order[len(roomy) :])

    @torch.inference_mode()
    def _generate(self, batch: list[Encoded]) -> Tensor:
        """New tokens `[batch, length]`, padded on the right."""
        longest = max(len(item.input_ids) for item in batch)
        padded = [[self.padding] * (longest - len(item.input_ids)) + item.input_ids for item in batch]
        mask = [[0] * (longest - len(item.input_ids)) + [1] * len(item.input_ids) for item in batch]
        output = self.model.generate(
            torch.tensor(padded, device=self.device),
            attention_mask=torch.tensor(mask, device=self.device),
            max_new_tokens=min(self.codec.room(item, self.settings.max_new_tokens) for item in batch),
            logits_processor=LogitsProcessorList([_RefuseNaN(self.model)]),
        )
        return output[:, longest:]


class _RefuseNaN(LogitsProcessor):
    """Greedy search would go on with NaN, and write tokens that mean nothing."""

    def __init__(self, model: CausalLM) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002 - the interface
        if scores.isnan().any():
            raise ValueError(
                f"The target {self.model.config.name_or_path!r} computed NaN logits in {self.model.dtype} on "
                f"{self.model.device}, so its answers would mean nothing. Check its weights; a model that overflows in "
                "float16 needs bfloat16 or float32. Finished shards are kept."
            )
        return scores
