"""Draft steps compiled with `torch.compile` (`CompiledSteps`), and a chain that is drafted with them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils import logging

from hf_specdecpp.caches.compiled_passes import own_copy
from hf_specdecpp.caches.fixed import FixedCache, num_fixed_layers, room_for
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.drafting.session import ModelReading

logger = logging.get_logger("hf_specdecpp")

SEVERAL = 8  # tokens of the wider of the two compiled steps
Read = Callable[..., tuple[Tensor, Tensor]]


def read(
    drafter: DraftModel, cache: FixedCache, tokens: Tensor, states: Tensor | None, last: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Read `tokens` `[1, n]`, of which those after number `last` are dummies that are not kept.

    Returns:
        Logits `[vocab_size]` and hidden state `[hidden_size]` after token number `last`, which is `[1]`.
    """
    hidden = drafter.hidden_states(tokens, cache, states, are_known=True)[0].index_select(0, last)[0]
    cache.length.add_(last[0] + 1)
    return drafter.logits(hidden, vocab_size), hidden


class CompiledSteps:
    """A draft whose steps are compiled when they are first taken: one over a token, and one over up to `SEVERAL`. Trees
    add their levels (`drafting.compiled_trees`).

    A round begins with the tokens that the last one emitted, filled up with dummies to `SEVERAL`, and goes on token by
    token. Longer pieces, such as the prompt, are read as ever. The caches are kept for later texts: each has room for a
    power of two of tokens, and each such size is compiled for once.

    Example: 100 tokens of prompt are read uncompiled into a cache with room for 256. A round emits 3 tokens, which are
    read together with 5 dummies; each candidate is a step of one token. A text that grows past 256 tokens goes on in a
    cache of 512.

    torch.compile would look through all of the draft before each step, to see whether it is still the same; on a small
    draft that takes longer than the step. So it is looked at once a generation (`fits`).

    Args:
        drafter: whose steps. It is not kept alive by this.
    """

    def __init__(self, drafter: DraftModel) -> None:
        self.num_layers, self._compiled_for = num_fixed_layers(drafter.text_config), _identity(drafter)
        self._free: list[FixedCache] = []
        self._last = torch.arange(SEVERAL, device=drafter.device)
        self.works = True  # whether nothing has spoken against compiling this draft so far
        self._compiled: dict[tuple[Read, int], Read] = {}  # by the function and the number of tokens
        if self.num_layers is None:
            self._give_up(drafter, "not all of its layers are attention")

    @property
    def device(self) -> torch.device:
        return self._last.device

    def fits(self, drafter: DraftModel) -> bool:
        """Whether the draft is what the steps are compiled for."""
        return self._compiled_for == _identity(drafter)

    def lease(self, num_tokens: int, user: object) -> FixedCache:
        """An empty cache with room for so many tokens, until `user` is no more."""
        fitting = [cache for cache in self._free if cache.room >= num_tokens]
        if fitting:
            cache = min(fitting, key=lambda cache: cache.room)
            self._free.remove(cache)
            cache.clear()
        else:
            cache = FixedCache(self.num_layers or 0, room_for(num_tokens), self.device)
        weakref.finalize(user, self._free.append, cache)
        return cache

    def read(
        self,
        drafter: DraftModel,
        cache: FixedCache,
        tokens: Tensor,
        states: Tensor | None,
        vocab_size: int,
        may_pad: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Logits `[vocab_size]` and hidden state `[hidden_size]` after `tokens` `[1, n]`.

        Args:
            cache: with room for them, and for `SEVERAL`.
            states: of the target, before each token, for a draft that reads them.
            may_pad: whether the draft has positions for `SEVERAL` further tokens.
        """
        count = tokens.shape[1]
        is_own = states is None or states.shape[-1] == drafter.hidden_size
        width = 1 if count == 1 and is_own else SEVERAL
        if not (self.works and cache.is_initialized) or count > width or (width > count and not may_pad):
            last = torch.full((1,), count - 1, device=tokens.device)
            return read(drafter, cache, tokens, states, last, vocab_size)
        # Also by nothing: a copy is a tensor of inference mode, for no others are steps compiled again.
        if width > 1:
            tokens = F.pad(tokens, (0, width - count))
        if states is not None and not (width == 1 and states.is_inference()):
            states = F.pad(states, (0, 0, 0, width - count))
        return self.call(read, width, drafter, cache, tokens, states, self._last[count - 1 : count], vocab_size)

    def call(self, function: Read, width: int, drafter: DraftModel, *arguments: Any) -> tuple[Tensor, Tensor]:
        """What a function of a draft returns, compiled for tokens of this width."""
        if not self.works:
            return function(drafter, *arguments)
        compiled = self._compiled.get((function, width))
        if compiled is None:
            compiled = self._compiled[function, width] = _compile(function, self.device)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.compiler.cudagraph_mark_step_begin()
        try:
            logits, hidden = compiled(drafter, *arguments)
        except torch._dynamo.exc.TorchDynamoException as error:  # it has not run yet
            self._give_up(drafter, f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
            return function(drafter, *arguments)
        # The next step of a CUDA graph writes its outputs to the same place.
        return (logits.clone(), hidden.clone()) if on_gpu else (logits, hidden)

    def _give_up(self, drafter: DraftModel, reason: str) -> None:
        self.works = False
        logger.warning(
            f"compile=True: steps of {type(drafter.model).__name__} cannot be compiled here ({reason}), so they run "
            "uncompiled: the same texts, more slowly on a GPU. Set compile=False, and nothing is tried."
        )


def _compile(function: Any, device: torch.device) -> Read:
    """It, compiled as a function of its own."""
    # What calls the kernels of a CPU is then C++, too: in Python it takes as long as the kernels of a small draft.
    options: dict[str, Any] = {"triton.cudagraphs": device.type == "cuda", "cpp_wrapper": device.type == "cpu"}
    if hasattr(torch.compiler, "keep_tensor_guards_unsafe"):  # older versions of torch make all checks
        options["guard_filter_fn"] = _of_arguments
    compiled: Read = torch.compile(own_copy(function), fullgraph=True, options=options)
    return compiled


def _of_arguments(checks: Sequence[Any]) -> list[bool]:
    """Which checks torch.compile makes before each step: those of tensors and numbers that the step is given. It looks
    through neither the draft, nor the cache, nor modules of Python (`G[`)."""
    return [
        not any(part in check.name for part in ("drafter", "G["))
        and (check.guard_type == "TENSOR_MATCH" or "cache" not in check.name)
        for check in checks
    ]


def _identity(drafter: DraftModel) -> list[Any]:
    """What decides which operations a draft's step consists of."""
    modules = [(module, module.training) for module in drafter.model.modules()]
    return [drafter.device, drafter.dtype, drafter.text_config._attn_implementation, *modules]


class CompiledSession(ModelReading):
    """The draft's side of one generation of chains, with compiled steps."""

    def __init__(self, drafter: DraftModel, vocab_size: int, steps: CompiledSteps) -> None:
        super().__init__(drafter, vocab_size)
        self.steps = steps
        self.cache: FixedCache | None = None
        self._length = 0  # as `cache.length`, on the host

    @property
    def length(self) -> int:
        return self._length + self.unread

    def _forget(self, count: int) -> None:
        if count and self.cache is not None:
            self.cache.length.sub_(count)
            self._length -= count

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, states = self._take(candidates)
        cache = self.with_room(self._length + max(tokens.shape[1], SEVERAL))
        may_pad = self._length + SEVERAL <= self.drafter.max_length
        logits, hidden = self.steps.read(self.drafter, cache, tokens, states, self.vocab_size, may_pad)
        self._length += tokens.shape[1]
        self._own_states = {0: hidden}
        return logits, hidden

    def with_room(self, num_tokens: int) -> FixedCache:
        """The cache, or a larger one that holds the same, with room for so many tokens."""
        smaller = self.cache
        if smaller is not None and smaller.room >= num_tokens:
            return smaller
        cache = self.cache = self.steps.lease(num_tokens, self)
        if smaller is not None:
            cache.copy_from(smaller)
        return cache
