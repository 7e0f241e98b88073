"""A text as its target has read it (`Prefix`), and the arguments of the target's next pass over candidates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationMixin

from hf_specdecpp.caches.states import stop_recording
from hf_specdecpp.caches.text import CachedText, GrowingText, PathRows
from hf_specdecpp.caches.trial import Held
from hf_specdecpp.generation.refusals import gives_positions
from hf_specdecpp.models.causal_lm import (
    CausalLM,
    cache_among,
    cache_argument,
    input_device,
    keeping_generators,
)
from hf_specdecpp.models.checks import frequency_changes
from hf_specdecpp.trees.attention import tree_mask
from hf_specdecpp.trees.tree import DraftTree, TreePass


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
        is_limited: whether a pass may have no room for some number of candidates.
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
        self._changes = frequency_changes(target.config.get_text_config(decoder=True))
        self._device = input_device(target)  # once: finding it takes as long as a small product
        self.is_limited = bool(self._changes)
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
        return self.is_limited and self.most_candidates(input_ids) == 0

    def most_candidates(self, input_ids: Tensor) -> int | None:
        """How many candidates the next pass, after a text `[1, length]`, has room for so that all of the pass has the
        same rotary frequencies; `None`: any number."""
        if not self._changes:
            return None
        length = input_ids.shape[1]
        if self._padding is None:
            positions = self.model_kwargs.get("position_ids")
            self._padding = 0 if positions is None else length - 1 - int(positions[..., -1].max())
        # transformers goes by positions, and Phi-3 by tokens, too.
        rooms = [change.room(each) for change in self._changes for each in (length, length - self._padding)]
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
        mask = tree_mask(self.target, self.text.cache, ancestors, depths, self.rows, shown)
        return inputs | {"attention_mask": mask, "position_ids": position[..., None] + depths}

    def settle(self, outputs: Any, kept: int, num_candidates: int, path: PathRows | None = None) -> None:
        """Keep of a pass over `num_candidates` the `kept` tokens that were emitted, where they were a tree those of a
        path. The last emitted token is not in the cache, as in plain generation."""
        if self._changes or self.text.cache is None:  # where a forward may go on with a cache of its own
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
        rows = (tree_pass := TreePass(tree)).rows_of(tree.nodes_to(node))
        inputs = copied.tree_inputs(text, tree_pass) if as_tree else copied.chain_inputs(text, tokens)
        with keeping_generators(device):
            logits = target(**inputs, return_dict=True).logits[0, -len(tree) - 1 :]
        copied.text.keep(count, len(tree) + 1, PathRows(rows, torch.tensor(rows, device=device)))
        return logits[rows], copied.cache

    return read


# Arguments of a forward that grow with the text.
GROWING = ("attention_mask", "position_ids", "token_type_ids", "mm_token_type_ids")
COLUMNS_AHEAD = 256
# A mask that transformers leaves alone. Of one with two dimensions it would make another, which reads the device.
NO_MASK = torch.zeros(1, 1, 1, 1, dtype=torch.bool)


def without_last(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` without the last `count` columns of what grows with the text: views, nothing is copied."""
    shorter = dict(model_kwargs)
    for name in GROWING:
        if (each := model_kwargs.get(name)) is not None:
            shorter[name] = each[..., : each.shape[-1] - count]
    return shorter


def extended(model_kwargs: dict[str, Any], count: int) -> dict[str, Any]:
    """`model_kwargs` for `count` more tokens: the mask, positions and token types that grow with the text."""
    if count == 0:
        return model_kwargs
    longer = dict(model_kwargs)
    if (mask := model_kwargs.get("attention_mask")) is not None:
        longer["attention_mask"] = torch.cat((mask, mask.new_ones((len(mask), count))), dim=-1)
    if (positions := model_kwargs.get("position_ids")) is not None:
        steps = torch.arange(1, count + 1, device=positions.device, dtype=positions.dtype)
        longer["position_ids"] = torch.cat((positions, positions[..., -1:] + steps), dim=-1)
    if (types := model_kwargs.get("token_type_ids")) is not None:
        longer["token_type_ids"] = torch.cat((types, types[:, -1:].expand(-1, count)), dim=-1)
    if (types := model_kwargs.get("mm_token_type_ids")) is not None:
        longer["mm_token_type_ids"] = torch.cat((types, types.new_zeros((len(types), count))), dim=-1)
    return longer
