"""The target's side of one text (`OneTarget`), and the text in its cache (`Prefix`): the arguments of a pass over
candidates, and what stays of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from hf_specdecpp.caches.masks import tree_mask
from hf_specdecpp.caches.states import stop_recording
from hf_specdecpp.caches.text import CachedText, GrowingText, PathRows, extended, without_last
from hf_specdecpp.caches.trial import Held, Trial
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.decoding import TargetSide
from hf_specdecpp.generation.refusals import check_numbers, check_prompt, gives_positions
from hf_specdecpp.generation.text import Round, Text
from hf_specdecpp.models.causal_lm import CausalLM, cache_among, cache_argument, input_device, keeping_generators
from hf_specdecpp.models.checks import frequency_changes
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.trees.tree import Chain, DraftTree, TreePass

logger: Any = logging.get_logger("hf_specdecpp")
MOST_PENDING = 16  # tokens that a target with recurrent layers reads again and again before a round settles them
COLUMNS_AHEAD = 256
# A mask that transformers leaves alone. Of one with two dimensions it would make another, which reads the device.
NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)


class Prefix:
    """The text in a target's cache, continued as its own `generate()` would continue it.

    The prompt may be padded, masked in its middle, given with position ids, end in a masked token, or lie partly in the
    cache of an earlier turn. So neither rows of the cache nor positions are counted anew: both are taken from what
    `generate()` prepared, by chains and by trees alike.

    A target with recurrent layers goes back to where it was before a pass of which a candidate was rejected, and reads
    the tokens that stand again with the next pass: they are `pending`.

    Example: the prompt `[pad, pad, 5, 6]` has the mask `[0, 0, 1, 1]` and the positions `[0, 0, 0, 1]`. Once it has
    been read and 7 has been emitted, the cache holds 4 rows, of which 2 are hidden, and 7 stands at position 2.

    Args:
        model_kwargs: arguments of its forward as `generate()` prepared them: the cache, and where the model takes them
            `attention_mask` `[1, length]` and `position_ids` `[..., length]`.

    Attributes:
        text: as it lies in the cache. Between rounds that is all but its last token.
        width: tokens that the last pass was prepared for.
        changes: of rotary frequencies, because of which a pass may have no room for some number of candidates.
    """

    width = 0

    def __init__(self, target: CausalLM, model_kwargs: dict[str, Any]) -> None:
        self.target, self.model_kwargs = target, model_kwargs
        self._longer, self._spare = model_kwargs, 0  # the same with so many columns for tokens to come
        mask = model_kwargs.get("attention_mask")
        self.is_masked = mask is not None and not bool(mask.all())
        self.text: CachedText = GrowingText(cache_among(model_kwargs))
        if self.text.held:  # a later turn
            self.text.begin()
        self.changes = frequency_changes(target.config.get_text_config(decoder=True))
        self._device = input_device(target)  # once: finding it takes as long as a small product
        # Of a mask with four dimensions others might ask more than whether it is there.
        self.makes_usual_inputs = has_usual_inputs(target)
        self._padding: int | None = None  # tokens of the text that take no position

    @property
    def cache(self) -> Any:
        """The target's own, which `generate()` was given or has made."""
        return self.text.cache

    @property
    def rows(self) -> int:
        """How many the target has read into the cache."""
        return int(self.text.cache.get_seq_length())

    @property
    def shown(self) -> Tensor | None:
        mask = self.model_kwargs.get("attention_mask")
        return mask[0, : self.rows].bool() if mask is not None and self.is_masked else None

    @property
    def position(self) -> Tensor:
        positions = self.model_kwargs.get("position_ids")
        return torch.tensor([[self.rows]]) if positions is None else positions[..., -1:]

    def is_at_change(self, input_ids: Tensor) -> bool:
        """Whether the next pass has no room for candidates because rotary frequencies change (`FrequencyChange`)."""
        return bool(self.changes) and self.most_candidates(input_ids) == 0

    def most_candidates(self, input_ids: Tensor) -> int | None:
        """How many candidates the next pass, after a text `[1, length]`, has room for so that all of the pass has the
        same rotary frequencies; `None`: any number."""
        length = input_ids.shape[1]
        if self._padding is None:
            positions = self.model_kwargs.get("position_ids")
            self._padding = 0 if positions is None else length - 1 - int(positions[..., -1].max())
        # transformers goes by positions, and Phi-3 by tokens, too.
        rooms = [change.room(each) for change in self.changes for each in (length, length - self._padding)]
        return min((room for room in rooms if room is not None), default=None)

    def why_no_tree(self, input_ids: Tensor, cache: Any, mask_length: int | None) -> str | None:
        """Why trees cannot be read: the target cannot be told where tokens stand, or the prompt `[1, length]` has put
        other rows than its tokens' into the cache."""
        if not gives_positions(self.target, input_ids, self.model_kwargs):
            return (
                f"{type(self.target).__name__} counts positions within its forward, so the places in a token tree "
                "cannot be given to it. Draft chains (tree=False)."
            )
        mask = self.model_kwargs.get("attention_mask")
        num_tokens = mask.shape[1] if mask is not None else mask_length or input_ids.shape[1]
        if (rows := cache.get_seq_length()) == num_tokens:
            return None
        if self.text.held >= num_tokens:
            return (
                f"The cache held {self.text.held} tokens already, and the prompt has {num_tokens}, so the prompt's "
                "last token has been read twice, and the places in a token tree are not known. Give a cache without "
                f"that token, cache.crop({num_tokens - 1 - self.text.held}), or draft chains (tree=False)."
            )
        return (
            f"After the prompt's {num_tokens} tokens {type(self.target).__name__} holds {rows} rows in its cache "
            "(an image's, perhaps), so the places in a token tree are not known. Draft chains (tree=False)."
        )

    def chain_inputs(self, input_ids: Tensor, candidates: Tensor | list[int], has_mask: bool = False) -> dict[str, Any]:
        """Forward arguments for the last token of `input_ids` `[1, length]` and the candidates after it, before them
        what is pending. With `has_mask` no mask is made."""
        self.text.begin()
        count = len(candidates)
        tokens = input_ids
        if count:
            tokens = torch.cat((input_ids, torch.as_tensor(candidates).to(input_ids)[None]), dim=1)
        self.width = self.text.pending + count + 1
        if self._spare <= count:  # the candidates may all stand, and a token after them
            # Columns are made for many rounds at once: each round only cuts its own out of them.
            self._spare = max(count + 1, COLUMNS_AHEAD)
            self._longer = extended(self.model_kwargs, self._spare)
        arguments = without_last(self._longer, self._spare - count) if count else self.model_kwargs
        if has_mask and self.makes_usual_inputs:
            arguments = arguments | {"attention_mask": NO_MASK}
        inputs = self.target.prepare_inputs_for_generation(
            tokens, next_sequence_length=self.width, is_first_iteration=False, **arguments
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = count + 1
        return inputs

    def tree_inputs(self, input_ids: Tensor, tree_pass: TreePass) -> dict[str, Any]:
        """The same for the rows of a pass over a tree, the root first, which is the last token of `input_ids`."""
        if not len(tree_pass.tree):
            return self.chain_inputs(input_ids, [])
        tokens, ancestors, depths = tree_pass.upload(input_ids.device)
        inputs = self.chain_inputs(input_ids, tokens, has_mask=True)
        position = inputs["position_ids"][..., 0]
        ancestors, depths = ancestors.to(self._device), depths.to(self._device)
        shown = self.shown if self.is_masked else None
        mask = tree_mask(self.target, self.text.cache, ancestors, depths, self.text.held, shown)
        return inputs | {"attention_mask": mask, "position_ids": position[..., None] + depths}

    def settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None = None) -> None:
        """Keep of a pass over `num_candidates` the `kept` tokens that were emitted, where they were a tree those of a
        path. The last emitted token is not in the cache, as in plain generation."""
        if self.changes or self.text.cache is None:  # where a forward may go on with a cache of its own
            self._adopt(cache_among(outputs))
        self.text.keep(kept, num_candidates + 1, path)
        if self._spare:
            self._spare -= kept
            self.model_kwargs = without_last(self._longer, self._spare)
        else:  # after the prompt, which may be of another kind than what is generated
            self.model_kwargs = self.target._update_model_kwargs_for_generation(
                outputs, self.model_kwargs, is_encoder_decoder=False, num_new_tokens=kept
            )

    def grow(self, count: int) -> None:
        """The cache holds so many tokens more, which captured passes have read."""
        self.text.held += count
        self.model_kwargs = self._longer = extended(self.model_kwargs, count)
        self._spare = 0

    def _adopt(self, cache: Any) -> None:
        """Go on with a forward's cache: Phi-3 reads the whole text anew where its rotary frequencies change."""
        if cache is self.text.cache:
            return
        cache.activate_past_recording()
        self.text = GrowingText(cache)
        own = {cache_argument(self.target): cache}
        self.model_kwargs, self._longer = self.model_kwargs | own, self._longer | own

    def read_pending(self, input_ids: Tensor) -> None:
        """At the end of a text `[1, length]`: read what is pending, so that the cache can be carried on."""
        if pending := self.text.pending:
            inputs = self.target.prepare_inputs_for_generation(
                input_ids[:, :-1],
                next_sequence_length=pending,
                is_first_iteration=False,
                **without_last(self.model_kwargs, 1),
            )
            self.target(**inputs, return_dict=True)
            self.text.keep(pending, of=pending)

    def roll_back(self) -> None:
        """After an exception: the cache, which may be the user's, goes back to the text that has been emitted."""
        self.text.back()

    def end(self) -> None:
        """Nothing is taken back any more, and the cache may be carried on by anyone."""
        if self.cache is not None:
            stop_recording(self.cache)


