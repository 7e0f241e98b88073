"""The target's side of a call (`TargetSide`), which owns its cache and how passes run: of one text (`OneTarget`)."""

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
from hf_specdecpp.captured.target import CapturedTarget
from hf_specdecpp.generation.captured.text import Captured, CapturedText, memory_ended
from hf_specdecpp.generation.prefix import Prefix, TargetText, reading_again, try_pass
from hf_specdecpp.generation.refusals import check_numbers, check_prompt
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, input_device
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.models.target_states import TargetStates
from hf_specdecpp.throughput.pass_times import pass_times_of
from hf_specdecpp.trees.tree import DraftTree, TreePass

logger: Any = logging.get_logger("hf_specdecpp")
MOST_PENDING = 16  # tokens that a target with recurrent layers reads again and again before a round settles them


class TargetSide(ABC):
    """What the loop asks of the target, which owns its cache and how its passes run: the states that drafts read, what
    passes take and on which products they run, and what is captured."""

    foreign: ForeignPasses | None = None  # where passes run code of others

    def __init__(self, model: CausalLM, texts: Sequence[Text], config: GenerationConfig) -> None:
        self.model, self.config, self.device = model, config, input_device(model)
        self.generator, setup = texts[0].generator, texts[0].generator.setup
        self.states = TargetStates(model, None if self.generator.rests else setup.drafter.reads)
        self.passes = pass_times_of(model)
        self.captured = Captured(self, texts)

    @property
    def products(self) -> FasterProducts:
        """The context within which passes are made."""
        return self.generator.products

    def attention(self, beside_captured: bool = False) -> AbstractContextManager[None]:
        """The context in which rounds are made, or in which a draft reads beside passes that alone are captured."""
        grows = self.device.type == "cuda" and beside_captured == (self.captured.passes is not None)
        return without_cudnn() if grows else nullcontext()

    @abstractmethod
    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        """Read the prompts as plain `generate()` does: the `outputs` of the rounds."""

    def begin(self, texts: Sequence[Text]) -> None:
        """Told once, before the first round."""
        self.passes.begin(self.products)
        if texts:
            self.captured.begin(texts)

    @abstractmethod
    def prepare(self, texts: Sequence[Text]) -> None:
        """What a round needs and is not counted among its seconds."""

    @property
    @abstractmethod
    def growing(self) -> Any:
        """The target's own cache, with the arguments of its forward."""

    @property
    @abstractmethod
    def forward_arguments(self) -> dict[str, Any]:
        """These arguments, before anything is captured."""

    @abstractmethod
    def enter(self, passes: CapturedTarget) -> str | None:
        """Go on with captured passes; or not, for a reason."""

    @abstractmethod
    def leave_rooms(self, texts: Sequence[Text] = ()) -> Any:
        """Go on uncaptured with these texts."""

    def hold(self, count: int) -> None:  # noqa: B027 - of rows, what is read after their end is not looked at
        """Of what a captured round has read, `count` tokens were emitted: the cache that is given back ends there."""

    def room(self, text: Text) -> int | None:  # noqa: ARG002
        """How many candidates the next pass has room for; `None`: any number."""
        return None

    @abstractmethod
    def read(self, rounds: Sequence[Round]) -> None:
        """One pass over the last token of each text and its candidates: `outputs` and `width` of the rounds."""

    @abstractmethod
    def keep(self, rounds: Sequence[Round]) -> None:
        """Leave the cache and the states that drafts read at what was emitted."""

    def stays(self, texts: Sequence[Text]) -> list[bool]:
        """Which texts go on."""
        return [not text.finished for text in texts]

    def select(self, texts: Sequence[Text], places: Sequence[int]) -> None:  # noqa: B027 - of one text nothing is left
        """Of `texts` those at `places` go on."""

    @abstractmethod
    def complete(self, texts: Sequence[Text]) -> None:
        """After the last round: leave the cache as plain `generate()` leaves it."""

    def roll_back(self) -> None:  # noqa: B027 - the rows of a batch have lost their places
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
        if self.passes.is_missing(rows, self.products):
            begin = time.perf_counter()
            self.passes.make(rows, self.model, inputs())
            first.stats.compared_passes += 1
            first.stats.preparing_seconds += time.perf_counter() - begin


