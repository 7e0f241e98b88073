"""What drafts, as one generation sees it: `Draft`. `drafts` says what the kinds are, how they are stored and made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.drafting.reading import Reading
from hf_specdecpp.models.causal_lm import CausalLM, input_device, num_processes
from hf_specdecpp.models.target_states import StateReader


class RowsAlone:
    """The rows of a batch whose draft shares nothing between them: each runs by itself."""

    def step(self, _asking: dict[int, list[Tensor]]) -> None:
        """Each row takes its step when it is asked for it."""

    def select(self, _places: Sequence[int]) -> None:
        """The rows that are left go on as before."""


class Beside:
    """Where a target was when a draft was put beside it.

    Raises:
        ValueError: it is spread over several processes.
    """

    def __init__(self, target: CausalLM) -> None:
        if (processes := num_processes(target)) > 1:
            raise ValueError(
                f"{type(target).__name__} is spread over {processes} processes, which would have to draft each token "
                "together, since the draft uses its embeddings. Use an independent draft."
            )
        self._target, self._place = weakref.ref(target), (target.dtype, input_device(target))

    def check(self) -> None:
        """Raise `ValueError` if the target has been moved since."""
        target = self._target()
        if target is not None and (target.dtype, input_device(target)) != self._place:
            raise ValueError(
                f"The target was moved to {target.dtype} on {input_device(target)} after this assistant was attached "
                "to it, and the draft was not. Call assistant.detach() and assistant.attach(model)."
            )


class Draft:
    """Proposes candidates. It holds no state of a generation: its sessions do.

    Example: a draft with `block = 4` and `places = 4` gives the distributions of four places with one pass. A chain of
    three candidates then costs one pass (`Costs.draft`) and two further places (`Costs.branch`).

    Attributes:
        model: that drafts, or `None`.
        parts: the modules that a draft step runs.
        reads: what it reads of the target (`TargetStates`), or `None`.
        block: candidates that one pass of the draft proposes.
        places: the longest path of candidates that a round can have; 0 where nothing is ever drawn.
        blocks_after: the final states `[batch, a, places, hidden_size]` of the blocks after some tokens of texts, given
            token ids `[batch, n]`, the target's states there `[batch, n, width]` and the places `[batch, a]` of these
            tokens; `None` where a pass proposes one candidate.
        max_length: tokens of the longest text that it can read.
        cannot: what this draft cannot do, with the reason: `"unattached"`, `"trees"`, `"batches"`.
        suspect: its name, if others trained it and perhaps for another target (`SpeculationStats.verdict`).
        is_captured: whether chains and trees are drafted with captured steps.
    """

    model: CausalLM | None
    block: int = 1
    places: float = float("inf")
    suspect: str | None = None
    blocks_after: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    @property
    def max_length(self) -> float:
        return float("inf")

    @property
    def cannot(self) -> Mapping[str, str]:
        return {}

    @property
    def is_captured(self) -> bool:
        return False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def parts(self) -> list[nn.Module]:
        return []

    @property
    def reads(self) -> StateReader | None:
        return None

    def chain_session(self, vocab_size: int) -> Reading:
        """Its side of a generation of chains; `vocab_size` is the width of the target's logits."""
        raise NotImplementedError

    def tree_session(self, vocab_size: int) -> Reading:
        """Its side of a generation of trees."""
        return self.chain_session(vocab_size)

    def row_session(self, vocab_size: int) -> Reading:
        """Its side of one row of a batch."""
        return self.chain_session(vocab_size)

    def batch(self, rows: Sequence[Any]) -> Any:  # noqa: ARG002 - for drafts whose rows share something
        """What runs the draft for the rows (their `row_session`s) that go on, as `BatchSession` does."""
        return RowsAlone()

    def check_tree(self) -> None:
        """Raise `ValueError` if it cannot draft trees."""

    def check_unmoved(self, has_adapter: bool) -> None:
        """Raise `ValueError` if the target was moved after a draft of its layers with parts of its own was made."""

    def renew(self) -> None:
        """Bring copies of the target's weights up to date: it may be in training."""

    def capture_steps(self, wanted: bool, fuse: bool) -> None:
        """Capture its steps as CUDA graphs where that can be done, with small pieces compiled, or no longer."""

    def describe(self) -> dict[str, Any]:
        """All that decides what drafting costs, beside the model; JSON-able."""
        raise NotImplementedError

    def check_can(self, what: str) -> None:
        """Raise `ValueError` if it cannot do this (`cannot`)."""
        if (reason := self.cannot.get(what)) is not None:
            raise ValueError(reason)
