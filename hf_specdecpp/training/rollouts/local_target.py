"""The target answers on this machine, in batches."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from hf_specdecpp.models.causal_lm import CACHE, takes_positions
from hf_specdecpp.models.checks import check_target
from hf_specdecpp.sampling.randomness import draw_rows, seed_of
from hf_specdecpp.texts.encoding import Codec, Encoded, padded
from hf_specdecpp.texts.sampling import Sampling
from hf_specdecpp.training.configuration import TrainingConfig
from hf_specdecpp.training.models import load_target

SHRINK_AT = 0.85  # share of answers still being written at which the others leave the batch


class LocalTarget:
    """Answers prompts in batches; the same prompts and seed give the same answers.

    Of the target's own generation settings only the tokens that end an answer are kept: temperature and top-k alone
    shape p, as they do in the labels of the head. Unlike in `generate()`, finished answers leave the batch, and a token
    is drawn among the top-k without sorting the vocabulary: two to three times as many tokens a second.
    """

    def __init__(self, config: TrainingConfig, codec: Codec) -> None:
        self.settings, self.codec = config.rollouts, codec
        self.model = load_target(config)
        check_target(self.model)
        self.takes_positions = takes_positions(self.model)

    def __call__(
        self, items: list[Encoded], temperature: float, seed: int, done: Set[int] = frozenset()
    ) -> Iterator[tuple[int, list[int], bool]]:
        """Index of an item, the new tokens, and whether the target ended them; in any order.

        Args:
            done: indices of items that need no answer. Batches stay as they are: one that has others, too, is answered
                whole, so that its answers are those of a run that was not interrupted.

        Raises:
            ValueError: the target computes NaN.
        """
        order = sorted(range(len(items)), key=lambda index: len(items[index].input_ids))  # little padding
        for start in range(0, len(order), self.settings.batch_size):
            batch = order[start : start + self.settings.batch_size]
            if done >= set(batch):
                continue
            torch.manual_seed(seed_of(seed, start))
            sampling = Sampling(temperature, self.settings.top_k)
            for row, tokens, finished in self._answer([items[index] for index in batch], sampling):
                yield batch[row], tokens, finished

    @torch.inference_mode()
    def _answer(self, batch: list[Encoded], sampling: Sampling) -> Iterator[tuple[int, list[int], bool]]:
        """Row, new tokens and whether they ended, each as soon as it is complete."""
        room = [self.codec.room(item, self.settings.max_new_tokens) for item in batch]
        answers: list[list[int]] = [[] for _ in batch]
        cache, rows = DynamicCache(config=self.model.config.get_text_config(decoder=True)), list(range(len(batch)))
        length = max(len(item.input_ids) for item in batch) + max(room)
        cache.layers = [_Preallocated(length) if type(layer) is DynamicLayer else layer for layer in cache.layers]
        prompts = padded([item.input_ids for item in batch])
        ids, mask = (prompts[name].to(self.model.device) for name in ("input_ids", "attention_mask"))
        writing = set(rows)
        while writing:
            logits = self._forward(ids, mask, cache)
            ids = self._draw(logits, sampling)[:, None]
            mask = torch.cat((mask, mask.new_ones(len(rows), 1)), dim=1)
            for row, token in zip(rows, ids[:, 0].tolist(), strict=True):
                if row not in writing:
                    continue
                answers[row].append(token)
                if token in self.codec.eos or len(answers[row]) == room[row]:
                    writing.remove(row)
                    yield row, answers[row], token in self.codec.eos
            if writing and len(writing) < SHRINK_AT * len(rows):
                kept = torch.tensor([place for place, row in enumerate(rows) if row in writing], device=ids.device)
                cache.batch_select_indices(kept)
                ids, mask, rows = ids[kept], mask[kept], [row for row in rows if row in writing]

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> Tensor:
        """Logits `[batch, vocab]` after the last token."""
        positions: dict[str, Any] = {}
        if self.takes_positions:
            # At most the last one: an answer that has ended at the context may stay in the batch for a while.
            last = self.codec.context - 1 if self.codec.context else None
            positions["position_ids"] = (mask.cumsum(-1) - 1).clamp(0, last)[:, -ids.shape[1] :]
        return self.model(
            ids, attention_mask=mask, use_cache=True, logits_to_keep=1, **{CACHE: cache}, **positions
        ).logits[:, -1]

    def _draw(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """A token for each row of `[batch, vocab]`."""
        if bool(logits.sum().isnan()):  # infinities of both signs are NaN, too
            raise ValueError(
                f"The target {self.model.config.name_or_path!r} computed NaN logits in {self.model.dtype} on "
                f"{self.model.device}, so its answers would mean nothing. Check its weights; a model that overflows in "
                "float16 needs bfloat16 or float32. Finished shards are kept."
            )
        if sampling.greedy:
            return logits.argmax(-1)
        if not sampling.top_k:
            return draw_rows((logits.float() / sampling.temperature).softmax(-1))
        best, tokens = logits.float().topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
        return tokens.gather(-1, torch.multinomial((best / sampling.temperature).softmax(-1), 1))[:, 0]


class _Preallocated(DynamicLayer):
    """A cache layer with room from the start: at long answers most of the time would go into copying it at every step.

    Args:
        length: most tokens that it will hold.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length = length

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *args: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shapes = [(*new.shape[:2], self.length, new.shape[-1]) for new in (key_states, value_states)]
            self.rooms = [key_states.new_empty(shape) for shape in shapes]
        begin = self.get_seq_length()
        end = begin + key_states.shape[-2]
        for room, new in zip(self.rooms, (key_states, value_states), strict=True):
            room[:, :, begin:end] = new
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        end = self.get_seq_length()
        self.rooms = [room[indices] for room in self.rooms]
        self.keys, self.values = (room[:, :, :end] for room in self.rooms)
