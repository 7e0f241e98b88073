"""The parts of the loop: what drafts (`Drafts`), and the target's side (`TargetSide`), which owns its cache and how its
passes run, of one text (`OneTarget`)."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from hf_specdecpp.caches.trial import Held, Trial
from hf_specdecpp.clocks import working_clock
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.prefix import Prefix, reading_again
from hf_specdecpp.generation.refusals import check_numbers, check_prompt
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, input_device
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.pass_times import pass_times_of
from hf_specdecpp.trees.tree import DraftTree, TreePass

logger: Any = logging.get_logger("hf_specdecpp")
MEMORY = "memory ended"
MOST_PENDING = 16  # tokens that a target with recurrent layers reads again and again before a round settles them


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

    def forward(self, inputs: dict[str, Any], tokens: int) -> Any:
        """The outputs of a pass over so many tokens; on a CPU, where it is over when the call returns, it is timed."""
        work, clock = self.work_clock(), time.perf_counter()
        outputs = self.states.catch(self.model, **inputs, return_dict=True)
        if self.device.type == "cpu":
            self.passes.note(tokens, self.work_clock() - work, time.perf_counter() - clock)
        return outputs

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

    def time_plain_pass(self, first: Text, rows: int, inputs: Callable[[], dict[str, Any]]) -> None:
        """Time a pass over one token of each of `rows` texts beside those of the rounds, where nothing else says what
        such a pass takes; `first` of the texts notes it."""
        if self.passes.is_missing(rows, self.generator.products):
            begin = time.perf_counter()
            self.passes.make(rows, self.model, inputs())
            first.stats.compared_passes += 1
            first.stats.preparing_seconds += time.perf_counter() - begin


class OneTarget(TargetSide):
    """The target's side of one text. Nothing that it holds may hold it: in a circle, caches stay until garbage is
    collected."""

    def __init__(
        self, model: CausalLM, text: Text, config: GenerationConfig, model_kwargs: dict[str, Any],
        foreign: ForeignPasses | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, [text], config)
        self.text, self.stats, self.foreign = text, text.stats, foreign
        self.prefix = Prefix(model, self.states.asked_for(model_kwargs))
        self.generator.session.share(self.prefix)
        self.trial: Trial | None = None

    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        prefix = self.prefix
        outputs = self.states.catch(self.model._prefill, input_ids, self.config, prefix.model_kwargs)
        cache = cache_among(outputs)
        check_prompt(outputs)
        check_numbers(self.model, outputs.logits, prefix.model_kwargs.get("attention_mask"))
        reason = prefix.why_no_tree(input_ids, cache, getattr(self.config, "_mask_length", None))
        if reason and self.generator.trees is not None and self.foreign is None:  # whose rows are compared
            self.generator.trees.refuse(reason)
        # Not earlier: a sliding-window layer that records would keep the whole prompt.
        cache.activate_past_recording()
        rounds[0].outputs = outputs

    def begin(self, texts: Sequence[Text]) -> None:
        if texts and self.foreign is not None:
            again = reading_again(self.prefix, self.text.ids, self.generator.trees is not None)
            self.trial = Trial(self.model, self.foreign, self.generator.setup.most_tokens, again)
        super().begin(texts)

    def prepare(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        self.stats.rounds_at_change += self.prefix.is_at_change(self.text.ids)
        if self.trial is None:  # others' code is called no more often than it must be
            self.time_one_token()

    @property
    def forward_arguments(self) -> dict[str, Any]:
        return self.prefix.model_kwargs

    def enter(self, passes: CapturedTarget) -> None:
        prefix = self.prefix
        self.time_one_token()  # of the target's usual passes, which the verdict compares with
        passes.watch(self.generator.setup.drafter.reads)
        shown = None if prefix.shown is None else prefix.shown[None]
        passes.begin(prefix.cache, prefix.rows, shown, prefix.position)

    def own_logits(self, texts: Sequence[Text], tokens: Tensor) -> Tensor:  # noqa: ARG002
        inputs = self.prefix.chain_inputs(self.text.ids, tokens[0, 1:])
        logits: Tensor = self.model(**inputs, return_dict=True).logits
        self.prefix.roll_back()
        return logits

    def stays(self, texts: Sequence[Text]) -> list[bool]:  # noqa: ARG002
        return [not self.text.finished]

    def take_back(self, passes: CapturedTarget, texts: Sequence[Text], rows: Sequence[int]) -> None:  # noqa: ARG002
        passes.text.cache.write(self.prefix.cache, passes.text.held)
        self.prefix.grow(passes.text.held - self.prefix.text.held)

    def room(self, text: Text) -> int | None:
        # Tokens that are read again with every round cost more than one round without candidates, which settles them.
        if self.prefix.text.pending >= MOST_PENDING:
            return 0
        room = self.prefix.most_candidates(text.ids) if self.prefix.is_limited else None
        if self.trial is None or self.trial.room is None:
            return room
        return self.trial.room if room is None else min(room, self.trial.room)

    def read(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        input_ids, tree = each.text.ids, each.tree
        held = None if self.trial is None else Held(self.prefix.cache)
        if tree.is_chain:
            inputs = self.prefix.chain_inputs(input_ids, tree.ids(input_ids.device) if len(tree) else [])
        else:
            inputs = self.prefix.tree_inputs(input_ids, each.rows)
        each.outputs, each.width = self.forward(inputs, self.prefix.width), self.prefix.width
        if (mark := self.prefix.text.mark) is not None:
            self.stats.state_bytes = mark.num_bytes
        if held is not None and self.trial is not None and not held.grew_by(each.width):
            self.trial.refuse("the cache does not grow by the tokens of each pass")
            if len(tree):  # nothing of the pass was emitted yet
                held.back()
                each.tree, each.rows = (alone := DraftTree.chain()), TreePass(alone)
                self.read(rounds)

    def keep(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        kept, path = each.emitted
        self.take_states(each, self.prefix.text.pending)
        self.prefix.settle(each.outputs, kept, len(each.tree), path)
        if self.trial is not None and not each.is_prompt:
            self._compare(self.trial, each)

    def take_states(self, each: Round, again: int = 0) -> None:
        """Take the states of the tokens that a round emitted; its pass has read `again` tokens of the text first."""
        count, (kept, path) = len(each.tree), each.emitted
        if self.text.records.are_asked_for:
            self.text.records.add_states(each.outputs, kept, count, None if path is None else path.rows, again)
        if self.states.are_read:
            # All of the prompt; later the last token before the round and the accepted candidates.
            if each.is_prompt:
                rows: Tensor | slice = slice(None)
            elif not count and not again:
                rows = slice(-1, None)  # the text before it may have been read anew
            elif path is None:
                rows = slice(again, again + kept)
            else:
                rows = path.on_device[:kept]
            self.text.states = self.states.take(rows)

    def _compare(self, trial: Trial, each: Round) -> None:
        """Let the trial note what a round has read, and say so once others' code rules candidates out."""
        logits, (kept, path) = each.outputs.logits[0, -len(each.tree) - 1 :], each.emitted
        if not self.text.finished:
            rows = slice(kept) if path is None else path.rows[:kept]
            trial.note(logits[rows], self.text.ids, self.prefix.cache)
        if trial.passes.reason is not None and self.stats.refusal is None:
            self.stats.refusal = trial.passes.reason
            logger.warning_once(f"Nothing more is drafted for {type(self.model).__name__}: {trial.passes.reason}.")

    def time_one_token(self) -> None:
        """Time a pass over one token beside those of the rounds, where nothing else says what it takes."""
        prefix, ids = self.prefix, self.text.ids
        tell_it = self.generator.rests and self.device.type == "cpu"
        if not (tell_it or prefix.text.pending or prefix.is_at_change(ids)):
            self.time_plain_pass(self.text, 1, lambda: prefix.chain_inputs(ids, []))

    def complete(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        with self.generator.products:
            self.prefix.read_pending(self.text.ids)

    def roll_back(self) -> None:
        self.prefix.roll_back()

    def end(self) -> None:
        self.prefix.end()

    def output(self, texts: Sequence[Text]) -> Tensor | GenerateDecoderOnlyOutput:  # noqa: ARG002
        if not self.config.return_dict_in_generate:
            return self.text.ids
        return self.text.records.output(self.text.ids, self.prefix.cache)


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
