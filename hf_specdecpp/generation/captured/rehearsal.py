"""Captures all that texts up to a length need, before the first of them (`warm_up`): by generating one."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode

from hf_specdecpp.caches.text import width_of
from hf_specdecpp.captured.rooms import LEAST_ROOM, room_for
from hf_specdecpp.config.speculation import MOST_CANDIDATES
from hf_specdecpp.drafting.captured import LEAST_NODES, LEAST_WIDTH, SEVERAL, CapturedSession
from hf_specdecpp.drafting.captured_draft import RoundShape
from hf_specdecpp.generation.candidate_generator import SpecDecPPCandidateGenerator
from hf_specdecpp.generation.captured.text import CapturedText
from hf_specdecpp.generation.captured.whole import WholeRounds
from hf_specdecpp.generation.decoding import AssistedDecoding
from hf_specdecpp.generation.doors.calls import Call, decoding_of
from hf_specdecpp.generation.refusals import check_mode
from hf_specdecpp.generation.setup import DraftSetup
from hf_specdecpp.generation.several.ranks import is_spread
from hf_specdecpp.generation.stats import SpeculationStats
from hf_specdecpp.generation.target import OneTarget
from hf_specdecpp.models.causal_lm import CausalLM, input_device, longest_text
from hf_specdecpp.throughput.memory import Memory
from hf_specdecpp.trees.tree import DraftTree

PROMPT, ROUNDS = 8, 2  # tokens; of the assistant's own, in each room


class Rehearsal:
    """An assistant from whose generations nothing is learned (`generation.doors.attached.Assistant`)."""

    def __init__(self, setup: DraftSetup) -> None:
        self.setup, self.speculation = replace(setup, memory=Memory(setup.memory.calibration)), setup.speculation
        self.stats = SpeculationStats()

    def start_generation(
        self, target: CausalLM, config: GenerationConfig, logits_processor: Any, attention_mask: Tensor | None, *_: Any
    ) -> SpecDecPPCandidateGenerator:
        return SpecDecPPCandidateGenerator(self.setup, config, logits_processor, attention_mask, target=target)


class RehearsedDecoding(AssistedDecoding):
    """A text that moves from room to room, and makes in each all passes that may be made there."""

    target: OneTarget

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.text = self.texts[0]
        self.text.max_length, self.text.eos, self.text.all_simple = float("inf"), set(), True  # nothing ends it
        self.generator = self.text.generator
        self.most = self.generator.setup.most_tokens

    def _make_rounds(self) -> None:
        session, target = self.generator.session, self.target
        if not target.prefix.is_captured and not isinstance(session, CapturedSession):
            raise ValueError(
                f"Nothing can be captured here, so there is nothing to warm up. Of {type(target.model).__name__}: "
                f"{self.text.stats.uncaptured or 'SpeculationConfig.graphs is off'}; nor can the draft's steps."
            )
        whole = target.captured.rounds
        if whole is not None:
            whole.begin(self.texts)
        self.generator.times = None  # these rounds are unlike others
        further = 2 * width_of(self.most + 1) + SEVERAL
        room = LEAST_ROOM
        while room <= room_for(target.config.max_length + further):
            if whole is not None:
                self._make_whole_rounds(whole, room)
            else:
                self._make_passes(room)
            room *= 2

    def _make_whole_rounds(self, whole: WholeRounds, room: int) -> None:
        """Rounds of each shape."""
        whole.rounds.passes.text.with_room(room)
        whole.rounds.draft.text.with_room(room)
        for shape in {RoundShape(0), *whole.tiers.shapes}:
            whole.rounds.time(shape, whole.rules)

    def _make_passes(self, room: int) -> None:
        """Passes of the target and of the draft, and some rounds."""
        if isinstance(self.target.prefix, CapturedText):
            self._read_target(self.target.prefix, room)
        if isinstance(self.generator.session, CapturedSession):
            self._read_draft(self.generator.session, room)
        for _ in range(ROUNDS):
            self.round()

    def _read_target(self, text: CapturedText, room: int) -> None:
        """A pass of each width; of trees a path of each, too."""
        text.passes.text.with_room(room)
        target = self.target
        left = text.most_candidates(self.text.ids)
        left = min(MOST_CANDIDATES if left is None else left, room - text.passes.text.held - 1)
        for count in filling(self.most, left):
            target.try_pass(count)
            if self.generator.draws_trees:
                text.passes.keep(0, torch.arange(count + 1, device=target.device))

    @torch.inference_mode()
    def _read_draft(self, session: CapturedSession, room: int) -> None:
        """Steps over one token and over several; of trees levels of each width."""
        session.text.with_room(room)
        tokens, states = self.text.ids[:, -2:], self.target.states.found
        token = int(tokens[0, -1])
        is_tree = self.generator.draws_trees
        for sizes in [[], *(levels(self.most) if is_tree else [])]:
            for count in (2, 1, 2):
                own = None if states is None else states[:, -1:].expand(-1, count, -1)
                session.begin_round(tokens[:, -count:], 0, own)
                if is_tree:
                    _grow(session, token, sizes)
                else:
                    for place in range(3):
                        session.step([tokens[0, -1]] * place)


def filling(most: int, room: int) -> list[int]:
    """Candidates that fill the widths of passes up to that of `most`, as far as there is room.

    Example: 0, 1, 3 and 7 for at most 5 candidates.
    """
    counts = [0]
    while counts[-1] < most and 2 * counts[-1] + 1 <= room:
        counts.append(2 * counts[-1] + 1)
    return counts


def _grow(session: CapturedSession, token: int, sizes: list[int]) -> None:
    """A tree of which levels of so many nodes are read."""
    tree, nodes = DraftTree(token), [0]
    for size in (*sizes, 0):
        session.expand(tree, nodes)
        nodes = [tree.add(0, token) for _ in range(size)]
    session.keep([])


def levels(most: int) -> list[list[int]]:
    """Sizes of levels below the root so that a draft reads one of each width, among as many nodes as trees of `most`
    candidates may have.

    Example: for trees of up to 12 one of 1 (the width is 4), one of 5 (8) and one of 9 (16).
    """
    found, nodes = [], LEAST_NODES
    while nodes < 2 * (most + 1) or nodes == LEAST_NODES:
        width = LEAST_WIDTH
        while width <= nodes:
            least = 1 if width == LEAST_WIDTH else width // 2 + 1
            before = max(nodes // 2 - least, 0) if nodes > LEAST_NODES else 0  # nodes, beside the root
            if before + least < max(most, 2):
                found.append([before, least] if before else [least])
            width *= 2
        nodes *= 2
    return found


def warm_up(setup: DraftSetup, target: CausalLM, max_length: int, options: dict[str, Any]) -> float:
    """Capture all that one text of up to `max_length` tokens needs: seconds that it took.

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
    prompt = torch.arange(PROMPT, device=device)[None]
    begin = time.perf_counter()
    with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []):
        target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            custom_generate=partial(_rehearse, Rehearsal(setup)),
            **{**options, "max_length": max_length, "return_dict_in_generate": False},
        )
    return time.perf_counter() - begin


def _rehearse(
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
        raise ValueError(f"A batch of {len(input_ids)} sequences has no captured passes that could be warmed up.")
    call = Call.of(target, logits_processor, stopping_criteria, generation_config, **kwargs)
    text: Tensor = decoding_of(call, assistant, input_ids, RehearsedDecoding)(input_ids)
    return text
