"""The decoding loop (`AssistedDecoding`) and its parts: `Drafts` proposes candidates, and `TargetSide` runs the
target's forward passes and owns its cache.

Differences from transformers' `_assisted_decoding`: the prompt has a separate forward pass, so a reused cache, chunked
prefill and sliding windows behave as in plain `generate()`. Stopping criteria are called after each token. Scores,
hidden states and attentions are those of the returned tokens. Candidates may form trees, and each row of a batch
advances by its own number of tokens.
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
from hf_specdecpp.generation.output_text import OutputText, Round
from hf_specdecpp.models.causal_lm import CausalLM, input_device
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.pass_times import pass_times_of
from hf_specdecpp.trees.tree import Chain, DraftTree

MEMORY = "memory ended"


class RoundTarget(ABC):
    """The target in a round. `TargetSide` calls the target's forward, `GraphTarget` launches CUDA graphs."""

    def attention(self) -> AbstractContextManager[None]:
        """The context in which all rounds run: it excludes unsuitable attention kernels, if there are any."""
        return nullcontext()

    def prepare(self, texts: Sequence[OutputText]) -> None:  # noqa: B027 - optional in subclasses
        """Called before each round, for work that is not part of the round's seconds."""

    def max_candidates(self, text: OutputText) -> int | None:
        """The largest number of candidates in the next pass; `None`: no limit."""
        return None

    @abstractmethod
    def read(self, rounds: Sequence[Round]) -> None:
        """Run one forward pass over the last token and the candidates of each sequence. Sets `outputs` and `width` of
        the rounds, or, if the GPU has drawn and verified the candidates, `outputs`, `tree` and `result`."""

    @abstractmethod
    def commit(self, rounds: Sequence[Round]) -> None:
        """Remove rejected candidates from the cache and from the hidden states that drafts read."""

    @abstractmethod
    def are_unfinished(self, texts: Sequence[OutputText]) -> list[bool]:
        """For each sequence, whether further tokens follow."""

    def select(self, texts: Sequence[OutputText], places: Sequence[int]) -> None:  # noqa: B027 - does nothing for a single sequence
        """Called when sequences have ended: only those at the indices `places` of `texts` continue."""

    def after_failure(self, failure: GraphsFailedError, texts: Sequence[OutputText]) -> tuple[Drafts, RoundTarget]:
        """Called when graphs have failed. Returns the drafts and the target of this round and all later ones."""
        raise failure

    def leave(self, texts: Sequence[OutputText] = ()) -> None:  # noqa: B027 - does nothing without graphs
        """Called after the last round, or when `texts` continue without graphs: releases the captured passes. Keys and
        values of a single sequence, in a batch those of `texts`, are copied to the target's own cache."""


class Drafts:
    """Proposes candidates: here for a single sequence, with its `SpecDecPPCandidateGenerator`."""

    def propose(self, texts: Sequence[OutputText], target: RoundTarget) -> list[DraftTree]:
        """A tree for each sequence. A chain has one branch; an empty tree is a round without candidates."""
        (text,) = texts
        return [text.generator.propose(text.ids, target.max_candidates(text), text.states)]

    def record_outcome(self, rounds: Sequence[Round]) -> None:
        """Called after a commit: the generator gets the accepted path and, with measured costs, the pass width."""
        (each,) = rounds
        generator = each.text.generator
        if generator.times is not None:  # before the plan may compute its decisions anew, which takes long
            generator.times.end(each.text.before, each.width)
        generator.record_outcome(each.tree, each.result.path, each.text.before)

    def select(self, places: Sequence[int]) -> None:
        """Called when sequences have ended: only those at the indices `places` continue."""


class GraphsFailedError(RuntimeError):
    """A part of a round cannot be captured, or memory runs out; raised before the round is verified.

    Attributes:
        lasting: the reason if a later call cannot capture the part either, or `None`.
        is_memory: whether memory ran out.
    """

    def __init__(self, reason: str, lasting: str | None = None) -> None:
        super().__init__(reason)
        self.lasting, self.is_memory = lasting, reason.startswith(MEMORY)


