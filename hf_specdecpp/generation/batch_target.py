"""The target of a batch (`BatchTarget`). Its rows share forward passes, but advance independently, because the rejected
tokens of each row stay in the cache and are masked. `InStep` is the loop for processors that need all rows at once.

A row that has ended leaves the batch, and its output is padded. Without EOS ids plain `generate()` continues ended rows
until all rows have ended, and so do these (`OutputText.goes_on`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.caches.batches import BatchContext
from hf_specdecpp.caches.cached_context import extended
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation import refusals
from hf_specdecpp.generation.decoding import AssistedDecoding, TargetSide
from hf_specdecpp.generation.output_text import OutputText, Round, Walk
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.models.causal_lm import CACHE, cache_among
from hf_specdecpp.trees.tree import Chain


class BatchTarget(TargetSide):
    """The target of a batch."""

    def __init__(self, call: refusals.Call, texts: Sequence[OutputText]) -> None:
        super().__init__(call, texts)
        self.texts = list(texts)
        self.model_kwargs = self.states.requesting(call.model_kwargs)
        self.context = BatchContext(call.target, cache_among(call.model_kwargs), len(texts))
        self.ended_rows: dict[int, Any] = {}  # keys and values of rows that have left, by index
        for text in texts:  # on the condition of plain generation
            text.goes_on = not any(hasattr(each, "eos_token_id") for each in text.criteria)
        is_users = getattr(self.context.cache, "_is_user_defined", False)  # set by `generate()`
        self.carries_cache, self.is_restored = call.config.return_dict_in_generate or is_users, False

    def read_prompt(self, rounds: Sequence[Round]) -> None:
        input_ids = torch.cat([text.ids for text in self.texts])
        if not refusals.gives_positions(self.model, input_ids, self.model_kwargs):
            raise refusals.LateRefusalError(refusals.NO_BATCH.format(refusals.no_positions(self.model)))
        outputs = self.states.catch(self.model._prefill, input_ids, self.config, self.model_kwargs)
        mask = self.model_kwargs.get("attention_mask")
        refusals.check_prompt(self.model, outputs, mask)
        if cache_among(outputs) is not self.context.cache:
            raise refusals.LateRefusalError(refusals.NO_BATCH.format("its forward returns another cache than it gets"))
        self.prompt_mask = (torch.ones_like(input_ids) if mask is None else mask).bool().cpu()
        self.context.record_pass(self.prompt_mask)
        self.positions = self.model_kwargs["position_ids"][:, -1].cpu() + 1
        self._split(rounds, outputs)

    @property
    def forward_arguments(self) -> dict[str, Any]:
        return self.model_kwargs

    def copy_prompts(self, passes: CapturedTarget) -> None:
        passes.begin_texts(self.context.cache, self.context.valid.shape[1], self.context.valid, self.positions[:, None])

    def own_logits(self, texts: Sequence[OutputText], tokens: Tensor) -> Tensor:
        rounds = [Round(text, Chain(row[1:])) for text, row in zip(texts, tokens.tolist(), strict=True)]
        logits: Tensor = self.model(**self._inputs(rounds, _is_token(rounds)), return_dict=True).logits
        self.context.roll_back()
        return logits

    def copy_back(self, passes: CapturedTarget, texts: Sequence[OutputText], rows: Sequence[int]) -> None:
        lengths, prompt = torch.tensor([text.length - 1 for text in texts], device="cpu"), self.context.valid
        further = int(lengths.max()) - prompt.shape[1] if texts else 0
        if texts and (further or len(texts) < len(prompt)):
            valid = functional.pad(prompt[rows], (0, further), value=True)
            valid &= torch.arange(valid.shape[1], device="cpu") < lengths[:, None]
            rows_of = zip(rows, lengths.tolist(), strict=True)
            self.context.set_rows([passes.context.cache.keys_values_of(row, length) for row, length in rows_of], valid)
            self.positions = self.positions[rows] + lengths - prompt.shape[1]

    def save_row(self, text: OutputText, keys_values: Callable[[], Any]) -> None:
        if self.carries_cache:
            self.ended_rows[self.texts.index(text)] = keys_values()

    def prepare(self, texts: Sequence[OutputText]) -> None:
        """If many cache columns are masked, compact the cache. Until a row has ended, also call `time_plain_pass`."""
        self.context.close_up()
        if len(texts) == len(self.texts):
            rounds = [Round(text, Chain()) for text in texts]
            self.time_plain_pass(len(texts), lambda: self._inputs(rounds, _is_token(rounds)))

    def read(self, rounds: Sequence[Round]) -> None:
        is_token = _is_token(rounds)
        outputs = self.run(self._inputs(rounds, is_token), is_token.numel())
        if (known := outputs.logits.shape[1]) < is_token.shape[1]:
            reason = f"{type(self.model).__name__} returns logits after {known} of {is_token.shape[1]} tokens"
            raise refusals.LateRefusalError(refusals.NO_BATCH.format(reason))
        self.context.record_pass(is_token)
        self._split(rounds, outputs)
        for each in rounds:
            each.width = is_token.shape[1]

    def _split(self, rounds: Sequence[Round], outputs: Any) -> None:
        """Split the logits of a pass by row: set `outputs` of each round, and `states` of its sequence."""
        states = self.states.by_row(len(rounds))
        width = max(len(each.tree) for each in rounds) + 1  # of the prompt the logits at its last token only
        for place, each in enumerate(rounds):
            logits = outputs.logits[place : place + 1, -width:][:, : len(each.tree) + 1]
            each.text.states, each.outputs = states[place], SimpleNamespace(logits=logits)

    def commit(self, rounds: Sequence[Round]) -> None:
        for each in rounds:
            if each.text.states is not None and not each.is_prompt:
                each.text.states = each.text.states[:, : each.emitted.kept]
        if not rounds[0].is_prompt:
            kept_of_rows = torch.tensor([each.emitted.kept for each in rounds], device="cpu")
            fed = torch.tensor([1 + len(each.tree) for each in rounds], device="cpu")
            self.context.commit(kept_of_rows, of=fed)
            self.positions += kept_of_rows

    def _inputs(self, rounds: Sequence[Round], is_token: Tensor) -> dict[str, Any]:
        """Arguments of a pass over the last token and candidates of each row, padded where `is_token` is false."""
        count = is_token.shape[1]
        fed_rows = [[int(each.text.ids[0, -1]), *each.tree.candidates] for each in rounds]
        tokens = torch.tensor([row + row[-1:] * (count - len(row)) for row in fed_rows], device="cpu")
        positions = self.positions[:, None] + is_token.cumsum(dim=1) - 1
        kwargs = {
            **self.model_kwargs,
            "attention_mask": self.context.mask(is_token),
            "position_ids": positions.to(self.device),
            CACHE: self.context.cache,
        }
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens.to(self.device), next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return inputs

    def select(self, texts: Sequence[OutputText], places: Sequence[int]) -> None:
        for place in set(range(len(texts))) - set(places):
            self.save_row(texts[place], partial(self.context.row, place))
        self.positions = self.positions[list(places)]
        self.context.select(places)

    def complete(self) -> None:
        """If the cache is the user's or returned, fill it as plain generation does, with all columns but the last one.
        Columns up to the end of the shortest row are copied; later ones, with padding, are computed in one pass."""
        if not self.carries_cache:
            return
        sequences = self._sequences()
        columns, shortest = sequences.shape[1] - 1, min(self._lengths()) - 1
        further = columns - self.prompt_mask.shape[1]
        mask = functional.pad(self.prompt_mask, (0, further), value=True)
        self.context.restore([row for _, row in sorted(self.ended_rows.items())], mask[:, :shortest])
        if columns > shortest:
            kwargs = extended(self.model_kwargs, further)
            inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
                sequences[:, :-1], next_sequence_length=columns - shortest, is_first_iteration=False, **kwargs
            )
            self.model(**inputs, return_dict=True)
        self.is_restored = True

    def end(self) -> None:
        if not self.is_restored:
            self.context.cache.layers = [_UnusableLayer()]

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        sequences = self._sequences()
        if not self.config.return_dict_in_generate:
            return sequences
        count = sequences.shape[1] - self.prompt_mask.shape[1]
        return TokenRecords.of_batch([text.records for text in self.texts], count).output(sequences, self.context.cache)

    def _lengths(self) -> list[int]:
        """Lengths of the output rows without padding. Without EOS ids, rows are cut where the last row has ended."""
        if not self.texts[0].goes_on:
            return [text.length for text in self.texts]
        last = max(text.end_length for text in self.texts)
        return [int(min(text.length, last)) for text in self.texts]

    def _sequences(self) -> Tensor:
        """Prompts and emitted tokens `[batch, length]`; rows that ended early are padded on the right."""
        return self.padded([text.ids[0, :length] for text, length in zip(self.texts, self._lengths(), strict=True)])

    def padded(self, rows: list[Tensor]) -> Tensor:
        """Token ids `[batch, length]` of rows `[n]` of different length, padded on the right."""
        pad = self.config._pad_token_tensor
        return pad_sequence(rows, batch_first=True, padding_value=0 if pad is None else int(pad))


def _is_token(rounds: Sequence[Round]) -> Tensor:
    """`[rows, n]` bool: for a pass over n columns, which are the row's last token or candidates; others are padding."""
    fed = torch.tensor([1 + len(each.tree) for each in rounds], device="cpu")
    return torch.arange(int(fed.max()), device="cpu") < fed[:, None]


