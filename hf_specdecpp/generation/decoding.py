"""Assisted decoding: the loop that everything else serves (`AssistedDecoding`), and the parts that it is made of: what
drafts (`Drafts`), and the target's side (`TargetSide`), which owns its cache and how its passes run.

Differences from transformers' `_assisted_decoding`: the prompt gets a forward of its own as in plain `generate()`, so a
warm cache, chunked prefill and sliding windows behave as they do there. Stopping criteria are asked token by token, and
a stop string ends the output where it ends. Scores, hidden states and attentions belong to the token that they are
returned for. Candidates may be trees, and the rows of a batch keep their own pace.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.clocks import working_clock
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.pass_times import pass_times_of
from hf_specdecpp.trees.tree import Chain, DraftTree

MEMORY = "memory ended"


class RoundTarget(ABC):
    """The target's part of rounds. `TargetSide` makes them with the target's own passes, `GraphTarget` with graphs."""

    def attention(self) -> AbstractContextManager[None]:
        """The context in which rounds are made."""
        return nullcontext()

    def prepare(self, texts: Sequence[Text]) -> None:  # noqa: B027 - most need nothing
        """What a round needs and is not counted among its seconds."""

    def room(self, text: Text) -> int | None:  # noqa: ARG002
        """How many candidates the next pass has room for; `None`: any number."""
        return None

    @abstractmethod
    def read(self, rounds: Sequence[Round]) -> None:
        """One pass over the last token of each text and its candidates: `outputs` and `width` of the rounds, or, where
        a device has drawn and verified candidates, their `tree` and `verdict`."""

    @abstractmethod
    def keep(self, rounds: Sequence[Round]) -> None:
        """Leave the cache and the states that drafts read at what was emitted."""

    @abstractmethod
    def stays(self, texts: Sequence[Text]) -> list[bool]:
        """Which texts go on."""

    def select(self, texts: Sequence[Text], places: Sequence[int]) -> None:  # noqa: B027 - of one text nothing is left
        """Of `texts` those at `places` go on."""

    def instead(self, failure: GraphsFailedError, texts: Sequence[Text]) -> tuple[Drafts, RoundTarget]:  # noqa: ARG002
        """Called when graphs have failed: the drafts and the target's part that make this round of the `texts` and all
        later rounds."""
        raise failure

    def leave(self, texts: Sequence[Text] = ()) -> None:  # noqa: B027 - the target's own passes have nothing to leave
        """Called after the last round, or where the `texts` go on without these passes: the target's own cache gets
        what was read."""


class Drafts:
    """Proposes candidates for the texts of a call: here for one, whose generator does."""

    def propose(self, texts: Sequence[Text], target: RoundTarget) -> list[DraftTree]:
        """A tree for each text; a chain has one branch, and an empty tree leaves the round to the target."""
        (text,) = texts
        return [text.generator.propose(text.ids, target.room(text), text.states)]

    def saw(self, rounds: Sequence[Round]) -> None:
        """Told what stands of a round."""
        (each,) = rounds
        generator = each.text.generator
        generator.saw(each.tree, each.verdict.path, each.text.before)
        if generator.times is not None:
            generator.times.end(each.text.before, each.width)

    def select(self, places: Sequence[int]) -> None:
        """The texts at these places go on."""


class GraphsFailedError(RuntimeError):
    """A part of a round cannot be captured, or finds no memory, before anything of the round is verified.

    Attributes:
        why_not_draft: why the draft's part can never be captured, if that is so.
        is_memory: whether there was no memory.
    """

    def __init__(self, reason: str, why_not_draft: str | None = None) -> None:
        super().__init__(reason)
        self.why_not_draft, self.is_memory = why_not_draft, reason.startswith(MEMORY)


class TargetSide(RoundTarget):
    """The target's side of a call, which owns its cache: the prompt, rounds of the target's own passes with the states
    that drafts read, what passes take and on which products they run, and what `generate()` returns."""

    foreign: ForeignPasses | None = None  # where passes run code of others
    took: tuple[int, float, float] | None = None  # by the latest pass: as `PassTimes.note` takes them

    def __init__(self, model: CausalLM, texts: Sequence[Text], config: GenerationConfig) -> None:
        self.model, self.config, self.device = model, config, input_device(model)
        self.generator, setup = texts[0].generator, texts[0].generator.setup
        self.states = TargetStates(model, None if self.generator.rests else setup.drafter.reads)
        self.passes, self.work_clock = pass_times_of(model), working_clock()

    def attention(self) -> AbstractContextManager[None]:
        return without_cudnn(self.device)

    @abstractmethod
    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        """Read the prompts as plain `generate()` does: the `outputs` of the rounds."""

    def begin(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        """Told once, before the first round."""
        self.passes.begin(self.generator.products)

    # What captured passes ask of it. ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def forward_arguments(self) -> dict[str, Any]:
        """The arguments of the target's forward, its own cache among them."""

    @abstractmethod
    def enter(self, passes: CapturedTarget) -> None:
        """Copy what was read of the prompts to captured passes. The target's own cache stays as it is."""

    @abstractmethod
    def own_logits(self, texts: Sequence[Text], tokens: Tensor) -> Tensor:
        """Logits `[texts, n, vocab]` of a pass of the target's own over the last token of each text and further tokens,
        `[texts, n]` with it, which is forgotten."""

    @abstractmethod
    def take_back(self, passes: CapturedTarget, texts: Sequence[Text], rows: Sequence[int]) -> None:
        """Go on in the target's own cache: copy what captured passes have read of `texts`, at these `rows`, to it."""

    def hold(self, text: Text, held: Callable[[], Any]) -> None:
        """Called when a text ends before others: keep its keys and values, `held()`, for the cache that is given
        back."""

    # The end of a call. -----------------------------------------------------------------------------------------------

    @abstractmethod
    def complete(self, texts: Sequence[Text]) -> None:
        """After the last round: leave the cache as plain `generate()` leaves it."""

    def roll_back(self) -> None:
        """After an exception: leave the cache, which may be the user's, at what was emitted."""

    @abstractmethod
    def end(self) -> None:
        """Told last, whatever happened."""

    @abstractmethod
    def output(self, texts: Sequence[Text]) -> Tensor | GenerateDecoderOnlyOutput:
        """What `generate()` returns."""

    def note_pass(self) -> None:
        """After a round: what its pass took, where that is known."""
        if self.took is not None:
            self.passes.note(*self.took)
            self.took = None

    def time_plain_pass(self, first: Text, rows: int, inputs: Callable[[], dict[str, Any]]) -> None:
        """Time a pass over one token of each of `rows` texts beside those of the rounds, where nothing else says what
        such a pass takes; `first` of the texts notes it."""
        if self.passes.is_missing(rows, self.generator.products):
            begin = time.perf_counter()
            self.passes.make(rows, self.model, inputs())
            first.stats.compared_passes += 1
            first.stats.preparing_seconds += time.perf_counter() - begin


