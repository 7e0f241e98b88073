"""Builds the decoding of a `generate()` call with an assistant: one sequence, also on several processes, or a batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin

from hf_specdecpp.caches.cached_context import num_rows
from hf_specdecpp.caches.static import as_growing, copy_back, with_static
from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation import refusals
from hf_specdecpp.generation.batch_target import BatchTarget, InStep
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.captured.entering import on_graphs
from hf_specdecpp.generation.decoding import AssistedDecoding, Drafts
from hf_specdecpp.generation.latest_calls import LatestCalls
from hf_specdecpp.generation.output_text import OutputText
from hf_specdecpp.generation.ranks import DraftOfRanks, Ranks, RankText, check_ranks
from hf_specdecpp.generation.refusals import Call, LateRefusalError, PlainCallError
from hf_specdecpp.generation.single_target import SingleTarget
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import cache_among, num_processes
from hf_specdecpp.sampling.processors import Processing, for_row, in_order


class Assistant(Protocol):
    """The attributes of an assistant that a call uses (`SpecDecPPAssistant`)."""

    speculation: SpeculationConfig
    calls: LatestCalls

    def start_generation(self, *args: Any, **kwargs: Any) -> SpecDecPPCandidateGenerator:
        """Make the generator of a `generate()` call, or of a row of a batch (`AssistantModel.start_generation`)."""


def decoding_of(
    call: Call, assistant: Assistant, input_ids: Tensor, decoding: type[AssistedDecoding] = AssistedDecoding
) -> Callable[[], Any]:
    """Prepare a call with an assistant, after the prompts `input_ids` `[batch, length]`. Returns a function that runs
    it and returns the output of `generate()`. `ValueError` if the call is not supported, before any forward pass or
    random number."""
    target, count = call.target, input_ids.shape[0]
    refusals.check_inputs(input_ids, call.model_kwargs)
    refusals.check_processors(call.processors)
    refusals.warn_of_ignored(call.config)
    given = cache_among(call.model_kwargs)
    call = _growing(call, input_ids)
    unused = _unused_layers(cache := cache_among(call.model_kwargs))
    if num_processes(target) > 1:
        check_ranks(target, assistant.speculation, Processing(call.processors), count)
    if count > 1:
        refusals.check_batch(call, assistant.speculation.draws_trees)
        refusals.check_foreign(target, cache, count)
        return partial(_run, _batch_decoding(call, assistant, input_ids), cache, unused)
    run = partial(_run, _text_decoding(call, assistant, input_ids, decoding).run, cache, unused)
    return run if given is cache else partial(_run_static, run, given, cache)


def _growing(call: Call, input_ids: Tensor) -> Call:
    """`call` with a growing cache instead of a static one, if it has that; `ValueError` if that is impossible."""
    if not isinstance(cache := cache_among(call.model_kwargs), StaticCache):
        return call
    mask, config = call.model_kwargs.get("attention_mask"), copy.copy(call.config)
    read = mask.shape[1] if mask is not None else getattr(config, "_mask_length", input_ids.shape[1])
    # Including earlier turns, of which possibly only cache rows are left.
    longest = config.max_length + read - input_ids.shape[1]
    growing, config.cache_implementation = as_growing(call.target, cache, len(input_ids), longest), None
    kwargs = {name: growing if each is cache else each for name, each in call.model_kwargs.items()}
    return replace(call, config=config, model_kwargs=kwargs)


def _text_decoding(call: Call, assistant: Assistant, ids: Tensor, decoding: type[AssistedDecoding]) -> AssistedDecoding:
    """Make the decoding loop, of the class `decoding`, for a single sequence with the prompt `ids` `[1, length]`."""
    target, config, model_kwargs = call.target, call.config, call.model_kwargs
    foreign = refusals.check_foreign(target, cache_among(model_kwargs), 1)
    processors = call.processors
    if not all(refusals.ends_predictably(each, config) for each in call.criteria):  # ends that no draft foresees
        processors = in_order(processors, call.criteria)
    try:
        generator = assistant.start_generation(target, config, processors, model_kwargs.get("attention_mask"))
    except ValueError as refusal:
        if foreign is None:
            raise
        raise PlainCallError(f"{type(target).__name__} runs {foreign.name}, and so: {refusal}") from refusal
    assistant.calls.record_call(generator.stats, call.streamer)
    parts = call, generator, ids
    if num_processes(target) > 1:
        ranks = Ranks(target)
        text: OutputText = RankText(ranks, *parts)
        draft: Drafts = DraftOfRanks(ranks)
    else:
        generator.begin_text(ids.shape[1])
        text, draft = OutputText(*parts), Drafts()
    return decoding([text], draft, SingleTarget(call, text, foreign), on_graphs)


def _unused_layers(cache: Cache) -> list[Any] | None:
    """Copies of the layers of a cache that has no tokens yet; `None` if it has some."""
    is_used = num_rows(cache) or any(isinstance(each, CacheLayerMixin) and each.is_initialized for each in cache.layers)
    return None if is_used else copy.deepcopy(cache.layers)


def _run(decode: Callable[[], Any], cache: Cache, unused: list[Any] | None) -> Any:
    """Run the call by `decode`. After `LateRefusalError`, put the empty layers `unused` back, for a plain call."""
    try:
        return decode()
    except LateRefusalError:
        if unused is not None:
            cache.layers = unused
        raise


def _run_static(run: Callable[[], Any], static: StaticCache, growing: DynamicCache) -> Any:
    """`run` the call, and copy the growing cache to the user's static one, also after errors but `LateRefusalError`."""
    try:
        found = run()
    except LateRefusalError:  # a plain call with the static cache may follow
        raise
    except BaseException:
        with suppress(IndexError):
            copy_back(static, growing)
        raise
    copy_back(static, growing)
    return with_static(found, static, growing)


def _batch_decoding(call: Call, assistant: Assistant, input_ids: Tensor) -> Callable[[], Any]:
    """A function that decodes several sequences, and records the statistics of the batch."""
    mask, count = call.model_kwargs.get("attention_mask"), len(input_ids)
    generators: list[SpecDecPPCandidateGenerator] = []
    for row, own in enumerate([None] * count if mask is None else mask.split(1)):
        processors, first = for_row(call.processors, row, count), generators[0] if generators else None
        generators.append(assistant.start_generation(call.target, call.config, processors, own, count, first))
    texts = [OutputText(call, *each) for each in zip(generators, input_ids.split(1), strict=True)]
    drafts = Drafts(generators[0].setup.drafter.batch([each.session for each in generators]))
    parts = texts, drafts, BatchTarget(call, texts), on_graphs
    decoding = AssistedDecoding(*parts) if generators[0].processing.answers_all else InStep(call.processors, *parts)

    def run() -> Any:
        try:
            return decoding.run()
        finally:
            assistant.calls.record_call(SpeculationStats.of_batch([each.stats for each in generators]))

    return run
