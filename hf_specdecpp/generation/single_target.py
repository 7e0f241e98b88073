"""The target of a call with a single sequence (`SingleTarget`), and the sequence in the target's cache
(`TargetContext`), which makes the arguments of forward passes over candidates and commits accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.utils import logging

from hf_specdecpp.caches.cached_context import GrowingContext, PathRows, extended, without_last
from hf_specdecpp.caches.masks import tree_mask
from hf_specdecpp.caches.states import stop_recording
from hf_specdecpp.caches.trial import ReadAgain, Trial, copy_of, have_grown
from hf_specdecpp.cuda_graphs.captured_target import CapturedTarget
from hf_specdecpp.generation.decoding import TargetSide
from hf_specdecpp.generation.output_text import OutputText, Round
from hf_specdecpp.generation.refusals import Call, check_prompt, gives_positions
from hf_specdecpp.models import causal_lm
from hf_specdecpp.models.causal_lm import CACHE, CausalLM, cache_among, cache_argument
from hf_specdecpp.models.checks import frequency_changes
from hf_specdecpp.models.cpu.grouped_attention import computes_in_half, separate_queries
from hf_specdecpp.models.foreign import ForeignPasses
from hf_specdecpp.trees.tree import Chain, DraftTree, TreePass

logger: Any = logging.get_logger("hf_specdecpp")
MOST_PENDING = 16  # pending tokens after which a round has no candidates, for targets with recurrent layers
COLUMNS_AHEAD = 256
# Transformers uses 4-D masks unchanged. From a 2-D mask it makes another one, which waits for the device.
NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)


class TargetContext:
    """A sequence in the target's cache, with the masks and positions of plain `generate()`.

    The prompt may be padded, have masked tokens inside or at its end, come with position ids, or be partly cached from
    an earlier turn. So cache rows and positions are never counted here: both come from the arguments that `generate()`
    prepared, `model_kwargs` with the cache, `attention_mask` `[1, length]` and `position_ids` `[..., length]`.

    If a candidate is rejected, recurrent layers are reset to their state before the pass, and the next pass reads the
    accepted tokens again: these tokens are `pending`.

    Example: the prompt `[pad, pad, 5, 6]` has the mask `[0, 0, 1, 1]` and the positions `[0, 0, 0, 1]`. After the
    prompt's pass, which emits 7, the cache has 4 rows, of which 2 are masked, and 7 has position 2.

    Attributes:
        cached: the cached tokens; between rounds all of the sequence except the last token and pending ones.
        width: number of tokens of the latest prepared pass.
        changes: lengths at which rotary frequencies change; no pass may cross one.
    """

    width, _read = 0, torch.empty(1, 0)

    def __init__(self, target: CausalLM, model_kwargs: dict[str, Any]) -> None:
        self.target, self.model_kwargs = target, model_kwargs
        self._longer, self._spare = model_kwargs, 0  # `_longer`: `model_kwargs` with `_spare` more columns
        mask = model_kwargs.get("attention_mask")
        self.is_masked = mask is not None and not bool(mask.all())
        self.cached = GrowingContext(cache_among(model_kwargs))
        if self.cached.num_tokens:  # a later turn
            self.cached.begin_round()
        self.changes = frequency_changes(target.config.get_text_config(decoder=True))
        self._device = causal_lm.input_device(target)  # stored, because finding the device is slow
        # Models with their own method may read values of a 4-D mask, so `NO_MASK` is not for them.
        self.makes_usual_inputs = causal_lm.has_usual_inputs(target)
        self._padding: int | None = None  # tokens without a position

    @property
    def cache(self) -> Any:
        """The target's cache, given by the user or made by `generate()`."""
        return self.cached.cache

    @property
    def rows(self) -> int:
        """Number of rows of keys and values in the cache, including masked ones."""
        return int(self.cached.cache.get_seq_length())

    @property
    def shown(self) -> Tensor | None:
        mask = self.model_kwargs.get("attention_mask")
        return mask[0, : self.rows].bool() if mask is not None and self.is_masked else None

    @property
    def position(self) -> Tensor:
        positions = self.model_kwargs.get("position_ids")
        return torch.tensor([[self.rows]]) if positions is None else positions[..., -1:]

    def most_candidates(self, input_ids: Tensor) -> int | None:
        """The largest number of candidates after `input_ids` `[1, length]` with which the next pass has the rotary
        frequencies of plain `generate()` (`FrequencyChange`); `None`: no limit."""
        if not self.changes:
            return None
        length = input_ids.shape[1]
        if self._padding is None:
            positions = self.model_kwargs.get("position_ids")
            self._padding = 0 if positions is None else length - 1 - int(positions[..., -1].max())
        # Transformers changes frequencies by position, Phi-3 also by number of tokens.
        rooms = [change.max_candidates(each) for change in self.changes for each in (length, length - self._padding)]
        return min((room for room in rooms if room is not None), default=None)

    def why_no_tree(self, input_ids: Tensor, cache: Any, mask_length: int | None) -> str | None:
        """The reason why the target cannot read trees, or `None`: its forward takes no positions, or after the prompt
        `input_ids` `[1, length]` `cache` does not have one row per token (`mask_length` tokens, without a mask)."""
        if not gives_positions(self.target, input_ids, self.model_kwargs):
            return (
                f"{type(self.target).__name__} counts positions within its forward, so the places in a token tree "
                "cannot be given to it. Draft chains (tree=False)."
            )
        mask = self.model_kwargs.get("attention_mask")
        num_tokens = mask.shape[1] if mask is not None else mask_length or input_ids.shape[1]
        if (rows := cache.get_seq_length()) == num_tokens:
            return None
        if (before := self.cached.num_tokens) >= num_tokens:
            return (
                f"The cache held {before} tokens already, and the prompt has {num_tokens}, so the prompt's "
                "last token has been read twice, and the places in a token tree are not known. Give a cache without "
                f"that token, cache.crop({num_tokens - 1 - before}), or draft chains (tree=False)."
            )
        return (
            f"After the prompt's {num_tokens} tokens {type(self.target).__name__} holds {rows} rows in its cache "
            "(an image's, perhaps), so the places in a token tree are not known. Draft chains (tree=False)."
        )

    def chain_inputs(self, input_ids: Tensor, candidates: Tensor | list[int], has_mask: bool = False) -> dict[str, Any]:
        """Begin a round of the cache, and return the arguments of its forward pass, over the pending tokens, the last
        token of `input_ids` `[1, length]` and `candidates`. `has_mask`: the caller replaces the attention mask."""
        self.cached.begin_round()
        count = len(candidates)
        tokens = torch.cat((input_ids, torch.as_tensor(candidates).to(input_ids)[None]), dim=1) if count else input_ids
        tokens = self._as_read(tokens, count + 1) if self.cached.pending else tokens
        self.width = self.cached.pending + count + 1
        self._read = tokens[:, -self.width :]
        if self._spare <= count:  # all candidates may be accepted, and a token follows
            # Columns are made for many rounds at once, and each round takes a slice.
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
        """Like `chain_inputs`, for a pass over a tree, whose root is the last token of `input_ids` `[1, length]`."""
        if not len(tree_pass.tree):
            return self.chain_inputs(input_ids, [])
        tokens, ancestors, depths = tree_pass.upload(input_ids.device)
        inputs = self.chain_inputs(input_ids, tokens, has_mask=True)
        position = inputs["position_ids"][..., 0]
        ancestors, depths = ancestors.to(self._device), depths.to(self._device)
        mask = tree_mask(self.target, self.cached.cache, ancestors, depths, self.cached.num_tokens, self.shown)
        return inputs | {"attention_mask": mask, "position_ids": position[..., None] + depths}

    def settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None = None) -> None:
        """Commit a pass over the last token and `num_candidates` candidates, which returned `outputs`. Of its cache
        rows the first `kept` stay, in a tree those of `path`. The next pass reads the last emitted token."""
        if getattr(outputs, CACHE, None) is not self.cached.cache:
            self._adopt(cache_among(outputs))
        self.cached.commit(kept, num_candidates + 1, path)
        if self._spare:
            self._spare -= kept
            self.model_kwargs = without_last(self._longer, self._spare)
        else:  # after the prompt, whose arguments may differ from those of later passes
            self.model_kwargs = self.target._update_model_kwargs_for_generation(
                outputs, self.model_kwargs, is_encoder_decoder=False, num_new_tokens=kept
            )

    def grow(self, count: int) -> None:
        """Called after captured passes: counts the `count` tokens that were copied from them to the cache."""
        self.cached.num_tokens += count
        self.model_kwargs = self._longer = extended(self.model_kwargs, count)
        self._spare = 0

    def _adopt(self, cache: Any) -> None:
        """Use the cache that a pass returned: Phi-3 makes a new one if frequencies change, some models in each pass."""
        if cache is None or cache is self.cached.cache:
            return
        cache.activate_past_recording()
        self.cached = GrowingContext(cache)
        own = {cache_argument(self.target): cache}
        self.model_kwargs, self._longer = self.model_kwargs | own, self._longer | own

    def _as_read(self, tokens: Tensor, after: int) -> Tensor:
        """`tokens` `[1, length]`, with the pending ones as the latest pass read them: processors may have changed them
        in the sequence. `after`: number of tokens that follow the pending ones."""
        begin = tokens.shape[1] - after - (pending := self.cached.pending)
        parts = tokens[:, :begin], self._read[:, :pending], tokens[:, begin + pending :]
        return torch.cat(parts, dim=1)

    def read_pending(self, input_ids: Tensor) -> None:
        """Run a pass over pending tokens of the finished sequence `input_ids` `[1, length]`, to complete the cache."""
        if pending := self.cached.pending:
            kwargs = without_last(self.model_kwargs, 1)
            inputs = self.target.prepare_inputs_for_generation(
                self._as_read(input_ids[:, :-1], 0), next_sequence_length=pending, is_first_iteration=False, **kwargs
            )
            self.target(**inputs, return_dict=True)
            self.cached.commit(pending, of=pending)