class OneTarget(TargetSide):
    """The target's side of one text, which is read in its cache or in captured rooms (`prefix`). Nothing that it holds
    may hold it: in a circle, caches stay until garbage is collected."""

    def __init__(
        self, model: CausalLM, text: Text, config: GenerationConfig, model_kwargs: dict[str, Any],
        foreign: ForeignPasses | None = None,
    ) -> None:  # fmt: skip
        super().__init__(model, [text], config)
        self.text, self.stats, self.foreign = text, text.stats, foreign
        self.prefix: TargetText = Prefix(model, self.states.asked_for(model_kwargs))
        self.generator.session.share(self.prefix)
        self.trial: Trial | None = None

    def read_prompt(self, rounds: Sequence[Round], input_ids: Tensor) -> None:
        prefix: Any = self.prefix  # of the target's own passes
        outputs = self.states.catch(self.model._prefill, input_ids, self.config, prefix.model_kwargs)
        cache = cache_among(outputs)
        check_prompt(outputs)
        check_numbers(self.model, outputs.logits, prefix.model_kwargs.get("attention_mask"))
        if self.generator.draws_trees and self.foreign is None:  # whose rows are compared
            prefix.check_rows(input_ids, cache, getattr(self.config, "_mask_length", None))
        # Not earlier: a sliding-window layer that records would keep the whole prompt.
        cache.activate_past_recording()
        rounds[0].outputs = outputs

    def begin(self, texts: Sequence[Text]) -> None:
        prefix: Any = self.prefix
        if texts and self.foreign is not None:
            again = reading_again(prefix, self.text.ids, self.generator.draws_trees)
            self.trial = Trial(self.model, self.foreign, self.generator.setup.most_tokens, again)
        super().begin(texts)

    def prepare(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        if self.captured.rounds is None:
            self.stats.rounds_at_change += self.prefix.is_at_change(self.text.ids)
            if self.trial is None:  # others' code is called no more often than it must be
                self.time_one_token()

    @property
    def growing(self) -> Any:
        return self.prefix.cache

    @property
    def forward_arguments(self) -> dict[str, Any]:
        prefix: Any = self.prefix  # of the target's own passes
        return dict(prefix.model_kwargs)

    def enter(self, passes: CapturedTarget) -> str | None:
        prefix: Any = self.prefix
        text = CapturedText(prefix, passes, self.generator.setup.drafter.reads)

        def own(tokens: Tensor) -> Tensor:
            inputs = prefix.chain_inputs(self.text.ids, tokens[0, 1:])
            logits: Tensor = self.model(**inputs, return_dict=True).logits
            prefix.roll_back()
            return logits

        if (reason := self.captured.compare(passes, own, prefix.most_candidates(self.text.ids))) is not None:
            return reason
        self.time_one_token()  # of the target's usual passes, which the verdict compares with
        self.prefix = text
        return None

    def hold(self, count: int) -> None:
        self.prefix.text.held += count

    def leave_rooms(self, texts: Sequence[Text] = ()) -> Prefix:  # noqa: ARG002
        """The text in the cache that `generate()` returns."""
        text: Any = self.prefix
        if text.is_captured:
            self.prefix = text = text.give_back()
        self.captured.end()
        return text

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
        try:
            if tree.is_chain:
                inputs = self.prefix.chain_inputs(input_ids, tree.ids(input_ids.device) if len(tree) else [])
            else:
                inputs = self.prefix.tree_inputs(input_ids, each.rows)
            each.outputs, each.width = self._forward(inputs), self.prefix.width
            reason = None
        except torch.OutOfMemoryError as error:
            if not self.prefix.is_captured:
                raise
            reason = memory_ended(error)
        if reason is not None:  # outside of the handler, which keeps what was made last
            self.captured.run_out(reason, [self.text])
            self.read(rounds)
            return
        if (mark := self.prefix.text.mark) is not None:
            self.stats.state_bytes = mark.num_bytes
        if held is not None and self.trial is not None and not held.grew_by(each.width):
            self.trial.refuse("the cache does not grow by the tokens of each pass")
            if len(tree):  # nothing of the pass was emitted yet
                held.back()
                each.tree, each.rows = (alone := DraftTree.chain()), TreePass(alone)
                self.read(rounds)

    def _forward(self, inputs: dict[str, Any]) -> Any:
        if self.prefix.is_captured or self.device.type != "cpu":
            return self.prefix.forward(self.states, inputs)
        work, clock = time.process_time(), time.perf_counter()
        outputs = self.prefix.forward(self.states, inputs)
        self.passes.note(self.prefix.width, time.process_time() - work, time.perf_counter() - clock)
        return outputs

    def keep(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        count, (kept, path), again = len(each.tree), each.emitted, self.prefix.text.pending
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
        self.prefix.settle(each.outputs, kept, count, path)
        if self.trial is not None and not each.is_prompt:
            self._compare(self.trial, each)

    def _compare(self, trial: Trial, each: Round) -> None:
        """Let the trial note what a round has read, and say so once others' code rules candidates out."""
        logits, (kept, path) = each.outputs.logits[0, -len(each.tree) - 1 :], each.emitted
        if not self.text.finished:
            rows = slice(kept) if path is None else path.rows[:kept]
            trial.note(logits[rows], self.text.ids, self.prefix.cache)
        if trial.passes.reason is not None and self.stats.refusal is None:
            self.stats.refusal = trial.passes.reason
            logger.warning_once(f"Nothing more is drafted for {type(self.model).__name__}: {trial.passes.reason}.")

    def try_pass(self, count: int) -> None:
        """Make a pass over the last token and so many candidates, only for it to be captured."""
        try_pass(self.prefix, self._forward, self.text.ids, self.generator.draws_trees, count)

    def time_one_token(self) -> None:
        """Time a pass over one token beside those of the rounds, where nothing else says what it takes."""
        prefix, ids = self.prefix, self.text.ids
        tell_it = self.generator.rests and self.device.type == "cpu"
        if not (prefix.is_captured or tell_it or prefix.text.pending or prefix.is_at_change(ids)):
            self.time_plain_pass(self.text, 1, lambda: prefix.chain_inputs(ids, []))

    def complete(self, texts: Sequence[Text]) -> None:  # noqa: ARG002
        with self.products:
            self.prefix.read_pending(self.text.ids)

    def roll_back(self) -> None:
        self.leave_rooms().roll_back()

    def end(self) -> None:
        self.leave_rooms().end()

    def output(self, texts: Sequence[Text]) -> Tensor | GenerateDecoderOnlyOutput:  # noqa: ARG002
        if not self.config.return_dict_in_generate:
            return self.text.ids
        return self.text.records.output(self.text.ids, self.prefix.cache)


_lock = Lock()
_users: list[bool] = []  # what the setting was when each thread came that is within


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Let PyTorch choose another kernel of attention than cuDNN's.

    cuDNN makes a plan for each number of cached tokens, which takes longer than a pass, and a text that grows has
    another number in each pass. The setting is the process's: it is put back when the last of several threads leaves.
    """
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
