"""Assisted decoding of several sequences at once: the rows share the draft's steps and the target's passes.

Each keeps its own pace, in caches with holes (`caches.batches`). A row that ends leaves the batch and is padded.
Where no id ends texts, plain `generate()` goes on in such a row until all rows have ended, and so do we (`_leaving`).
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.caches.batches import BatchCache
from hf_specdecpp.caches.paths import PathRows
from hf_specdecpp.drafting.chain import Chain, at_once, draft_chains
from hf_specdecpp.generation.candidate_generator import MOST_READ, SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.outputs import TokenRecords
from hf_specdecpp.generation.prefix import extended
from hf_specdecpp.generation.refusals import (
    NO_BATCH,
    NO_POSITIONS,
    LateRefusalError,
    check_numbers,
    check_prompt,
    gives_positions,
)
from hf_specdecpp.lookup.looking_up import count_together
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among, input_device
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.chains import BatchThroughput, ThroughputState, pays_to_go_on
from hf_specdecpp.throughput.round_times import Drafting as Drafted
from hf_specdecpp.throughput.target_passes import passes_of


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
        self.target, self.config = target, config
        self.device = input_device(target)
        self.rows = [_Row(target, each, criteria, config, None, {}) for each in generators]
        self.states = TargetStates(target, generators[0].setup.drafter.reads)
        self.model_kwargs = self.states.asked_for(model_kwargs)
        self.drafts = generators[0].setup.drafter.batch([each.session for each in generators])
        self.cache = BatchCache(target, cache_among(model_kwargs), len(generators))
        self.products = generators[0].products
        self.passes = passes_of(target, generators[0].setup.speculation)
        self.held: dict[int, Any] = {}  # what the cache held of rows that have left
        self.pads = any(hasattr(each, "eos_token_id") for each in criteria)  # as plain generation asks
        self.ends: dict[int, int] = {}  # where it does not: at which length each row has ended
        self.goes_on = cache_among(model_kwargs).get_seq_length() > 0  # from an earlier turn
        self.carries_cache = config.return_dict_in_generate or self.goes_on

    def run(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after `input_ids` `[batch, length]`, padded on the left: what `generate()` returns."""
        is_restored = False
        try:
            self._generate(input_ids)
            sequences = self._sequences()
            if self.carries_cache:
                self._restore_cache(sequences)
                is_restored = True
        finally:
            if not is_restored:
                self.cache.cache.layers = [_UsedUp()]
        return self._output(sequences)

    def _generate(self, input_ids: Tensor) -> None:
        """The prompts' pass, then rounds until all rows have ended."""
        begin = time.perf_counter()
        with self.products:
            if not gives_positions(self.target, input_ids, self.model_kwargs):
                raise LateRefusalError(NO_BATCH.format(NO_POSITIONS))
            outputs = self.states.catch(self.target._prefill, input_ids, self.config, self.model_kwargs)
            check_prompt(outputs)
            mask = self.model_kwargs.get("attention_mask")
            self.prompt_mask = (torch.ones_like(input_ids) if mask is None else mask).bool().cpu()
            self.cache.note(self.prompt_mask)
            self.positions = self.model_kwargs["position_ids"][:, -1].cpu() + 1
            self.texts, self.active = list(input_ids.split(1)), list(range(len(self.rows)))
            finished = self._verify([Chain([], []) for _ in self.rows], outputs)
            check_numbers(self.target, outputs.logits, self.prompt_mask)
            self._leave(self._leaving(finished))
        for row in self.rows:
            row.stats.plain_passes += 1
            row.stats.prompt_seconds = (time.perf_counter() - begin) / len(self.rows)
        with self.target._optimize_model_for_decode(), self.products:
            while self.active:
                self._compare_passes()
                self._round()
        count = len(self.rows)
        for row in self.rows:
            shares = (each and each / count for each in self.passes.seconds(count))
            row.stats.plain_pass_seconds, row.stats.same_pass_seconds = shares
        self.rows[0].generator.finish()
        for row, text in zip(self.rows, self.texts, strict=True):
            row.generator.remember(text)

    def _round(self) -> None:
        """Draft for every row, one target pass, verify; rows that have ended leave."""
        begin = time.perf_counter()
        rows = [self.rows[index] for index in self.active]
        length, first = max(self.texts[index].shape[1] for index in self.active), self.rows[0].generator
        # What the whole batch takes is learned while it is whole.
        times = first.times if len(rows) == len(self.rows) else None
        if isinstance(first.plan, ThroughputState):
            first.plan.follow(length)
        if times is not None:
            times.begin()
        chains = self._draft()
        if times is not None:
            sessions = [row.generator.session for row in rows]
            passes = max(session.passes for session in sessions)
            further = max(max(chain.num_drawn for chain in chains) - passes, 0)
            as_usual = self.read <= MOST_READ and not any(chain.looked_up for chain in chains)
            times.drafted(Drafted(passes, self.read - 1, further) if as_usual else None)
        drafted = time.perf_counter()
        for row, chain in zip(rows, chains, strict=True):
            row.generator.note(chain, (drafted - begin) / len(rows))
        fed = torch.tensor([1 + len(chain.tokens) for chain in chains])
        is_token = torch.arange(int(fed.max())) < fed[:, None]
        inputs = self._inputs(chains, is_token)
        is_timed, has_choice = self.device.type == "cpu", self.products.has_choice
        with self.passes.timed(is_token.numel(), has_choice) if is_timed else nullcontext():
            outputs = self.states.catch(self.target, **inputs, return_dict=True)
        self.cache.note(is_token)
        target_seconds, known = time.perf_counter() - drafted, sum(row.stats.target_seconds for row in rows)
        finished = self._verify(chains, outputs)
        waited = sum(row.stats.target_seconds for row in rows) - known
        kept = torch.tensor([row.kept for row in rows])
        self.cache.forget((fed - kept).tolist())
        self.positions += kept
        self._leave(self._leaving(finished))
        overhead = time.perf_counter() - drafted - target_seconds - waited
        for row in rows:
            row.stats.target_seconds += target_seconds / len(rows)
            row.stats.overhead_seconds += overhead / len(rows)
        if times is not None:
            times.end(length, is_token.shape[1])

    @torch.inference_mode()
    def _draft(self) -> list[Chain]:
        """A chain for each row, drafted step by step together."""
        rows = [self.rows[index] for index in self.active]
        texts = [self.texts[index] for index in self.active]
        drafting = [row.generator.drafting(text, None, row.states.found) for row, text in zip(rows, texts, strict=True)]
        self.read = max(row.generator.session.unread for row in rows)
        if isinstance(plan := self.rows[0].generator.plan, ThroughputState):
            plan.begin_batch_round(self.read)
        lookups = [row.generator.lookup for row in rows if row.generator.lookup is not None]
        together = count_together(lookups) if lookups else 0
        for place, lookup in enumerate(lookups):
            if count := together or (lookup.count_alone() if lookup.choice is None else 0):
                drafting[place] = at_once(lookup.take(count))

        def prepare(asking: dict[int, list[Tensor]]) -> bool:
            rules = [rows[place].generator.rule for place in asking]
            sharing = [rule for rule in rules if isinstance(rule, BatchThroughput)]
            goes_on = not sharing or not any(asking.values()) or pays_to_go_on(sharing, len(rows))
            if goes_on:
                self.drafts.step(asking)
            return goes_on

        return draft_chains(drafting, prepare)

    def _compare_passes(self) -> None:
        """Time a pass over one token of each row beside those of the rounds, where these do not tell what it takes."""
        count = len(self.active)
        product = self.passes.missing(count, self.rows[0].stats.rounds, self.products.has_choice)
        if product is not None and count == len(self.rows):
            inputs = self._inputs([Chain([], [])] * count, torch.ones(count, 1, dtype=torch.bool))
            begin = time.perf_counter()
            self.passes.make(count, product, self.target, inputs, self.device)
            self.rows[0].stats.compared_passes += 1
            self.rows[0].stats.preparing_seconds += time.perf_counter() - begin

    def _inputs(self, chains: list[Chain], is_token: Tensor) -> dict[str, Any]:
        """Forward arguments for each row's last token and candidates, then dummies: `is_token` `[rows, n]`."""
        count = is_token.shape[1]
        last = [int(self.texts[index][0, -1]) for index in self.active]
        fed_rows = [[token, *chain.tokens] for token, chain in zip(last, chains, strict=True)]
        tokens = torch.tensor([row + row[-1:] * (count - len(row)) for row in fed_rows])
        positions = self.positions[:, None] + is_token.cumsum(dim=1) - 1
        kwargs = {
            **self.model_kwargs,
            "attention_mask": self.cache.mask(is_token),
            "position_ids": positions.to(self.device),
            CACHE: self.cache.cache,
        }
        inputs: dict[str, Any] = self.target.prepare_inputs_for_generation(
            tokens.to(self.device), next_sequence_length=count, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count
        return inputs

    def _verify(self, chains: list[Chain], outputs: Any) -> list[bool]:
        """Verify each row's chain as if it were alone, and note which rows have ended."""
        states, finished = self.states.by_row(len(self.active)), []
        width = max(len(chain.tokens) for chain in chains) + 1
        for place, (index, chain) in enumerate(zip(self.active, chains, strict=True)):
            logits = outputs.logits[place : place + 1, -width:][:, : len(chain.tokens) + 1]
            own = SimpleNamespace(
                logits=logits,
                states=states[place],
                hidden_states=self._hidden_states(outputs, place),
                attentions=self._attentions(outputs, place, len(chain.tokens)),
                cache=SimpleNamespace(layers=self.cache.layers),
            )
            self.texts[index], ends = self.rows[index].verify(self.texts[index], chain, own)
            finished.append(ends)
        return finished

    def _hidden_states(self, outputs: Any, place: int) -> Any:
        """A row's part of the pass's hidden states, where they are asked for."""
        if not self.config.output_hidden_states:
            return None
        if several := [layer.dim() for layer in outputs.hidden_states if layer.dim() != 3]:
            raise LateRefusalError(
                f"{type(self.target).__name__} returns {several[0]}-dimensional hidden states, several for each token, "
                "which are not put together for a batch. Leave output_hidden_states out."
            )
        return tuple(layer[place : place + 1] for layer in outputs.hidden_states)

    def _attentions(self, outputs: Any, place: int, num_candidates: int) -> Any:
        """A row's part of the pass's attentions, as if the row had been read alone, padding included."""
        if not self.config.output_attentions:
            return None
        attentions = [layer[place : place + 1] for layer in outputs.attentions]
        index = self.active[place]
        further = self.texts[index].shape[1] - self.prompt_mask.shape[1]
        if not further or not attentions:  # sdpa attention has none to give
            return tuple(attentions)
        # The columns of the cache that are the row's, and their places in its text.
        count, fed = num_candidates + 1, attentions[0].shape[2]
        held = self.cache.valid[place].clone()
        held[held.shape[0] - fed + count :] = False
        shown = functional.pad(self.prompt_mask[index], (0, further + num_candidates), value=True)
        rows = []
        for layer in attentions:
            row = layer.new_zeros(*layer.shape[:2], count, len(shown))
            row[..., shown.to(layer.device)] = layer[:, :, :count][..., held.to(layer.device)]
            rows.append(row)
        return tuple(rows)

    def _leaving(self, finished: list[bool]) -> list[bool]:
        """Which of the active rows leave.

        Example: no id ends texts, and rows 0 and 1 end by a stop string at lengths of 12 and 20. Plain generation goes
        on in row 0 up to 20 tokens, so it leaves once it has as many.
        """
        if self.pads:
            return finished
        lengths = [self.texts[index].shape[1] for index in self.active]
        for index, length, ends in zip(self.active, lengths, finished, strict=True):
            if ends:
                self.ends.setdefault(index, length)
        last = max(self.ends.values(), default=0) if len(self.ends) == len(self.rows) else min(self._limits())
        return [length >= last for length in lengths]

    def _limits(self) -> list[float]:
        """Lengths that no text exceeds."""
        return [*self.rows[0].max_lengths, float("inf")]

    def _leave(self, finished: list[bool]) -> None:
        """Take the rows that have ended out of the batch."""
        if any(finished):
            places = [place for place, ends in enumerate(finished) if not ends]
            if self.carries_cache:
                self.held |= {self.active[place]: self.cache.held(place) for place, ends in enumerate(finished) if ends}
            self.active = [self.active[place] for place in places]
            self.positions = self.positions[places]
            self.cache.select(places)
            self.drafts.select(places)
        self.cache.close_up()

    def _sequences(self) -> Tensor:
        """The texts `[batch, length]`, those that ended early padded on the right."""
        if not self.pads:  # some may have gone on for longer than it took the others to end
            last = max(self.ends.values())
            self.texts = [text[:, :last] for text in self.texts]
            for row in self.rows:
                row.records.cut(last - self.prompt_mask.shape[1])
        longest = max(text.shape[1] for text in self.texts)
        pad = self.config._pad_token_tensor
        texts = [
            functional.pad(text, (0, longest - text.shape[1]), value=0 if pad is None else int(pad))
            for text in self.texts
        ]
        return torch.cat(texts)

    def _restore_cache(self, sequences: Tensor) -> None:
        """Leave the cache as plain generation leaves it: all but the last column, padding after a text included.

        What all rows hold is put together. The columns after that, where some texts had ended, are read again.
        """
        columns, shortest = sequences.shape[1] - 1, min(text.shape[1] for text in self.texts) - 1
        further = columns - self.prompt_mask.shape[1]
        mask = functional.pad(self.prompt_mask, (0, further), value=True)
        self.cache.restore([held for _, held in sorted(self.held.items())], mask[:, :shortest])
        if columns == shortest:
            return
        kwargs = extended(self.model_kwargs, further)
        inputs: dict[str, Any] = self.target.prepare_inputs_for_generation(
            sequences[:, :-1], next_sequence_length=columns - shortest, is_first_iteration=False, **kwargs
        )
        self.target(**inputs, return_dict=True)

    def _output(self, sequences: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        if not self.config.return_dict_in_generate:
            return sequences
        return TokenRecords.of_batch([row.records for row in self.rows]).output(sequences, self.cache.cache)


class _Row(AssistedDecoding):
    """A row's decoding: it verifies, emits and stops as if the row were alone. Passes and cache are the batch's.

    Attributes:
        kept: how many of the columns that it was fed last stay in the cache.
    """

    kept = 0

    def verify(self, text: Tensor, chain: Chain, outputs: Any) -> tuple[Tensor, bool]:
        """The text after a pass, and whether it has ended.

        Args:
            text: `[1, length]`.
            chain: k candidates.
            outputs: the row's part of the pass's: `logits` `[1, k + 1, vocab]`, after the prompt those at its last
                token; `states` `[1, n, width]` of the target at what it read, if the draft reads them; hidden states
                and attentions where they are asked for.
        """
        return self._select(text, chain, outputs)

    def _settle(self, outputs: Any, kept: int, _num_candidates: int, _path: PathRows | None) -> None:
        self.kept = kept
        if outputs.states is not None:
            self.states.found = outputs.states[:, :kept] if self.stats.generated else outputs.states


class _UsedUp(DynamicLayer):
    """In the place of a batch's cache, whose rows have lost their places."""

    def update(self, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise ValueError(
            "This cache was used by an assisted batch, whose rows have lost their places. To carry a cache on, pass "
            "return_dict_in_generate=True and take the cache from what generate() returns."
        )

    def get_seq_length(self) -> int:
        raise ValueError("This cache was filled by an assisted batch and cannot be carried on. Leave it out.")