Choose: TypeAlias = Callable[[Sequence[Text], Drafts, TargetSide], tuple[Drafts, RoundTarget]]


class AssistedDecoding:
    """One `generate()` call, for a text or the rows of a batch; `active` have not ended.

    Attributes:
        side: the target's side of the call.
        drafts, target: what makes the rounds: at first the side itself, and on a GPU what runs as CUDA graphs.
        on_graphs: called once the prompts have been read: gives the `drafts` and the `target` of the rounds.
    """

    def __init__(self, texts: list[Text], drafts: Drafts, side: TargetSide, on_graphs: Choose) -> None:
        self.texts, self.drafts, self.side, self.on_graphs = texts, drafts, side, on_graphs
        self.target: RoundTarget = side
        self.active = list(texts)

    def run(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after `input_ids` `[batch, length]`: what `generate()` returns."""
        try:
            self._generate(input_ids)
        except BaseException:
            self.side.roll_back()
            raise
        finally:
            self.side.end()
        self.texts[0].generator.finish()
        for text in self.texts:
            text.end()
        return self.side.output(self.texts)

    def _generate(self, input_ids: Tensor) -> None:
        """The prompts' pass, then rounds until all texts have ended."""
        products, begin, count = self.texts[0].generator.products, time.perf_counter(), len(self.texts)
        with products:  # making them is no time of the prompt
            self._read_prompt(input_ids)
        for text in self.texts:
            text.stats.plain_passes += 1
            text.stats.prompt_seconds = (time.perf_counter() - begin) / count  # its token has been read
        with self.side.model._optimize_model_for_decode():
            self.side.begin(self.active)
            usual = self.drafts, self.side
            self.drafts, self.target = self.on_graphs(self.active, *usual)
            try:
                with products:
                    self._make_rounds()
            finally:
                self.target.leave()
                self.drafts, self.target = usual
            self.side.complete(self.texts)
        for text in self.texts:
            passes = self.side.passes.seconds(count, max(text.stats.rounds, 1), products)
            shares = [each and each / count for each in passes]
            text.stats.plain_pass_seconds, text.stats.same_pass_seconds = shares

    def _read_prompt(self, input_ids: Tensor) -> None:
        """The forward over the prompts and the first token of each text, exactly as in plain `generate()`."""
        for text, ids in zip(self.texts, input_ids.split(1), strict=True):
            text.begin(ids)
        rounds = [Round(text, Chain(), is_prompt=True) for text in self.texts]
        self.side.read_prompt(rounds, input_ids)
        self._take(rounds)

    def _make_rounds(self) -> None:
        while self.active:
            try:
                with self.target.attention():
                    while self.active:
                        self.target.prepare(self.active)
                        self.round()
                        self.side.note_pass()
            except GraphsFailedError as failure:
                self.drafts, self.target = self.target.instead(failure, self.active)

    def round(self) -> None:
        """Draft, one target pass, verify, emit, keep (SpecDec++, section 3; DySpec, section 4, where trees branch)."""
        begin = time.perf_counter()
        trees = self.drafts.propose(self.active, self.target)  # a chain is a tree of one branch
        drafted = time.perf_counter()
        rounds = list(map(Round, self.active, trees))
        self.target.read(rounds)
        read = time.perf_counter()
        self._take(rounds)
        # Its seconds go to the texts in equal shares. What verification waits for the device is the pass's.
        count, waited = len(rounds), sum([each.verdict.waited for each in rounds])
        draft, target = (drafted - begin) / count, (read - drafted + waited) / count
        rest = (time.perf_counter() - read - waited) / count
        for each in rounds:
            stats = each.text.stats
            stats.target_seconds += target
            if len(each.tree):
                stats.draft_seconds += draft
                stats.overhead_seconds += rest
            else:
                stats.overhead_seconds += rest + draft

    def _take(self, rounds: list[Round]) -> None:
        """Verify, emit what stands, leave both models at it; texts that have ended leave."""
        if not rounds[0].is_verified:
            self.verify(rounds)
        for each in rounds:
            each.emitted = each.text.emit(each.verdict)
        self.target.keep(rounds)
        if not rounds[0].is_prompt:
            self.drafts.saw(rounds)
        for each in rounds:
            text, tokens = each.text, each.verdict.emitted[: each.emitted.kept]
            text.stats.generated += len(tokens)
            if text.streamer is not None:
                text.streamer.put(torch.tensor([tokens]))
        if not all(stay := self.target.stays(self.active)):
            places = [place for place, stays in enumerate(stay) if stays]
            self.drafts.select(places)
            self.target.select(self.active, places)
            self.active = [self.active[place] for place in places]

    def verify(self, rounds: list[Round]) -> None:
        """One route: greedy or drawn, token by token or as a block; `emit` cuts what is behind the end of a text."""
        for each in rounds:
            each.verdict = each.text.verify(each)


_lock = Lock()
_users: list[bool] = []  # what the setting was when each thread came that is within


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """On CUDA let PyTorch choose another kernel of attention than cuDNN's.

    cuDNN makes a plan for each number of cached tokens, which takes longer than a pass, and a text that grows has
    another number in each pass. The setting is the process's: it is put back when the last of several threads leaves.
    """
    if device.type != "cuda":
        yield
        return
    with _lock:
        _users.append(torch.backends.cuda.cudnn_sdp_enabled())
        torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        with _lock:
            before = _users.pop()
            if not _users:
                torch.backends.cuda.enable_cudnn_sdp(before)