class TargetSide(RoundTarget):
    """The target of a call, the owner of its cache: reads the prompt, runs rounds without graphs, collects the hidden
    states that drafts read, times passes, and builds the output of `generate()`."""

    foreign: ForeignPasses | None = None  # hooks and patches in the target's passes, if any
    carries_cache = False  # whether a batch leaves its cache as plain `generate()` does
    timed_pass: tuple[int, float, float] | None = None  # tokens, CPU and wall-clock seconds of the latest pass

    def __init__(self, model: CausalLM, texts: Sequence[OutputText], config: GenerationConfig) -> None:
        self.model, self.config, self.device = model, config, input_device(model)
        self.generator, setup = texts[0].generator, texts[0].generator.setup
        self.states = TargetStates(model, None if self.generator.is_paused else setup.drafter.reads)
        self.passes, self.work_clock = pass_times_of(model), working_clock()

    def attention(self) -> AbstractContextManager[None]:
        return without_cudnn(self.device)

    @abstractmethod
    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        """Run the prompts' forward pass as plain `generate()` does; sets `outputs` of the rounds."""

    def begin_texts(self, texts: Sequence[OutputText]) -> None:
        """Called once, after the prompt and before the first round."""

    # Called for captured passes. --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def forward_arguments(self) -> dict[str, Any]:
        """Keyword arguments of the target's forward, including its own cache."""

    @abstractmethod
    def copy_prompts(self, passes: CapturedTarget) -> None:
        """Copy the prompts' keys and values to `passes`; the target's own cache is unchanged."""

    @abstractmethod
    def own_logits(self, texts: Sequence[OutputText], tokens: Tensor) -> Tensor:
        """Logits `[texts, n, vocab]` of a pass without graphs over `tokens` `[texts, n]`, which start with the last
        token of each sequence. The pass is then rolled back."""

    @abstractmethod
    def copy_back(self, passes: CapturedTarget, texts: Sequence[OutputText], rows: Sequence[int]) -> None:
        """Copy the keys and values of `texts`, in the given `rows` of `passes`, to the target's own cache."""

    def save_row(self, text: OutputText, keys_values: Callable[[], Any]) -> None:
        """Called when a sequence has ended: a batch that returns its cache stores `keys_values()` of the sequence."""

    # The end of a call. -----------------------------------------------------------------------------------------------

    @abstractmethod
    def complete(self, texts: Sequence[OutputText]) -> None:
        """Called after the last round: leaves the cache as plain `generate()` leaves it."""

    def roll_back(self) -> None:
        """Called after an exception: crops the cache, possibly the user's own, to the emitted tokens."""

    @abstractmethod
    def end(self) -> None:
        """Called at the end of every call, also after an exception: prepares the cache for later calls, if it can."""

    @abstractmethod
    def output(self, texts: Sequence[OutputText]) -> Tensor | GenerateDecoderOnlyOutput:
        """The output of `generate()`."""

    def record_pass(self) -> None:
        """Called after each round: records the seconds of its pass, if timed."""
        if self.timed_pass is not None:
            self.passes.record_pass(*self.timed_pass, self.generator.setup.rows, self.generator.products)
            self.timed_pass = None

    def time_plain_pass(self, first: OutputText, rows: int, inputs: Callable[[], dict[str, Any]]) -> None:
        """Called before rounds: times an additional pass over one token of each of `rows` sequences if due
        (`PassTimes`), with the arguments of `inputs()`. The statistics of `first` count it."""
        if self.passes.is_missing(rows, self.generator.products):
            begin = time.perf_counter()
            self.passes.make(rows, self.model, inputs())
            first.stats.compared_passes += 1
            first.stats.preparing_seconds += time.perf_counter() - begin


Choose: TypeAlias = Callable[[Sequence[OutputText], Drafts, TargetSide], tuple[Drafts, RoundTarget]]


