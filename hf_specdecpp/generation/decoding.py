"""The decoding loop of one `generate()` call (`AssistedDecoding`). In each round, `Drafts` proposes candidates, and a
`RoundTarget` runs the target's forward pass over them.

Differences from transformers' `_assisted_decoding`: the prompt has a separate forward pass, so a reused cache, chunked
prefill and sliding windows behave as in plain `generate()`. Stopping criteria are called after each token. Scores,
hidden states and attentions are those of the returned tokens. Candidates may form trees, and each row of a batch
advances by its own number of tokens."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput

from hf_specdecpp.clocks import working_clock
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.candidate_generator import propose_together
from hf_specdecpp.generation.output_text import OutputText, Round
from hf_specdecpp.generation.refusals import Call
from hf_specdecpp.models.causal_lm import input_device
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.pass_times import pass_times_of
from hf_specdecpp.trees.tree import Chain, DraftTree

MEMORY = "memory ended"


class RoundTarget(ABC):
    """Runs the target's forward passes: `TargetSide` by the target's forward method, `GraphTarget` by CUDA graphs."""

    def prepare(self, texts: Sequence[OutputText]) -> None:  # noqa: B027 - optional in subclasses
        """Called before each round, and not timed with it: may compact a batch's cache, or time a one-token pass."""

    def max_candidates(self, text: OutputText) -> int | None:
        """The largest number of candidates of `text` that the next pass may read; `None`: no limit."""
        return None

    @abstractmethod
    def read(self, rounds: Sequence[Round]) -> None:
        """Run one forward pass over the last token and the candidates of the sequence of each round. Sets `outputs` and
        `width` of the rounds or, if CUDA graphs have drawn and verified candidates, `outputs`, `tree` and `result`."""

    @abstractmethod
    def commit(self, rounds: Sequence[Round]) -> None:
        """Called after verification: drops rejected candidates from the cache and from the states that drafts read."""

    def select(self, texts: Sequence[OutputText], places: Sequence[int]) -> None:  # noqa: B027 - does nothing for a single sequence
        """Called when some of `texts` have ended: drops all but those at indices `places`, such as [0, 2] of 3."""

    def after_failure(self, failure: GraphsFailedError, texts: Sequence[OutputText]) -> tuple[Drafts, RoundTarget]:
        """Called if a CUDA graph has failed. Returns drafts and target that repeat this round and make later ones."""
        raise failure

    def leave(self, texts: Sequence[OutputText] = ()) -> None:  # noqa: B027 - does nothing without graphs
        """Called after the last round, or when `texts` continue without graphs: copies keys and values to the target's
        own cache (in a batch only those of `texts`), and releases the captured passes for other calls."""


class Drafts:
    """Proposes candidates in each round, by the `SpecDecPPCandidateGenerator` of each sequence. `batch`: runs the draft
    for all rows of a batch (`Draft.batch`); `None` if each row runs it alone."""

    batch: Any = None

    def __init__(self, batch: Any = None) -> None:
        self.batch = batch

    def propose(self, texts: Sequence[OutputText], target: RoundTarget) -> list[DraftTree]:
        """The next candidates of each of `texts`: a tree, or a chain, which has one branch. Either may be empty."""
        if texts[0].generator.setup.rows == 1:
            (text,) = texts
            return [text.generator.propose(text.ids, target.max_candidates(text), text.states)]
        generators, ids = [text.generator for text in texts], [text.ids for text in texts]
        most, states = [target.max_candidates(text) for text in texts], [text.states for text in texts]
        return propose_together(generators, ids, most, states, self.batch)

    def record_outcome(self, rounds: Sequence[Round]) -> None:
        """Called after each commit: gives generators the accepted paths and, if rounds are timed, the pass's width."""
        first = rounds[0].text.generator
        if first.times is not None and len(rounds) == first.setup.rows:
            # Before the plan may compute new decisions, which takes long.
            first.times.end(max([each.text.before for each in rounds]), rounds[0].width)
        for each in rounds:
            each.text.generator.record_outcome(each.tree, each.result.path, each.text.before)

    def select(self, places: Sequence[int]) -> None:
        """Called when sequences have ended: drops all but those at the indices `places` of the last `texts`."""
        if self.batch is not None:
            self.batch.select(places)


