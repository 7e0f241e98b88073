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
from transformers import GenerationConfig
from transformers.cache_utils import Cache, DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput, MaxLengthCriteria

from hf_specdecpp.drafting.chain import Chain
from hf_specdecpp.generation.decoding import AssistedDecoding, passes_of, time_passes
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.conditioning import TargetStates

MOST_HOLES = 0.2  # of the columns that the longest row would need


class BatchDecoding:
    """One `generate()` call of an attached target for several sequences.

    Args:
        target: the model that decides.
        rows: a decoding of each row, which drafts and verifies for it.
        config: as prepared by `generate()`.
        model_kwargs: the forward's other arguments for all rows.
    """

    def __init__(
        self, target: CausalLM, rows: list[AssistedDecoding], config: GenerationConfig, model_kwargs: dict[str, Any]
    ) -> None:
        if in_order := rows[0].generator.processing.in_order:
            name = type(getattr(in_order[0], "processor", None)).__name__
            raise ValueError(
                f"{name} may keep state from call to call, for all rows of a batch together. If it depends on its "
                "arguments alone, give it the attribute reads_prefix_only = True; otherwise call generate() once a "
                "sequence."
            )
        self.target, self.rows, self.config, self.model_kwargs = target, rows, config, model_kwargs
        self.caught = TargetStates(target, rows[0].generator.setup.drafter.fusion)
        self.products = rows[0].generator.products

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
        rows, begin = [self.rows[index] for index in self.active], time.perf_counter()
        texts = [self.texts[index] for index in self.active]
        chains = [row.generator.draft(text, states=row.states) for row, text in zip(rows, texts, strict=True)]
        drafted = time.perf_counter()
        count = max(len(chain.tokens) for chain in chains)
        fed = torch.tensor([1 + len(chain.tokens) for chain in chains], device=self.valid.device)
        outputs = self.target(**self._inputs(chains, fed, count, cache), return_dict=True)
        target_seconds = time.perf_counter() - drafted
        finished = self._verify(chains, outputs)
        kept = torch.tensor(self.kept, device=self.valid.device)
        most = int(kept.max())
        cache.crop(most - count - 1)
        self.valid = torch.cat((self.valid, torch.arange(most, device=kept.device) < kept[:, None]), dim=1)
        self.positions += kept
        self._leave(cache, finished)
        overhead = time.perf_counter() - begin - (drafted - begin) - target_seconds
        for row in rows:
            row.stats.target_seconds += target_seconds / len(rows)
            row.stats.overhead_seconds += overhead / len(rows)

    def _compare_passes(self, cache: Cache) -> None:
        """Note each row's share of a pass over one token a row, measured once a target and number of rows."""
        known, config = passes_of(self.target), self.rows[0].generator.setup.speculation
        kind = config.cpu_products, config.pack_weights, len(self.active)
        if kind not in known:
            inputs = self._inputs([Chain([], [])] * len(self.active), torch.ones_like(self.positions), 0, cache)
            known[kind] = time_passes(self.target, inputs, self.products)
            self.caught.clear()
        plain, same = (seconds / len(self.active) for seconds in known[kind])
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
        self.kept: list[int] = []  # of each row, how many of the columns that it was fed
        width = max(len(chain.tokens) for chain in chains) + 1
        for place, (index, chain) in enumerate(zip(self.active, chains, strict=True)):
            row, fed = self.rows[index], len(chain.tokens) + 1
            logits = outputs.logits[place : place + 1, -width:][:, :fed]
            row.caught = _Taken(None if states is None else states[place : place + 1])  # type: ignore[assignment]
            row.prefix = prefix = _Kept()  # type: ignore[assignment]
            self.texts[index], ends = row._select(
                self.texts[index], chain.tokens, chain.scores, SimpleNamespace(logits=logits)
            )
            finished.append(ends)
            self.kept.append(prefix.kept)
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
        records = [row.records for row in self.rows]
        return GenerateDecoderOnlyOutput(
            sequences=sequences,  # type: ignore[arg-type]
            scores=_by_step([each.scores for each in records]),
            logits=_by_step([each.logits for each in records]),
        )


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


def check_batch(
    model_kwargs: dict[str, Any], config: GenerationConfig, criteria: Any, streamer: Any, has_trees: bool
) -> None:
    """Raise `ValueError` for batches that cannot be assisted. Runs before the first forward."""
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs.get("past_key_values")
    if mask is not None and not bool(mask[:, -1].all()):
        raise ValueError(
            "The batch is padded on the right, so rows would go on after padding. Use padding_side='left', as plain "
            "generate() needs, too."
        )
    reason = None
    if streamer is not None:
        reason = "a streamer prints one sequence"
    elif has_trees:
        reason = "trees are verified for one sequence at a time: set tree=None"
    elif config.output_attentions or config.output_hidden_states:
        reason = "attentions and hidden states of a batch are not put together yet"
    elif config._pad_token_tensor is None and any(type(each) is not MaxLengthCriteria for each in criteria):
        reason = "rows that end early are padded, and there is no pad_token_id"
    elif (positions := model_kwargs.get("position_ids")) is None or positions.dim() != 2:
        reason = "this target takes no positions of its own for each row, which rows of different length need"
    elif cache is not None and cache.get_seq_length() > 0:
        reason = "a cache that is carried on cannot hold rows of different length yet"
    elif cache is None or any(type(layer) is not DynamicLayer for layer in cache.layers):
        reason = "this target has layers with a window or a state, which rows of different length cannot share yet"
    elif others := sorted(set(model_kwargs) - KNOWN):
        reason = f"{', '.join(others)} are for single sequences"
    if reason is not None:
        raise ValueError(f"A batch of sequences cannot be assisted here: {reason}. Call generate() once a sequence.")


KNOWN = {
    "attention_mask", "position_ids", "past_key_values", "use_cache", "logits_to_keep", "output_attentions",
    "output_hidden_states", "cache_position",
}  # fmt: skip


class _Kept:
    """What a row's decoding tells of the cache: how many of the fed columns stay."""

    kept = 0

    def settle(self, _outputs: Any, kept: int, _num_candidates: int, _path: Any = None) -> None:
        self.kept = kept


class _Taken:
    """A row's share of the states that were caught."""

    def __init__(self, states: Tensor | None) -> None:
        self.states = states

    def take(self, rows: Any = slice(None)) -> Tensor | None:
        return None if self.states is None else self.states[:, rows]


class _UsedUp(DynamicLayer):
    """In the place of a batch's cache, whose rows have lost their places."""

    def update(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "This cache was filled by an assisted batch, whose rows ended at different lengths, so it cannot be "
            "carried on. Pass the whole text without it."
        )

    def get_seq_length(self) -> int:
        raise ValueError("This cache was filled by an assisted batch and cannot be carried on. Leave it out.")


def _by_step(records: list[Any]) -> Any:
    """Of each row's entries by token one `[batch, vocab]` by step; zeros where a row has ended."""
    if records[0] is None:
        return None
    steps = max(map(len, records))
    empty = torch.zeros_like(records[0][0])
    return tuple(torch.cat([each[step] if step < len(each) else empty for each in records]) for step in range(steps))