class _UnusableLayer(DynamicLayer):
    """The only layer that is left in the cache of a batch, unless restored: reusing the cache raises `ValueError`."""

    def get_seq_length(self, *_: Any, **__: Any) -> NoReturn:
        raise ValueError(
            "This cache was filled by an assisted batch, whose rows have lost their places, and cannot be carried on. "
            "Leave it out, or pass return_dict_in_generate=True and take the cache from what generate() returns."
        )

    update: Any = get_seq_length


class InStep(AssistedDecoding):
    """The loop of a batch whose rows advance together, so that processors are called as in plain `generate()`.

    A round ends for all rows when it ends for one unfinished row, so all unfinished rows have equal length.

    Example: the target would accept two, three and one candidate in three rows. Each row gets two tokens, because in
    the third row the second token is not a candidate.

    Args:
        processors: the call's logits processors, called for all rows at once.
    """

    side: BatchTarget

    def __init__(self, processors: Callable[[Tensor, Tensor], Tensor], *parts: Any) -> None:
        super().__init__(*parts)
        self.processors = processors

    def _finish_round(self, rounds: list[Round]) -> None:
        walks = []
        for each in rounds:
            each.text.record_corrections(each.rows, each.outputs.logits[0])
            walks.append(Walk(each.text, each.rows, each.outputs.logits[0]))
        going = walks
        while going:
            for walk, scores in zip(going, self._process(walks, going), strict=True):
                walk.choose(scores)
            if all(walk.text.end_length <= walk.ids.shape[1] for walk in walks):
                break  # rows that continue after their end do so only until all rows have ended
            if any(walk.node is None and (walk.text.goes_on or not walk.ended) for walk in going):
                break
            going = [walk for walk in going if walk.node is not None]
        for each, walk in zip(rounds, walks, strict=True):
            each.result, each.is_verified = walk.result, True
        super()._finish_round(rounds)

    def _process(self, walks: list[Walk], going: list[Walk]) -> list[Tensor]:
        """The next processed scores `[vocab]` of each unfinished row (`going`, a part of `walks`). As in plain
        generation, processors get all rows of the call: ended rows are padded, and their scores are 0, and unused."""
        places, latest = [self.texts.index(walk.text) for walk in going], {walk.text: walk.ids for walk in walks}
        together = self.side.padded([latest.get(text, text.ids)[0] for text in self.texts])
        raw = torch.stack([walk.raw for walk in going])
        scores = raw.new_zeros((len(together), raw.shape[1]))
        scores[places] = raw
        found = self.processors(together, scores)[places]
        for place, walk in zip(places, going, strict=True):
            walk.ids = together[place : place + 1]  # to which processors may have written
        return list(found)