class GraphsFailedError(RuntimeError):
    """A part of a round cannot be captured, or memory runs out. Raised before verification: the round is repeated.

    Attributes:
        lasting: why later calls cannot capture this part either; `None` if they may try again.
        is_memory: whether memory ran out.
    """

    def __init__(self, reason: str, lasting: str | None = None) -> None:
        super().__init__(reason)
        self.lasting, self.is_memory = lasting, reason.startswith(MEMORY)


class TargetSide(RoundTarget):
    """The target of one call, and the owner of its KV cache: reads prompts, runs rounds without CUDA graphs, stores
    hidden states for drafts that read them, times passes, and builds the output of `generate()`."""

    foreign: ForeignPasses | None = None  # hooks and patches that run in the target's passes, if any
    carries_cache = False  # whether a batch leaves its cache as plain `generate()` does
    timed_pass: tuple[int, float, float] | None = None  # tokens, CPU and wall-clock seconds of the latest pass

    def __init__(self, call: Call, texts: Sequence[OutputText]) -> None:
        self.model, self.config, self.device = call.target, call.config, input_device(call.target)
        self.generator, setup = texts[0].generator, texts[0].generator.setup
        self.states = TargetStates(call.target, None if self.generator.is_paused else setup.drafter.reads)
        self.passes, self.work_clock = pass_times_of(call.target), working_clock()

    @abstractmethod
    def read_prompt(self, rounds: Sequence[Round]) -> None:
        """Run the pass over the prompts as plain `generate()` does; sets `outputs` of `rounds`."""

    def run(self, inputs: dict[str, Any], num_tokens: int) -> Any:
        """Run a round's forward pass over `num_tokens` tokens of all sequences together, with the arguments `inputs`,
        and return its outputs. On a CPU, where a pass ends when its call returns, time it."""
        forward = partial(self.states.catch, self.model) if self.states.are_read else self.model
        work, clock = self.work_clock(), time.perf_counter()
        outputs = forward(**inputs, return_dict=True)
        if self.device.type == "cpu":
            self.timed_pass = num_tokens, self.work_clock() - work, time.perf_counter() - clock
        return outputs

    def record_pass(self) -> None:
        """Called after each round: adds the seconds of its pass, if timed, to the target's `PassTimes`."""
        if self.timed_pass is not None:
            self.passes.record_pass(*self.timed_pass, self.generator.setup.rows, self.generator.products)
            self.timed_pass = None

    # Called for captured passes. --------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def forward_arguments(self) -> dict[str, Any]:
        """`model_kwargs` of the next forward pass, including the target's own cache."""

    @abstractmethod
    def copy_prompts(self, passes: CapturedTarget) -> None:
        """Copy the prompts' keys and values from the target's own cache to that of the captured `passes`."""

    @abstractmethod
    def own_logits(self, texts: Sequence[OutputText], tokens: Tensor) -> Tensor:
        """Logits `[texts, n, vocab]` of the target's own pass over `tokens` `[texts, n]`, to compare captured passes
        with. `tokens` start with the last token of each sequence. The pass is rolled back."""

    @abstractmethod
    def copy_back(self, passes: CapturedTarget, texts: Sequence[OutputText], rows: Sequence[int]) -> None:
        """Copy keys and values from `passes` to the target's own cache: `texts[i]` is row `rows[i]` of `passes`."""

    def save_row(self, text: OutputText, keys_values: Callable[[], Any]) -> None:
        """Called when a row of a batch has ended: stores its `keys_values()` if the cache will be returned."""

    # The end of a call. -----------------------------------------------------------------------------------------------

    @abstractmethod
    def complete(self) -> None:
        """Called after the last round: brings the cache to the state in which plain `generate()` leaves it."""

    def roll_back(self) -> None:
        """Called after an exception: crops the cache, possibly the user's own, to the emitted tokens."""

    @abstractmethod
    def end(self) -> None:
        """Called at the end of every call, also after an exception: prepares the cache for later calls. A batch's cache
        that `complete` has not restored raises `ValueError` if it is used again."""

    @abstractmethod
    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        """The output of `generate()`: token ids `[batch, length]`, or an object with `return_dict_in_generate`."""

    def time_plain_pass(self, rows: int, inputs: Callable[[], dict[str, Any]]) -> None:
        """Called before each round: if the target's `PassTimes` need it, time an additional pass over one token of each
        of `rows` sequences, with the arguments `inputs()`. Counted in the statistics of the first sequence."""
        if self.passes.is_missing(rows, self.generator.products):
            begin, stats = time.perf_counter(), self.generator.stats
            self.passes.make(rows, self.model, inputs())
            stats.compared_passes += 1
            stats.preparing_seconds += time.perf_counter() - begin