def has_usual_inputs(target: CausalLM) -> bool:
    """Whether transformers' own method prepares the inputs of its passes."""
    return type(target).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation


def reading_again(prefix: Prefix, text: Tensor, as_tree: bool) -> Callable[[Tensor, int], tuple[Tensor, Any]]:
    """A function that reads the last token of the `text` `[1, length]`, with which it goes on, and those after it in
    what the text has become: `count` tokens in one pass, in a copy of the cache as it is now. Returns logits `[count,
    vocab]` and the copy. With `as_tree` each of these tokens has a sibling."""
    target, model_kwargs, held = prefix.target, prefix.model_kwargs, Held(prefix.cache)
    device, last, length = input_device(target), int(text[0, -1]), text.shape[1]

    @torch.no_grad()
    def read(ids: Tensor, count: int) -> tuple[Tensor, Any]:
        copied = Prefix(target, model_kwargs | {cache_argument(target): held.copied()})
        tree, node, tokens = DraftTree(last), 0, ids[0, length : length + count - 1]
        for token in tokens.tolist():
            if as_tree:
                tree.add(node, last)
            node = tree.add(node, token)
        tree_pass = TreePass(tree)
        rows = [tree_pass.rows[each] for each in (0, *tree.nodes_to(node))]
        inputs = copied.tree_inputs(text, tree_pass) if as_tree else copied.chain_inputs(text, tokens)
        with keeping_generators(device):
            logits = target(**inputs, return_dict=True).logits[0, -len(tree) - 1 :]
        copied.text.keep(count, len(tree) + 1, PathRows(rows, torch.tensor(rows, device=device)))
        return logits[rows], copied.cache

    return read


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
        if reason and self.foreign is None:  # whose rows are compared
            self.generator.method.refuse(reason)
        # Not earlier: a sliding-window layer that records would keep the whole prompt.
        cache.activate_past_recording()
        rounds[0].outputs = outputs

    def begin(self, texts: Sequence[Text]) -> None:
        if texts and self.foreign is not None:
            again = reading_again(self.prefix, self.text.ids, self.generator.method.for_trees)
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
        room = self.prefix.most_candidates(text.ids) if self.prefix.changes else None
        tried = None if self.trial is None else self.trial.room
        return tried if room is None else room if tried is None else min(room, tried)

    def read(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        prefix, input_ids, tree = self.prefix, each.text.ids, each.tree
        held = None if self.trial is None else Held(prefix.cache)
        if isinstance(tree, Chain):
            inputs = prefix.chain_inputs(input_ids, tree.ids(input_ids.device) if len(tree) else [])
        else:
            inputs = prefix.tree_inputs(input_ids, each.rows)
        work, clock = self.work_clock(), time.perf_counter()
        if self.states.are_read:
            each.outputs = self.states.catch(self.model, **inputs, return_dict=True)
        else:
            each.outputs = self.model(**inputs, return_dict=True)
        each.width = prefix.width
        if self.device.type == "cpu":
            self.took = each.width, self.work_clock() - work, time.perf_counter() - clock
        if (mark := prefix.text.mark) is not None:
            self.stats.state_bytes = mark.num_bytes
        if held is not None and self.trial is not None and not held.grew_by(each.width):
            self.trial.refuse("the cache does not grow by the tokens of each pass")
            if len(tree):  # nothing of the pass was emitted yet
                held.back()
                each.tree, each.rows = (alone := Chain()), TreePass(alone)
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
