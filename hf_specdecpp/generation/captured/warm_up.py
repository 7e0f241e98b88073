"""Captures all CUDA graphs that sequences up to a length need, by a generation before the first call (`warm_up`)."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from hf_specdecpp.caches.cached_context import width_of
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.captured_draft import RoundShape
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.cuda_graphs.fixed_cache import MIN_CAPACITY, capacity_for
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.captured.parts import GraphDrafts, GraphTarget, pass_widths
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.entry.calls import decoding_of
from hf_specdecpp.generation.latest_calls import LatestCalls
from hf_specdecpp.generation.refusals import Call, check_mode
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.models.causal_lm import CausalLM, input_device, keeping_generators, longest_text, num_processes
from hf_specdecpp.models.cpu.weight_copies import background
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.throughput.round_shapes import SPARE

PROMPT, ROUNDS = 8, 2  # tokens of the prompt; ordinary rounds in caches of each size
USUAL_LENGTH = 2048  # tokens, the default `max_length`


class WarmUp:
    """The assistant of the warm-up call (`entry.calls.Assistant`), which changes no learned costs and no statistics."""

    def __init__(self, setup: DraftSetup) -> None:
        self.setup, self.speculation = replace(setup, memory=Memory(setup.memory.calibration)), setup.speculation
        self.calls = LatestCalls()

    def start_generation(
        self, target: CausalLM, config: GenerationConfig, logits_processor: Any, attention_mask: Tensor | None, *_: Any
    ) -> SpecDecPPCandidateGenerator:
        return SpecDecPPCandidateGenerator(self.setup, config, logits_processor, attention_mask, target=target)


class WarmUpDecoding(AssistedDecoding):
    """A generation that runs each pass or round that calls may capture, in caches of each size up to `max_length`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        (text,) = self.texts
        text.max_length, text.eos, text.all_simple = float("inf"), set(), True  # the sequence never ends
        self.most = self.side.generator.setup.most_tokens

    def _make_rounds(self) -> None:
        target = self.target
        if not isinstance(target, GraphTarget):
            raise ValueError(
                f"Nothing can be captured here, so there is nothing to warm up. Of {type(self.side.model).__name__}: "
                f"{self.texts[0].stats.uncaptured or 'SpeculationConfig.graphs is off'}."
            )
        if isinstance(drafts := self.drafts, GraphDrafts):
            drafts.begin_texts()
        self.side.generator.times = None  # seconds of these rounds are not typical
        further = 2 * width_of(self.most + 1) + SPARE
        capacity = MIN_CAPACITY
        while capacity <= capacity_for(self.side.config.max_length + further):
            target.passes.context.with_capacity(capacity)
            if isinstance(drafts, GraphDrafts):
                self._make_whole_rounds(drafts)
            else:
                self._read_target(target.passes, capacity)
            capacity = capacity_for(capacity + 1)

    def _make_whole_rounds(self, drafts: GraphDrafts) -> None:
        for shape in {RoundShape(0), *drafts.chooser.shapes, *drafts.chooser.given}:
            drafts.rounds.time(shape, drafts.process)

    def _read_target(self, passes: CapturedTarget, capacity: int) -> None:
        """Run a captured pass of each width and, for trees, moves of its cache rows; then `ROUNDS` ordinary rounds."""
        for width in pass_widths(self.most):
            if width <= min(capacity - passes.context.num_tokens, MOST_CANDIDATES + 1):
                places = torch.arange(width, device=passes.device)
                as_tree = width > 1 and self.side.generator.method.for_trees
                passes.read(places[None] * 0, (places <= places[:, None], places) if as_tree else None)
                if as_tree:
                    passes.move(places)
        for _ in range(ROUNDS):
            self.round()


def warm_up(setup: DraftSetup, target: CausalLM, max_length: int | None, options: dict[str, Any]) -> float:
    """See `SpecDecPPAssistant.warm_up`. `options` are passed to `generate()`. Returns the seconds that it took."""
    longest = longest_text(target)
    if max_length is None:
        max_length = int(min(USUAL_LENGTH, longest))
    if not isinstance(max_length, int) or not PROMPT + 2 <= max_length <= longest:
        most = f" and at most {longest:.0f}, which {type(target).__name__} has positions for" if longest < 1e9 else ""
        raise ValueError(f"max_length={max_length!r} must be a whole number of tokens, at least {PROMPT + 2}{most}.")
    if num_processes(target) > 1:
        raise ValueError("A target that is spread over several processes warms up with its first texts.")
    device, begin = input_device(target), time.perf_counter()
    if setup.uses_copies(target) and not graphs.can_capture(device) and setup.products(target).layers:
        background.wait()
        return time.perf_counter() - begin
    prompt = torch.arange(PROMPT, device=device)[None]
    with keeping_generators(device):
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            custom_generate=partial(_warm_up_rounds, WarmUp(setup)),
            **{**options, "max_length": max_length, "return_dict_in_generate": False},
        )
    return time.perf_counter() - begin


def _warm_up_rounds(
    assistant: WarmUp,
    target: CausalLM,
    input_ids: Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: GenerationConfig,
    **kwargs: Any,
) -> Tensor:
    """The decoding method of the warm-up, given to `generate()` as `custom_generate`. Returns unused token ids."""
    check_mode(GenerationMode.ASSISTED_GENERATION, generation_config, kwargs)
    if len(input_ids) > 1:
        raise ValueError(f"A batch of {len(input_ids)} sequences has no captured passes that could be warmed up.")
    call = Call.of(target, logits_processor, stopping_criteria, generation_config, **kwargs)
    text: Tensor = decoding_of(call, assistant, input_ids, WarmUpDecoding)()
    return text
