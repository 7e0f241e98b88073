"""Compiles all that texts up to a length need, before the first of them (`warm_up`)."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.generation.attached import decoding_of
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.ranks import is_spread
from hf_specdecpp.generation.refusals import check_mode
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.models.causal_lm import CausalLM, input_device, longest_text
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.warming.steps import warm_up as warm_up_steps

PROMPT = 8  # tokens


class Rehearsal:
    """An assistant whose generations compile, and from which nothing is learned (`generation.attached.Assistant`)."""

    def __init__(self, setup: DraftSetup) -> None:
        self.setup, self.speculation = replace(setup, memory=Memory(setup.memory.calibration)), setup.speculation
        self.stats = SpeculationStats()

    def start_generation(
        self, target: CausalLM, config: GenerationConfig, logits_processor: Any, attention_mask: Tensor | None, *_: Any
    ) -> SpecDecPPCandidateGenerator:
        return SpecDecPPCandidateGenerator(self.setup, config, logits_processor, attention_mask, target=target)


class Passes(AssistedDecoding):
    """A generation that makes a pass of each width in the place of its rounds, and takes steps of each kind."""

    def _rounds(self, input_ids: Tensor, finished: bool) -> Tensor:  # noqa: ARG002 - nothing is emitted
        setup, trees = self.generator.setup, self.generator.trees
        if self.forward is self.target and not setup.drafter.is_compiled:
            raise ValueError(
                f"Nothing is compiled here, so there is nothing to warm up. Passes of {type(self.target).__name__} are "
                f"compiled with a static cache on a GPU (it is on {self.device}), elsewhere with a compile_config that "
                "says so, from transformers 5.23 on also for drafts that read its states; steps of a draft with "
                "SpeculationConfig(compile=True), but for recurrent layers and blocks (docs/gpu.md)."
            )
        with self.generator.products:
            if self.forward is not self.target:
                self.own_passes(input_ids).settle(setup.speculation.most_tokens)
            if isinstance(setup.drafter, Drafter) and setup.drafter.is_compiled:
                most = 0 if trees is None else trees.most_nodes
                tokens, width = input_ids[:, -PROMPT:], self.target.config.get_text_config().vocab_size
                warm_up_steps(setup.drafter, tokens, self.states.found, self.config.max_length, most, width)
            self._plan(input_ids)
        return input_ids


def warm_up(setup: DraftSetup, target: CausalLM, max_length: int, options: dict[str, Any]) -> float:
    """Compile all that one text of up to `max_length` tokens needs: seconds that it took.

    Raises:
        ValueError: as `SpecDecPPAssistant.warm_up`.
    """
    longest = longest_text(target)
    if not isinstance(max_length, int) or not PROMPT + 2 <= max_length <= longest:
        raise ValueError(
            f"max_length={max_length!r} must be a whole number of tokens, at least {PROMPT + 2}"
            + (
                f" and at most {longest:.0f}, which {type(target).__name__} has positions for."
                if longest < 1e9
                else "."
            )
        )
    if is_spread(target):
        raise ValueError("A target that is spread over several processes warms up with its first texts.")
    device = input_device(target)
    prompt = torch.ones((1, PROMPT), dtype=torch.long, device=device)
    begin = time.perf_counter()
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            custom_generate=partial(_compile_all, Rehearsal(setup)),
            **{"cache_implementation": "static", **options, "max_length": max_length},
        )
    return time.perf_counter() - begin


def _compile_all(
    assistant: Rehearsal,
    target: CausalLM,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> Tensor:
    """In the place of transformers' decoding (`custom_generate`)."""
    check_mode(GenerationMode.ASSISTED_GENERATION, generation_config, kwargs)
    if len(input_ids) > 1:
        raise ValueError(f"A batch of {len(input_ids)} sequences has no compiled passes that could be warmed up.")
    decode = decoding_of(
        target, assistant, input_ids, logits_processor, stopping_criteria, generation_config, kind=Passes, **kwargs
    )
    text: Tensor = decode(input_ids)
    return text
