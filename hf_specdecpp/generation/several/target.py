"""The target's side of a batch (`TargetOfRows`): rows share its passes and keep their own pace in a cache with holes.
`InStep` is the loop for processors that are asked about all rows at once.

A row that ends leaves the batch and is padded. Where no id ends texts, plain `generate()` goes on in such a row until
all rows have ended, and so do we (`stays`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.caches.batches import BatchText
from hf_specdecpp.caches.text import extended
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation import refusals
from hf_specdecpp.generation.decoding import AssistedDecoding, TargetSide
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.generation.text import Round, Text, Walk
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among
from hf_specdecpp.trees.tree import Chain


@dataclass(frozen=True)
class OutputsOfRow:
    """A row's part of what a pass returns; the layers of its cache say which windows attentions have."""

    logits: Tensor  # `[1, n, vocab]`, after the prompt those at its last token
    hidden_states: Any
    attentions: Any
    cache: Any


class TargetOfRows(TargetSide):
    """The target's side of several texts. `model_kwargs`: the forward's other arguments for all rows."""

    def __init__(
        self, model: CausalLM, texts: Sequence[Text], config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> None:
        super().__init__(model, texts, config)
        self.texts, self.places = list(texts), {id(text): place for place, text in enumerate(texts)}
        self.model_kwargs = self.states.asked_for(model_kwargs)
        self.text = BatchText(model, cache_among(model_kwargs), len(texts))
        self.held: dict[int, Any] = {}  # what the cache held of rows that have left, by place
        # As plain generation asks.
        self.pads = any(hasattr(each, "eos_token_id") for each in texts[0].criteria)
        for text in texts:
            text.goes_on = not self.pads
        is_users = getattr(self.text.cache, "_is_user_defined", False)  # as `generate()` has noted
        self.carries_cache, self.is_restored = config.return_dict_in_generate or is_users, False

    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        if not refusals.gives_positions(self.model, input_ids, self.model_kwargs):
            raise refusals.LateRefusalError(refusals.NO_BATCH.format(refusals.no_positions(self.model)))
        outputs = self.states.catch(self.model._prefill, input_ids, self.config, self.model_kwargs)
        refusals.check_prompt(outputs)
        mask = self.model_kwargs.get("attention_mask")
        self.prompt_mask = (torch.ones_like(input_ids) if mask is None else mask).bool().cpu()
        refusals.check_numbers(self.model, outputs.logits, self.prompt_mask)
        self.text.note(self.prompt_mask)
        self.positions = self.model_kwargs["position_ids"][:, -1].cpu() + 1
        self._hand_out(rounds, outputs)

    @property
    def forward_arguments(self) -> dict[str, Any]:
        return self.model_kwargs

    def enter(self, passes: CapturedTarget) -> None:
        passes.watch(self.generator.setup.drafter.reads)
        passes.begin(self.text.cache, self.text.valid.shape[1], self.text.valid, self.positions[:, None])

    def own_logits(self, texts: Sequence[Text], tokens: Tensor) -> Tensor:
        rounds = [Round(text, Chain(row[1:])) for text, row in zip(texts, tokens.tolist(), strict=True)]
        logits: Tensor = self.model(**self._inputs(rounds, _is_token(rounds)), return_dict=True).logits
        self.text.back()
        return logits

    def take_back(self, passes: CapturedTarget, texts: Sequence[Text], rows: Sequence[int]) -> None:
        lengths, prompt = torch.tensor([text.length - 1 for text in texts]), self.text.valid
        further = int(lengths.max()) - prompt.shape[1] if texts else 0
        if texts and (further or len(texts) < len(prompt)):
            valid = functional.pad(prompt[rows], (0, further), value=True)
            valid &= torch.arange(valid.shape[1]) < lengths[:, None]
            held = zip(rows, lengths.tolist(), strict=True)
            self.text.fill([passes.text.cache.held_of(row, length) for row, length in held], valid)
            self.positions = self.positions[rows] + lengths - prompt.shape[1]

    def hold(self, text: Text, held: Callable[[], Any]) -> None:
        if self.carries_cache:
            self.held[self.places[id(text)]] = held()

    def prepare(self, texts: Sequence[Text]) -> None:
        """Close gaps in the cache, and time a pass over one token of each row where the rounds do not tell it."""
        self.text.close_up()
        if len(texts) == len(self.texts):
            rounds = [Round(text, Chain()) for text in texts]
            self.time_plain_pass(texts[0], len(texts), lambda: self._inputs(rounds, _is_token(rounds)))

    def read(self, rounds: Sequence[Round]) -> None:
        is_token = _is_token(rounds)
        inputs = self._inputs(rounds, is_token)
        work, clock = self.work_clock(), time.perf_counter()
        outputs = self.states.catch(self.model, **inputs, return_dict=True)
        if self.device.type == "cpu":
            self.took = is_token.numel(), self.work_clock() - work, time.perf_counter() - clock
        self.text.note(is_token)
        self._hand_out(rounds, outputs)
        for each in rounds:
            each.width = is_token.shape[1]

    def _hand_out(self, rounds: Sequence[Round], outputs: Any) -> None:
        """Give each row its part of a pass."""
        states = self.states.by_row(len(rounds))
        width = max(len(each.tree) for each in rounds) + 1
        cache = SimpleNamespace(layers=self.text.layers)
        for place, each in enumerate(rounds):
            logits = outputs.logits[place : place + 1, -width:][:, : len(each.tree) + 1]
            each.text.states = states[place]
            hidden, attentions = self._hidden_states(outputs, place), self._attentions(outputs, place, each)
            each.outputs = OutputsOfRow(logits, hidden, attentions, cache)

    def keep(self, rounds: Sequence[Round]) -> None:
        for each in rounds:
            kept = each.emitted.kept
            if each.text.records.are_asked_for:
                each.text.records.add_states(each.outputs, kept, len(each.tree))
            if each.text.states is not None and not each.is_prompt:
                each.text.states = each.text.states[:, :kept]
        if not rounds[0].is_prompt:
            kept_of_rows = torch.tensor([each.emitted.kept for each in rounds])
            fed = torch.tensor([1 + len(each.tree) for each in rounds])
            self.text.keep(kept_of_rows, of=fed)
            self.positions += kept_of_rows

    def _inputs(self, rounds: Sequence[Round], is_token: Tensor) -> dict[str, Any]:
        """Forward arguments for each row's last token and candidates, then dummies: `is_token` `[rows, n]`."""
        count = is_token.shape[1]
        fed_rows = [[int(each.text.ids[0, -1]), *each.tree.candidates] for each in rounds]
        tokens = torch.tensor([row + row[-1:] * (count - len(row)) for row in fed_rows])
        positions = self.positions[:, None] + is_token.cumsum(dim=1) - 1
        kwargs = {
            **self.model_kwargs,
            "attention_mask": self.text.mask(is_token),
            "position_ids": positions.to(self.device),
            CACHE: self.text.cache,
        }
        inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
            tokens.to(self.device), next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return inputs

    def _hidden_states(self, outputs: Any, place: int) -> Any:
        """A row's part of the pass's hidden states, where they are asked for."""
        if not self.config.output_hidden_states:
            return None
        if several := [layer.dim() for layer in outputs.hidden_states if layer.dim() != 3]:
            raise refusals.LateRefusalError(
                f"{type(self.model).__name__} returns {several[0]}-dimensional hidden states, several for each token, "
                "which are not put together for a batch. Leave output_hidden_states out."
            )
        return tuple(layer[place : place + 1] for layer in outputs.hidden_states)

    def _attentions(self, outputs: Any, place: int, each: Round) -> Any:
        """A row's part of the pass's attentions, as if the row had been read alone, padding included."""
        if not self.config.output_attentions:
            return None
        attentions = [layer[place : place + 1] for layer in outputs.attentions]
        further = each.text.length - self.prompt_mask.shape[1]
        if not further or not attentions:  # sdpa attention has none to give
            return tuple(attentions)
        # The columns of the cache that are the row's, and their places in its text.
        num_candidates, fed = len(each.tree), attentions[0].shape[2]
        count = num_candidates + 1
        held = self.text.valid[place].clone()
        held[held.shape[0] - fed + count :] = False
        shown = functional.pad(self.prompt_mask[self.places[id(each.text)]], (0, further + num_candidates), value=True)
        rows = []
        for layer in attentions:
            row = layer.new_zeros(*layer.shape[:2], count, len(shown))
            row[..., shown.to(layer.device)] = layer[:, :, :count][..., held.to(layer.device)]
            rows.append(row)
        return tuple(rows)

    def stays(self, texts: Sequence[Text]) -> list[bool]:
        """Which rows go on.

        Example: no id ends texts, and rows 0 and 1 end by a stop string at lengths of 12 and 20. Plain generation goes
        on in row 0 up to 20 tokens, so it leaves once it has as many.
        """
        if self.pads:
            return [not text.finished for text in texts]
        return [text.length < self._last for text in texts]

    @property
    def _last(self) -> float:
        """The length at which all rows have ended, as far as is known."""
        return max(text.end_length for text in self.texts)

    def select(self, texts: Sequence[Text], places: Sequence[int]) -> None:
        for place in set(range(len(texts))) - set(places):
            self.hold(texts[place], partial(self.text.of_row, place))
        self.positions = self.positions[list(places)]
        self.text.select(places)

    def complete(self, texts: Sequence[Text]) -> None:
        """Leave the cache as plain generation leaves it: all but the last column, padding after a text included.

        What all rows hold is put together. The columns after that, where some texts had ended, are read again.
        """
        if not self.carries_cache:
            return
        sequences = self._sequences(texts)
        columns, shortest = sequences.shape[1] - 1, min(self._lengths(texts)) - 1
        further = columns - self.prompt_mask.shape[1]
        mask = functional.pad(self.prompt_mask, (0, further), value=True)
        self.text.restore([held for _, held in sorted(self.held.items())], mask[:, :shortest])
        if columns > shortest:
            kwargs = extended(self.model_kwargs, further)
            inputs: dict[str, Any] = self.model.prepare_inputs_for_generation(
                sequences[:, :-1], next_sequence_length=columns - shortest, is_first_iteration=False, **kwargs
            )
            self.model(**inputs, return_dict=True)
        self.is_restored = True

    def end(self) -> None:
        if not self.is_restored:
            self.text.cache.layers = [_UsedUp()]

    def output(self, texts: Sequence[Text]) -> Tensor | GenerateDecoderOnlyOutput:
        sequences = self._sequences(texts)
        if not self.config.return_dict_in_generate:
            return sequences
        for text in texts:
            text.records.cut(sequences.shape[1] - self.prompt_mask.shape[1])
        return TokenRecords.of_batch([text.records for text in texts]).output(sequences, self.text.cache)

    def _lengths(self, texts: Sequence[Text]) -> list[int]:
        """Of the texts; where no id ends them, some may have gone on for longer than it took the others to end."""
        if self.pads:
            return [text.length for text in texts]
        return [int(min(text.length, self._last)) for text in texts]

    def _sequences(self, texts: Sequence[Text]) -> Tensor:
        """The texts `[batch, length]`, those that ended early padded on the right."""
        lengths = self._lengths(texts)
        pad = self.config._pad_token_tensor
        rows = [
            functional.pad(text.ids[:, :length], (0, max(lengths) - length), value=0 if pad is None else int(pad))
            for text, length in zip(texts, lengths, strict=True)
        ]
        return torch.cat(rows)


def _is_token(rounds: Sequence[Round]) -> Tensor:
    """`[rows, n]` bool: which of the columns of a pass are the row's own. Dummies follow."""
    fed = torch.tensor([1 + len(each.tree) for each in rounds])
    return torch.arange(int(fed.max())) < fed[:, None]


class _UsedUp(DynamicLayer):
    """In the place of a batch's cache, whose rows have lost their places."""

    def update(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "This cache was used by an assisted batch, whose rows have lost their places. To carry a cache on, pass "
            "return_dict_in_generate=True and take the cache from what generate() returns."
        )

    def get_seq_length(self) -> int:
        raise ValueError("This cache was filled by an assisted batch and cannot be carried on. Leave it out.")


class InStep(AssistedDecoding):
    """The rows of a batch, a token of each at a time: processors are asked as plain `generate()` asks them.

    So a round ends for all rows where it ends for one that goes on, and texts that have not ended are equally long.

    Example: of three rows the target accepts two, three and one candidate. Each row gets two tokens, after which the
    third has nothing more to go on from.

    Args:
        processors: those of the call; rows have none of their own here.
    """

    side: TargetOfRows

    def __init__(self, processors: Callable[[Tensor, Tensor], Tensor], *parts: Any) -> None:
        super().__init__(*parts)
        self.processors = processors

    def verify(self, rounds: list[Round]) -> None:
        walks = {}
        for each in rounds:
            logits = each.outputs.logits[0, -len(each.tree) - 1 :]
            each.text.learn(each.rows, logits)
            walks[id(each.text)] = Walk(each.text, each.rows, logits)
        going = list(walks.values())
        while going:
            for walk, scores in zip(going, self._process(walks, going), strict=True):
                walk.step(scores)
            if all(walk.text.end_length <= walk.ids.shape[1] for walk in walks.values()):
                break  # rows that go on behind their end do so until all rows have ended
            if any(walk.node is None and not (walk.ended and self.side.pads) for walk in going):
                break
            going = [walk for walk in going if walk.node is not None]
        for each in rounds:
            each.verdict = walks[id(each.text)].verdict

    def _process(self, walks: dict[int, Walk], going: list[Walk]) -> list[Tensor]:
        """The processed scores `[vocab]` of those that are `going`. Texts that have ended are padded, as plain
        generation pads them; their scores count for nothing, and are 0."""
        places = [place for place, text in enumerate(self.texts) if walks.get(id(text)) in going]
        texts = [walks[id(text)].ids if id(text) in walks else text.ids for text in self.texts]
        length, pad = going[0].ids.shape[1], self.side.config._pad_token_tensor
        value = 0 if pad is None else int(pad)
        ids = [functional.pad(each, (0, length - each.shape[1]), value=value) for each in texts]
        raw = torch.stack([walk.raw for walk in going])
        scores = raw.new_zeros((len(texts), raw.shape[1])).index_copy(0, torch.tensor(places, device=raw.device), raw)
        return list(self.processors(torch.cat(ids), scores)[places])
