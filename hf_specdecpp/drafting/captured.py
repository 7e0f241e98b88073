"""Draft steps that a GPU runs as one launch each (`CapturedSteps`), and a text that is drafted for with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.caches.text import width_of
from hf_specdecpp.captured import graphs
from hf_specdecpp.captured.copies import for_capture, for_groups, identity
from hf_specdecpp.captured.rooms import RoomCache, RoomText, num_room_layers, room_for, why_not_in_place
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.drafting.session import ModelReading
from hf_specdecpp.models.causal_lm import inner_decoder, takes_positions, upload
from hf_specdecpp.trees.attention import inputs_in_place
from hf_specdecpp.trees.tree import DraftTree, Lineage

logger = logging.get_logger("hf_specdecpp")

SEVERAL = 8  # tokens of the wider of the two captured steps of a chain
LEAST_WIDTH, LEAST_NODES = 4, 64  # of passes over levels of a tree; that the masks of all of them have room for
Arguments = Sequence[Any]  # tensors, and `None` for those that a step does not take
Read = Callable[[DraftModel, RoomCache, Arguments, int], tuple[Tensor, Tensor]]
_choosing = Lock()


def read(drafter: DraftModel, cache: RoomCache, arguments: Arguments, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Read tokens `[texts, n]`, with the states `[texts, n, size]` before them for a draft that reads any. Those after
    number `last`, `[texts]`, are dummies that are not kept.

    Args:
        arguments: tokens, states and `last`.

    Returns:
        Logits `[texts, vocab_size]` and hidden states `[texts, hidden_size]` after token number `last`.
    """
    tokens, states, last = arguments
    hidden = at_last(read_chain(drafter, cache, tokens, states), last)
    cache.length.add_(last + 1)
    return drafter.logits(hidden, vocab_size), hidden