Choose: TypeAlias = Callable[[Sequence[OutputText], Drafts, TargetSide], tuple[Drafts, RoundTarget]]


class AssistedDecoding:
    """The decoding loop of one `generate()` call, for a single sequence or the rows of a batch.

    Attributes:
        active: the sequences that have not ended, from `texts`, which has all.
        drafts, target: propose candidates and run target passes in rounds. Before and after them `target` is `side`.
        on_graphs: called after the prompts' pass: returns the rounds' `drafts` and `target`, with or without graphs.
    """

    def __init__(self, texts: list[OutputText], drafts: Drafts, side: TargetSide, on_graphs: Choose) -> None:
        self.texts, self.drafts, self.side, self.on_graphs = texts, drafts, side, on_graphs
        self.target: RoundTarget = side
        self.active = list(texts)

    def run(self) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate after the prompts. Returns the output of `generate()`."""
        try:
            self._generate()
        except BaseException:
            self.side.roll_back()
            raise
        finally:
            self.side.end()
        for text in self.texts:
            text.end()
        return self.side.output()

    def _generate(self) -> None:
        """Run the prompts' forward pass, then rounds until all sequences have ended."""
        products, begin, count = self.texts[0].generator.products, time.perf_counter(), len(self.texts)
        with products:
            self._read_prompt()
        for text in self.texts:
            text.stats.plain_passes += 1
            text.stats.prompt_seconds = (time.perf_counter() - begin) / count  # to the first token, copied to the host
        with self.side.model._optimize_model_for_decode():
            usual = self.drafts, self.side
            self.drafts, self.target = self.on_graphs(self.active, *usual)
            try:
                with products:
                    self._make_rounds()
            finally:
                self.target.leave()
                self.drafts, self.target = usual
            self.side.complete()
        for text in self.texts:
            passes = self.side.passes.seconds(count, max(text.stats.rounds, 1), products)
            shares = [each and each / count for each in passes]
            text.stats.plain_pass_seconds, text.stats.same_pass_seconds = shares

    def _read_prompt(self) -> None:
        """Run the prompts' forward pass, and emit the first token of each sequence, exactly as plain `generate()`."""
        rounds = [Round(text, Chain(), is_prompt=True) for text in self.texts]
        self.side.read_prompt(rounds)
        self._finish_round(rounds)

    def _make_rounds(self) -> None:
        while self.active:
            try:
                with without_cudnn(self.side.device) if self.target is self.side else nullcontext():
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
            stats.draft_seconds += draft
            stats.target_seconds += target
            stats.overhead_seconds += rest

    def _finish_round(self, rounds: list[Round]) -> None:
        """Verify, emit and commit a round, update statistics and streamers, and drop ended sequences from `active`.

        Example: without EOS ids, rows 0 and 1 reach a stop string at lengths 12 and 20. Plain generation continues row
        0 up to length 20, so row 0 has not ended until then."""
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
        stay = [not text.finished for text in self.active]
        if self.texts[0].goes_on:
            last = max(text.end_length for text in self.texts)
            stay = [text.length < last for text in self.active]
        if not all(stay):
            places = [place for place, stays in enumerate(stay) if stays]
            self.drafts.select(places)
            self.target.select(self.active, places)
            self.active = [self.active[place] for place in places]


_lock = Lock()
_users: list[bool] = []  # the setting at entry of each thread inside `without_cudnn`


@contextmanager
def without_cudnn(device: torch.device) -> Iterator[None]:
    """A context without cuDNN's attention kernels on CUDA: planning them for each new cache length takes longer than a
    forward pass. The setting holds for the whole process; the last thread to leave the context restores it."""
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
