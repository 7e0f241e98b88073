"""A draft's side of one generation, whatever drafts: `Reading`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.trees.tree import DraftTree


class TargetText(Protocol):
    """What a target has read of a text: `generation.prefix.Prefix`. Between rounds that is all but its last token."""

    @property
    def cache(self) -> Any:
        """The target's own."""

    @property
    def shown(self) -> Tensor | None:
        """`[rows]` bool: which rows of the cache the target sees; `None` for all."""

    @property
    def position(self) -> Tensor:
        """`[1, 1]`: where the text's last token stands."""


class Reading(ABC):
    """What a draft has read of one text, and what it proposes next: in chains by `step`, in trees by `expand`.

    Attributes:
        unread: how many tokens the draft is about to read.
        passes: that it has made in this round.
        embed: maps token ids to their input embeddings in the draft, for a head.
    """

    embed: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        self.unread = self.passes = 0

    def share(self, text: TargetText) -> None:  # noqa: B027 - most drafts have nothing to do with it
        """Told once, before the first round, where the target's own cache is; `ValueError` if it cannot be read."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Tokens that the draft has read or is about to read."""

    @abstractmethod
    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        """Take note of what the last round emitted.

        Args:
            new_tokens: `[1, n]`, the prompt in the first round, then the accepted candidates and the token after them.
            num_accepted: how many of them were candidates of the last round.
            states: `[1, m, size]`, for a draft that reads them: the target's, at the tokens before the last m of these.
        """

    @abstractmethod
    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Logits `[vocab_size]` of the next candidate, and the hidden state that they were computed from.

        `candidates`, 0-d int64 each, must grow by one token from call to call within a round, starting empty. `None`
        where the draft has nothing to propose: that must not depend on what was drawn since the round began, unless all
        of it was certain (a point mass).
        """

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Logits `[n, vocab_size]` and hidden states `[n, hidden_size]` after nodes of a tree.

        First after the root; then after any nodes whose parents have been asked about. Rows of nothing but -inf
        propose nothing.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts chains.")

    def keep(self, path: list[int]) -> None:
        """After a tree: go on from the accepted nodes."""
        raise NotImplementedError(f"{type(self).__name__} drafts chains.")

    def draft_step(self, index: int, scores: Tensor, hidden: Tensor, greedy: bool) -> DraftStep:
        """What the rule and the estimator are told of a candidate."""
        return DraftStep(index=index, scores=scores, hidden=hidden, embed=self.embed, greedy=greedy)