def reader_again(context: TargetContext, text: Tensor, as_tree: bool) -> ReadAgain:
    """Save the cache of the sequence `text` `[1, length]`, and return a function `read(ids, count)` for `Trial`. `read`
    runs one pass in a copy of that cache, over `count` tokens of the longer sequence `ids` from the last token of
    `text` on. It returns logits `[count, vocab]` and the copy. With `as_tree` later tokens have siblings."""
    target, model_kwargs, saved = context.target, context.model_kwargs, copy_of(context.cache)
    device, last, length = causal_lm.input_device(target), int(text[0, -1]), text.shape[1]

    @torch.no_grad()
    def read(ids: Tensor, count: int) -> tuple[Tensor, Any]:
        copied = TargetContext(target, model_kwargs | {cache_argument(target): copy_of(saved)})
        tree, node, tokens = DraftTree(last), 0, ids[0, length : length + count - 1]
        for token in tokens.tolist():
            if as_tree:
                tree.add(node, last)
            node = tree.add(node, token)
        tree_pass = TreePass(tree)
        rows = [tree_pass.rows[each] for each in (0, *tree.nodes_to(node))]
        inputs = copied.tree_inputs(text, tree_pass) if as_tree else copied.chain_inputs(text, tokens)
        with causal_lm.keeping_generators(device):
            logits = target(**inputs, return_dict=True).logits[0, -len(tree) - 1 :]
        copied.cached.commit(count, len(tree) + 1, PathRows(rows, torch.tensor(rows, device=device)))
        return logits[rows], copied.cache

    return read


