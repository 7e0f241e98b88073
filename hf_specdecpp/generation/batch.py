"""Assisted decoding of several sequences at once: rows draft on their own, and share the target's passes.

The cache is appended to with holes. Each pass feeds every row the same number of columns; a row with fewer candidates
gets dummies behind them, and what it rejects stays in its place. `valid` says which columns are tokens of a row. They
are in the order of the text, so that attention needs no more than the usual mask with one entry a column, and
positions count a row's own tokens. Once a fifth of the longest row's columns are holes, all are moved together.

A row that ends leaves the batch and is padded, also where plain `generate()`, for want of an id that ends texts, would
go on in it until all rows have ended.

Example: two rows hold 4 tokens each, and are fed 3 columns: the first its last token and two candidates, the second its
last token, one candidate and a dummy. The first accepts nothing, the second its candidate. Both keep two columns:
`valid` gets 1 0 for the first, and 1 1 for the second.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.drafting.chain import Chain
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding, pass_seconds, seconds_since
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.conditioning import TargetStates

MOST_HOLES = 0.2  # of the columns that the longest row would need


class BatchDecoding:
    """One `generate()` call of an attached target for several sequences.

    Args:
        target: the model that decides.
        generators: one for each row.
        criteria, config: as prepared by `generate()`.
        model_kwargs: the forward's other arguments for all rows.
    """

    def __init__(
        self,
        target: CausalLM,
        generators: list[SpecDecPPCandidateGenerator],
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.target, self.config, self.model_kwargs = target, config, model_kwargs
        self.rows = [_Row(target, each, criteria, config, None, {}) for each in generators]
        self.caught = TargetStates(target, generators[0].setup.drafter.fusion)
        self.products = generators[0].products

    def run(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after `input_ids` `[batch, length]`, padded on the left: what `generate()` returns."""
        try:
            with self.caught:
                self._generate(input_ids)
        finally:
            self.model_kwargs["past_key_values"].layers = [_UsedUp()]
        return self._output()

    def _generate(self, input_ids: Tensor) -> None:
        """The prompts' pass, then rounds until all rows have ended."""
        begin = time.perf_counter()
        with self.products:
            outputs = self.target._prefill(input_ids, self.config, self.model_kwargs)
            cache: Cache = outputs.past_key_values
            mask = self.model_kwargs.get("attention_mask")
            self.valid = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
            self.positions = self.model_kwargs["position_ids"][:, -1] + 1
            self.texts, self.active = list(input_ids.split(1)), list(range(len(self.rows)))
            finished = self._verify([Chain([], []) for _ in self.rows], outputs)
            self._leave(cache, finished)
        for row in self.rows:
            row.stats.plain_passes += 1
            row.stats.prompt_seconds = (time.perf_counter() - begin) / len(self.rows)
        if self.active:
            self._compare_passes(cache)
        with self.products:
            while self.active:
                self._round(cache)

    def _round(self, cache: Cache) -> None:
        """Draft for every row, one target pass, verify; rows that have ended leave."""
        rows = [self.rows[index] for index in self.active]
        texts = [self.texts[index] for index in self.active]
        chains = [row.generator.draft(text, states=row.states) for row, text in zip(rows, texts, strict=True)]
        drafted = time.perf_counter()
        count = max(len(chain.tokens) for chain in chains)
        fed = torch.tensor([1 + len(chain.tokens) for chain in chains], device=self.valid.device)
        outputs = self.target(**self._inputs(chains, fed, count, cache), return_dict=True)
        target_seconds = seconds_since(drafted, self.valid.device)
        finished = self._verify(chains, outputs)
        kept = torch.tensor([row.kept for row in rows], device=self.valid.device)
        most = int(kept.max())
        cache.crop(most - count - 1)
        self.valid = torch.cat((self.valid, torch.arange(most, device=kept.device) < kept[:, None]), dim=1)
        self.positions += kept
        self._leave(cache, finished)
        overhead = time.perf_counter() - drafted - target_seconds
        for row in rows:
            row.stats.target_seconds += target_seconds / len(rows)
            row.stats.overhead_seconds += overhead / len(rows)

    def _compare_passes(self, cache: Cache) -> None:
        """Note each row's share of a pass over one token a row, measured once a target and number of rows."""
        count = len(self.active)

        def inputs() -> dict[str, Any]:
            return self._inputs([Chain([], [])] * count, torch.ones_like(self.positions), 0, cache)

        plain, same = (seconds / count for seconds in pass_seconds(self.target, self.rows[0].generator, inputs, count))
        self.caught.clear()
        for row in self.rows:
            row.stats.plain_pass_seconds, row.stats.same_pass_seconds = plain, same

    def _inputs(self, chains: list[Chain], fed: Tensor, count: int, cache: Cache) -> dict[str, Any]:
        """Forward arguments for each row's last token and candidates, `count + 1` columns; dummies are masked."""
        device = self.valid.device
        last = [int(self.texts[index][0, -1]) for index in self.active]
        fed_rows = [[token, *chain.tokens] for token, chain in zip(last, chains, strict=True)]
        tokens = torch.tensor([row + row[-1:] * (count + 1 - len(row)) for row in fed_rows], device=device)
        places = torch.arange(count + 1, device=device)
        positions = self.positions[:, None] + places.minimum(fed[:, None] - 1)
        mask = torch.cat((self.valid, places < fed[:, None]), dim=1).long()
        kwargs = {**self.model_kwargs, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        inputs: dict[str, Any] = self.target.prepare_inputs_for_generation(
            tokens, next_sequence_length=count + 1, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count + 1
        return inputs

    def _verify(self, chains: list[Chain], outputs: Any) -> list[bool]:
        """Verify each row's chain as if it were alone, and note which rows have ended."""
        states, finished = self.caught.take(), []
        width = max(len(chain.tokens) for chain in chains) + 1
        for place, (index, chain) in enumerate(zip(self.active, chains, strict=True)):
            logits = outputs.logits[place : place + 1, -width:][:, : len(chain.tokens) + 1]
            own = None if states is None else states[place : place + 1]
            self.texts[index], ends = self.rows[index].verify(self.texts[index], chain, logits, own)
            finished.append(ends)
        return finished

    def _leave(self, cache: Cache, finished: list[bool]) -> None:
        """Take the rows that have ended out of the batch, and move columns together where there are many holes."""
        if any(finished):
            places = [place for place, ends in enumerate(finished) if not ends]
            kept = torch.tensor(places, dtype=torch.long, device=self.valid.device)
            self.active = [index for index, ends in zip(self.active, finished, strict=True) if not ends]
            self.valid, self.positions = self.valid[kept], self.positions[kept]
            if self.active:
                cache.batch_select_indices(kept)
        if self.active:
            needed = int(self.valid.sum(1).max())
            if self.valid.shape[1] > (1.0 + MOST_HOLES) * needed:
                self.valid = compact(cache, self.valid, needed)

    def _output(self) -> Tensor | GenerateDecoderOnlyOutput:
        longest = max(text.shape[1] for text in self.texts)
        pad = self.config._pad_token_tensor
        texts = [
            functional.pad(text, (0, longest - text.shape[1]), value=0 if pad is None else int(pad))
            for text in self.texts
        ]
        sequences = torch.cat(texts)
        if not self.config.return_dict_in_generate:
            return sequences
        return TokenRecords.of_batch([row.records for row in self.rows]).output(sequences)


class _Row(AssistedDecoding):
    """A row's decoding: it verifies, emits and stops as if the row were alone. Passes and cache are the batch's.

    Attributes:
        kept: how many of the columns that it was fed last stay in the cache.
    """

    kept = 0

    def verify(self, text: Tensor, chain: Chain, logits: Tensor, states: Tensor | None) -> tuple[Tensor, bool]:
        """The text after a pass, and whether it has ended.

        Args:
            text: `[1, length]`.
            chain: k candidates.
            logits: `[1, k + 1, vocab]`; after the prompt those at its last token.
            states: `[1, n, width]` of the target at what it read, for a conditioned draft.
        """
        return self._select(text, chain.tokens, chain.scores, SimpleNamespace(logits=logits, states=states))

    def _settle(self, outputs: Any, kept: int, _num_candidates: int, _path: list[int] | None) -> None:
        self.kept = kept
        if outputs.states is not None:
            self.states = outputs.states[:, :kept] if self.stats.generated else outputs.states


def compact(cache: Cache, valid: Tensor, width: int) -> Tensor:
    """Move each row's tokens to the right end of `width` columns, in place.

    Example: rows 1 0 1 and 1 1 1 of `valid` become 0 1 1 and 1 1 1 where the width is 3, their tokens in the old order.

    Returns:
        `valid` `[batch, width]`.
    """
    order = valid.long().argsort(dim=1, stable=True)[:, -width:]
    layers: list[Any] = cache.layers
    for layer in layers:
        for name in ("keys", "values"):
            held = getattr(layer, name)
            index = order[:, None, :, None].to(held.device).expand(-1, held.shape[1], -1, held.shape[3])
            setattr(layer, name, held.gather(2, index))
    return valid.gather(1, order)


class _UsedUp(DynamicLayer):
    """In the place of a batch's cache, whose rows have lost their places."""

    def update(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "This cache was filled by an assisted batch, whose rows ended at different lengths, so it cannot be "
            "carried on. Pass the whole text without it."
        )

    def get_seq_length(self) -> int:
        raise ValueError("This cache was filled by an assisted batch and cannot be carried on. Leave it out.")