def at_last(hidden: Tensor, last: Tensor) -> Tensor:
    """`[texts, size]`, those of `hidden` `[texts, n, size]` at the places `last` `[texts]`."""
    return hidden.gather(1, last[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]


def read_chain(drafter: DraftModel, cache: RoomCache, tokens: Tensor, states: Tensor | None) -> Tensor:
    """Hidden states `[texts, n, hidden_size]` of a pass over tokens one after another, of which nothing is kept yet."""
    span = torch.arange(tokens.shape[1], device=tokens.device)
    seen = span <= span[:, None]
    if cache.prompt is not None:  # padding sees itself, and nobody else sees it
        own = cache.prompt.shown.gather(1, (cache.length[:, None] + span).clamp_max(cache.room - 1))
        seen = seen & (own[:, None] | (span == span[:, None]))
    inputs = inputs_in_place(drafter.model, cache.room, seen, span, span, cache.length, cache.prompt)
    return hidden_states(drafter, cache, tokens, states, inputs)


def read_level(drafter: DraftModel, cache: RoomCache, arguments: Arguments, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Read nodes of a tree after those that were read before; dummies after them are not kept.

    Args:
        arguments: tokens `[1, w]`; states `[1, w, size]` before them, for a draft that reads any; ancestors, bool
            `[w, n]`: which of up to n nodes each sees; depths `[n + w]` of all nodes, then of these; counts `[2]`: how
            many nodes were read before, and how many of the tokens are nodes.

    Returns:
        Logits `[w, vocab_size]` and hidden states `[w, hidden_size]`.
    """
    tokens, states, ancestors, depths, counts = arguments
    room = ancestors.shape[1]
    num_prefix = cache.length - counts[0]
    inputs = inputs_in_place(drafter.model, cache.room, ancestors, depths[:room], depths[room:], num_prefix)
    hidden = hidden_states(drafter, cache, tokens, states, inputs)[0]
    cache.length.add_(counts[1])
    return drafter.logits(hidden, vocab_size), hidden


def hidden_states(
    drafter: DraftModel, cache: RoomCache, tokens: Tensor, states: Tensor | None, inputs: dict[str, Any]
) -> Tensor:
    """`[texts, n, hidden_size]` of a captured pass over `tokens` `[texts, n]` with these masks and positions."""
    cache.begin_pass(tokens.shape[1])
    inputs["attention_mask"] = for_groups(inputs["attention_mask"], drafter.model)
    if drafter.max_length < float("inf"):  # of dummies, which may stand behind the last position that there is
        inputs["position_ids"] = inputs["position_ids"].clamp_max(int(drafter.max_length) - 1)
    return drafter.hidden_states(tokens, cache, states, are_known=True, **inputs)


@dataclass
class Slot:
    """What a step reads and returns, where it stays: tensors, and `None` for those that it does not take."""

    arguments: list[Tensor | None]
    outputs: list[Tensor]


class CapturedSteps:
    """A draft whose steps are captured when they are first taken: one over a token, one over up to `SEVERAL`, and of
    trees one over a level.

    A round begins with the tokens that the last one emitted, filled up with dummies to `SEVERAL`, and goes on token by
    token. Longer pieces, such as the prompt, are read as ever. The caches are kept for later texts: each has room for a
    power of two of tokens, and each is captured for by itself.

    Example: 100 tokens of prompt are read uncaptured into a cache with room for 256. A round emits 3 tokens, which are
    read together with 5 dummies; each candidate is a step of one token. A text that grows past 256 tokens goes on in a
    cache of 512.

    Args:
        drafter: whose steps. A copy of its modules makes them, which shares its tensors.
        fuse: compile small pieces, as `for_capture`.
    """

    def __init__(self, drafter: DraftModel, fuse: bool = False) -> None:
        self.num_layers = num_room_layers(drafter.text_config)
        self._captured_for = [fuse, *identity(drafter.model)]
        self.works = True  # whether nothing has spoken against capturing this draft so far
        self.device = drafter.device
        self._graphs = graphs.Graphs(self.device)
        self._free: list[RoomCache] = []
        self._slots: dict[Any, Slot] = {}
        self._last = torch.arange(SEVERAL, device=self.device)
        if (reason := _why_not(drafter)) is not None:
            self._give_up(drafter, reason)
        self.drafter: Any = for_capture(drafter, drafter.model, fuse=fuse) if self.works else drafter

    def fits(self, drafter: DraftModel, fuse: bool) -> bool:
        """Whether the draft is what the steps are captured of."""
        return self._captured_for == [fuse, *identity(drafter.model)]

    def lease(self, num_tokens: int, user: object) -> RoomCache:
        """An empty cache with room for so many tokens, until `user` is no more."""
        with _choosing:
            fitting = [cache for cache in self._free if cache.room >= num_tokens]
            if fitting:
                # Of those of one size the latest that was given back: most has been captured for it.
                cache = min(reversed(fitting), key=lambda cache: cache.room)
                self._free.remove(cache)
        if fitting:
            cache.clear()
        else:
            cache = RoomCache(self.num_layers or 0, room_for(num_tokens), self.device)
        weakref.finalize(user, self._free.append, cache)
        return cache

    def read(self, cache: RoomCache, tokens: Tensor, states: Tensor | None, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Logits `[1, vocab_size]` and hidden state `[1, hidden_size]` after `tokens` `[1, n]`.

        Args:
            cache: with room for them, and for `SEVERAL`.
            states: of the target, before each token, for a draft that reads them.
        """
        count = tokens.shape[1]
        is_own = states is None or states.shape[-1] == self.drafter.hidden_size
        width = 1 if count == 1 and is_own else SEVERAL
        last = self._last[count - 1 : count] if count <= SEVERAL else self._last.new_full((1,), count - 1)
        if not cache.is_initialized or count > width:
            return read(self.drafter, cache, [tokens, states, last], vocab_size)
        return self.call(read, width, cache, [tokens, states, last], vocab_size)

    def call(
        self, function: Read, width: int, cache: RoomCache, arguments: Arguments, vocab_size: int
    ) -> tuple[Tensor, Tensor]:
        """What a function of a draft returns, by a graph for tokens of this width.

        Args:
            arguments: tokens `[1, n]` and states `[1, n, size]` or `None`, which are filled up with dummies to the
                width, and others, which stay as they are.
        """
        if not self.works:
            return function(self.drafter, cache, _padded(arguments, width), vocab_size)
        states = arguments[1]
        size = 0 if states is None else states.shape[-1]
        shapes = tuple(each.shape for each in arguments[2:] if each is not None)
        key = function.__name__, width, size, shapes, vocab_size, id(cache)  # another thread's text has another cache
        slot = self._slots.get(key)
        if slot is None:
            with graphs.lasting():
                made = [None if each is None else each.clone() for each in _padded(arguments, width)]
            slot = self._slots[key] = Slot(made, [])
        for own, each in zip(slot.arguments, arguments, strict=True):
            if own is not None and each is not None:
                own[tuple(slice(0, length) for length in each.shape)] = each

        def run() -> None:
            graphs.write_lasting(slot.outputs, function(self.drafter, cache, slot.arguments, vocab_size))

        try:
            self._graphs.run(key, run, [cache.length])
        except graphs.CannotCaptureError as error:
            self._give_up(self.drafter, str(error))
            return function(self.drafter, cache, slot.arguments, vocab_size)
        logits, hidden = slot.outputs
        return logits.clone(), hidden.clone()  # the next step writes to the same place

    def _give_up(self, drafter: DraftModel, reason: str) -> None:
        self.works = False
        logger.warning(
            f"Steps of {type(drafter.model).__name__} cannot be captured as CUDA graphs here ({reason}), so they run "
            'one kernel after another: the same texts, more slowly. Set graphs="off", and nothing is tried.'
        )


def _padded(arguments: Arguments, width: int) -> list[Any]:
    """Tokens and states filled up with zeros to the width; the others as they are."""
    tokens, states, *rest = arguments
    if states is not None:
        states = F.pad(states, (0, 0, 0, width - states.shape[1]))
    return [F.pad(tokens, (0, width - tokens.shape[1])), states, *rest]


def _why_not(drafter: DraftModel) -> str | None:
    """What is known of a draft that rules out captured steps."""
    model, config = drafter.model, drafter.text_config
    if num_room_layers(config) is None:
        return "not all of its layers are attention"
    if getattr(model, "is_quantized", False):
        return "it is quantised"
    if not takes_positions(inner_decoder(model)):
        return "it takes no position_ids"
    return why_not_in_place(model)


class CapturedSession(ModelReading):
    """The draft's side of one generation, with captured steps.

    Of a tree the root is read with all that is pending, as in chains, and each level in a pass of its own, filled up
    with dummies to 4, 8, 16 or another power of two of nodes. After the round all nodes but the root are forgotten:
    those that were accepted are read again with the next root, in a pass that is made anyway.
    """

    moves_rows = False

    def __init__(self, drafter: DraftModel, vocab_size: int, steps: CapturedSteps) -> None:
        super().__init__(drafter, vocab_size)
        self.steps = steps
        self.text = RoomText(steps.lease, counts=True)

    @property
    def length(self) -> int:
        return self.text.held + self.unread

    def _keep(self, count: int, of: int, rows: Sequence[int] | None = None) -> None:  # noqa: ARG002 - the first ones
        self.text.keep(count, of)

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, states = self._take(candidates)
        held = self.text.held
        cache = self.text.with_room(held + max(tokens.shape[1], SEVERAL))
        logits, hidden = self.steps.read(cache, tokens, states, self.vocab_size)
        self.text.held += tokens.shape[1]
        self._own_states = {0: hidden[0]}
        return logits[0], hidden[0]

    def _expand(
        self, lineage: Lineage, tree: DraftTree, nodes: list[int], states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        count = len(nodes)
        width = max(width_of(count), LEAST_WIDTH)
        tokens, ancestors, depths, counts = self._level(lineage, tree, nodes, width)
        cache = self.text.with_room(self.text.held + width)
        arguments = [tokens, states, ancestors, depths, counts]
        logits, hidden = self.steps.call(read_level, width, cache, arguments, self.vocab_size)
        self.text.held += count
        return logits[:count], hidden[:count]

    def _level(self, lineage: Lineage, tree: DraftTree, nodes: list[int], width: int) -> list[Tensor]:
        """What a pass over nodes is told beside the draft's states (`read_level`), with one upload."""
        before, count = len(lineage.nodes), len(nodes)
        ancestors, depths = lineage.feed(tree, nodes)
        room = max(width_of(len(depths)), LEAST_NODES)
        tokens = torch.tensor([[tree.tokens[node] for node in nodes] + [0] * (width - count)])
        seen = F.pad(ancestors, (0, room - len(depths), 0, width - count))
        seen[count:, 0] = True  # dummies see the root, so that none of them sees nothing
        places = F.pad(depths, (0, room - len(depths))), F.pad(depths[before:], (0, width - count))
        parts = upload([tokens, seen, torch.cat(places), torch.tensor([before, count])], self.device)
        return [parts[0] if self.knows_all else self.drafter.known(parts[0]), *parts[1:]]