class SingleTarget(TargetSide):
    """The target of a call with a single sequence. Must not be part of a reference cycle, or its cache is freed only by
    the garbage collector."""

    def __init__(self, call: Call, text: OutputText, foreign: ForeignPasses | None = None) -> None:
        super().__init__(call, [text])
        self.text, self.stats, self.foreign, self.in_half = text, text.stats, foreign, computes_in_half(call.target)
        self.context = TargetContext(call.target, self.states.requesting(call.model_kwargs))
        self.generator.session.bind_cache(self.context)
        self.trial: Trial | None = None

    def read_prompt(self, rounds: Sequence[Round]) -> None:
        context, input_ids = self.context, self.text.ids
        outputs = self.states.catch(self.model._prefill, input_ids, self.config, context.model_kwargs)
        cache = cache_among(outputs)
        check_prompt(self.model, outputs, context.model_kwargs.get("attention_mask"))
        if self.generator.method.for_trees and self.foreign is None:  # foreign passes are checked by the trial
            reason = context.why_no_tree(input_ids, cache, getattr(self.config, "_mask_length", None))
            if reason is not None:
                self.generator.method.refuse(reason)
        # After the prompt, because a recording sliding-window layer would keep all of its tokens.
        cache.activate_past_recording()
        rounds[0].outputs = outputs

    def prepare(self, texts: Sequence[OutputText]) -> None:
        if self.foreign is not None and self.trial is None:
            again = reader_again(self.context, self.text.ids, self.generator.method.for_trees)
            self.trial = Trial(self.model, self.foreign, self.generator.setup.most_tokens, again)
        self.stats.rounds_at_change += self.context.most_candidates(self.text.ids) == 0
        if self.trial is None:  # no additional passes while hooks or patches are on trial
            self.time_one_token()

    @property
    def forward_arguments(self) -> dict[str, Any]:
        return self.context.model_kwargs

    def copy_prompts(self, passes: CapturedTarget) -> None:
        context = self.context
        self.time_one_token()  # a pass without graphs, to compare speeds with
        shown = None if context.shown is None else context.shown[None]
        passes.begin_texts(context.cache, context.rows, shown, context.position)

    def own_logits(self, texts: Sequence[OutputText], tokens: Tensor) -> Tensor:
        inputs = self.context.chain_inputs(self.text.ids, tokens[0, 1:])
        logits: Tensor = self.model(**inputs, return_dict=True).logits
        self.context.cached.roll_back()
        return logits

    def copy_back(self, passes: CapturedTarget, texts: Sequence[OutputText], rows: Sequence[int]) -> None:
        passes.context.cache.write(self.context.cache, passes.context.num_tokens)
        self.context.grow(passes.context.num_tokens - self.context.cached.num_tokens)

    def max_candidates(self, text: OutputText) -> int | None:
        # Reading many pending tokens in every round is slower than one round without candidates, which commits them.
        if self.context.cached.pending >= MOST_PENDING or self.stats.refusal is not None:
            return 0
        room = self.context.most_candidates(text.ids) if self.context.changes else None
        tried = None if self.trial is None else self.trial.max_candidates
        return tried if room is None else room if tried is None else min(room, tried)

    def read(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        context, input_ids, tree = self.context, each.text.ids, each.tree
        before = None if self.trial is None else copy_of(context.cache)
        if isinstance(tree, Chain):
            inputs = context.chain_inputs(input_ids, tree.candidates)
        else:
            inputs = context.tree_inputs(input_ids, each.rows)
        each.width = context.width
        with separate_queries() if self.in_half and not context.is_masked else nullcontext():
            each.outputs = self.run(inputs, each.width)
        if (point := context.cached.rollback_point) is not None:
            self.stats.state_bytes = point.num_bytes
        if self.trial is not None and not have_grown(before, context.cache, each.width):
            self.trial.refuse("the cache does not grow by the tokens of each pass")
        elif (known := each.outputs.logits.shape[1]) <= len(tree):
            self._refuse(f"{type(self.model).__name__} returns logits after {known} of {len(tree) + 1} tokens")
        else:
            return
        if len(tree):  # no token of the pass was emitted yet
            if before is None:
                context.cached.roll_back()
            else:
                context.cache.layers = before.layers
            each.tree, each.rows = (alone := Chain()), TreePass(alone)
            self.read(rounds)

    def commit(self, rounds: Sequence[Round]) -> None:
        (each,) = rounds
        kept, path = each.emitted
        self.take_states(each, self.context.cached.pending)
        self.context.settle(each.outputs, kept, len(each.tree), path)
        if self.trial is not None and not each.is_prompt:
            self._compare(self.trial, each)

    def take_states(self, each: Round, again: int = 0) -> None:
        """Store the hidden states at the tokens committed by a round, whose pass began with `again` pending tokens."""
        count, (kept, path) = len(each.tree), each.emitted
        if self.text.records.kept:
            self.text.records.add_states(each.outputs, kept, count, None if path is None else path.rows, again)
        if self.states.are_read:
            # All tokens of the prompt; later the last token before the round and the accepted candidates.
            if each.is_prompt:
                rows: Tensor | slice = slice(None)
            elif not count and not again:
                rows = slice(-1, None)  # the forward may have read the whole sequence again
            elif path is None:
                rows = slice(again, again + kept)
            else:
                rows = path.on_device[:kept]
            self.text.states = self.states.states_of(rows)

    def _compare(self, trial: Trial, each: Round) -> None:
        """Add a round's logits to the `trial` of hooks and patches. If it fails, end drafting with a warning."""
        logits, (kept, path) = each.outputs.logits[0, -len(each.tree) - 1 :], each.emitted
        if not self.text.finished:
            rows = slice(kept) if path is None else path.rows[:kept]
            trial.record_pass(logits[rows], self.text.ids, self.context.cache)
        if trial.passes.reason is not None and self.stats.refusal is None:
            self._refuse(trial.passes.reason)

    def _refuse(self, reason: str) -> None:  # nothing more is drafted for this sequence
        self.stats.refusal = reason
        logger.warning_once(f"Nothing more is drafted for {type(self.model).__name__}: {reason}.")

    def time_one_token(self) -> None:
        """Time an additional pass over the last token if its time cannot be derived from the rounds."""
        context, ids = self.context, self.text.ids
        is_derived = self.generator.is_paused and self.device.type == "cpu"  # rounds are plain passes
        if not (is_derived or context.cached.pending or context.most_candidates(ids) == 0):
            self.time_plain_pass(1, lambda: context.chain_inputs(ids, []))

    def complete(self) -> None:
        with self.generator.products:
            self.context.read_pending(self.text.ids)

    def roll_back(self) -> None:
        self.context.cached.roll_back()

    def end(self) -> None:
        if self.context.cache is not None:
            stop_recording(self.context.cache)  # the cache can be reused

    def output(self) -> Tensor | GenerateDecoderOnlyOutput:
        ids, asked = self.text.ids, self.config.return_dict_in_generate
        return self.text.records.output(ids, self.context.cache) if asked else ids