class AssistedDecoding:
    """One `generate()` call, for a single sequence or the rows of a batch.

    Attributes:
        active: the sequences that have not ended.
        drafts, target: propose candidates and run target passes in rounds. Before and after them `target` is `side`.
        on_graphs: called after the prompts' pass: returns `drafts` and `target` of the rounds, with or without graphs.
    """

    def __init__(self, texts: list[OutputText], drafts: Drafts, side: TargetSide, on_graphs: Choose) -> None:
        self.texts, self.drafts, self.side, self.on_graphs = texts, drafts, side, on_graphs
        self.target: RoundTarget = side
        self.active = list(texts)

    def run(self, input_ids: Tensor) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after the prompts `input_ids` `[batch, length]`. Returns the output of `generate()`."""
        try:
            self._generate(input_ids)
        except BaseException:
            self.side.roll_back()
            raise
        finally:
            self.side.end()
        self.texts[0].generator.finish()
        first = self.texts[0].stats
        for text in self.texts:
            text.stats.decided["products"], text.stats.has_products = first.decided["products"], first.has_products
            text.end()
        return self.side.output(self.texts)

    def _generate(self, input_ids: Tensor) -> None:
        """The prompts' forward pass, then rounds until all sequences have ended."""
        products, begin, count = self.texts[0].generator.products, time.perf_counter(), len(self.texts)
        with products:
            self._read_prompt(input_ids)
        for text in self.texts:
            text.stats.plain_passes += 1
            text.stats.prompt_seconds = (time.perf_counter() - begin) / count  # to the first token, copied to the host
        with self.side.model._optimize_model_for_decode():
            self.side.begin_texts(self.active)
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
        """The prompts' forward pass and the first token of each sequence, exactly as in plain `generate()`."""
        for text, ids in zip(self.texts, input_ids.split(1), strict=True):
            text.begin(ids)
        rounds = [Round(text, Chain(), is_prompt=True) for text in self.texts]
        self.side.read_prompt(rounds, input_ids)
        self._finish_round(rounds)

    def _make_rounds(self) -> None:
        while self.active:
            try:
                with self.target.attention():
                    while self.active:
                        self.target.prepare(self.active)
                        self.round()
                        self.side.record_pass()
            except GraphsFailedError as failure:
                self.drafts, self.target = self.target.after_failure(failure, self.active)

    def round(self) -> None:
        """Draft, run one target pass, verify, emit, commit (SpecDec++, section 3; for trees DySpec, section 4). With
        whole rounds as graphs, `propose` launches all of these on the device, and `read` waits for the results."""
        begin = time.perf_counter()
        trees = self.drafts.propose(self.active, self.target)  # a chain is a tree with one branch
        drafted = time.perf_counter()
        rounds = list(map(Round, self.active, trees))
        self.target.read(rounds)
        read = time.perf_counter()
        self._finish_round(rounds)
        # Each sequence gets an equal share of the seconds. Waiting for the device in `verify` counts as target time.
        count, waited = len(rounds), sum([each.result.waited for each in rounds])
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

    def _finish_round(self, rounds: list[Round]) -> None:
        """Verify, emit and commit a round, update statistics and streamers, and drop ended sequences from `active`."""
        for each in rounds:  # tokens after the end of a sequence are removed by `emit`
            if not each.is_verified:
                each.result = each.text.verify(each)
            each.emitted = each.text.emit(each.result)
        self.target.commit(rounds)
        if not rounds[0].is_prompt:
            self.drafts.record_outcome(rounds)
        for each in rounds:
            text, tokens = each.text, each.result.emitted[: each.emitted.kept]
            text.stats.generated += len(tokens)
            if text.streamer is not None:
                text.streamer.put(torch.tensor([tokens], device="cpu"))
        if not all(stay := self.target.are_unfinished(self.active)):
            places = [place for place, stays in enumerate(stay) if stays]
            self.drafts.select(places)
            self.target.select(self.active, places)
            self.active = [self.active[place] for place in places]


_lock = Lock()
_users: list[bool] = []  # the setting at entry of each thread inside `without_cudnn`


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """A context in which PyTorch does not choose cuDNN's attention kernels on CUDA: for each new cache length they make
    a plan, which takes longer than a pass. The setting is the process's, and restored when the last thread leaves."""
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
