"""What drafts (`Draft`), and its side of one text (`Reading`), as a generation sees them.

`drafts` says what the kinds are, how they are stored and made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.models.causal_lm import CausalLM, num_processes
from hf_specdecpp.models.foreign import foreign_code
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.trees.tree import DraftTree

logger = logging.get_logger("hf_specdecpp")


class SharedText(Protocol):
    """What a draft may see of the tokens that its target has read: all but the last (`generation.target.Prefix`)."""

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

    def share(self, text: SharedText) -> None:  # noqa: B027 - most drafts have nothing to do with it
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
        """Logits `[n, vocab_size]` and hidden states `[n, hidden_size]` after nodes of a tree: first after the root,
        then after any whose parents have been asked about. Rows of nothing but -inf propose nothing."""
        raise NotImplementedError(f"{type(self).__name__} drafts chains.")

    def keep(self, path: list[int]) -> None:
        """After a tree: go on from the accepted nodes."""
        raise NotImplementedError(f"{type(self).__name__} drafts chains.")


class RowsAlone:
    """The rows of a batch whose draft shares nothing between them: each runs by itself."""

    def step(self, _asking: dict[int, list[Tensor]]) -> None:
        """Each row takes its step when it is asked for it."""

    def select(self, _places: Sequence[int]) -> None:
        """The rows that are left go on as before."""


def check_beside(target: CausalLM) -> None:
    """Raise `ValueError` if a draft that uses a target's embeddings cannot be put beside it."""
    if (processes := num_processes(target)) > 1:
        raise ValueError(
            f"{type(target).__name__} is spread over {processes} processes, which would have to draft each token "
            "together, since the draft uses its embeddings. Use an independent draft."
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
        cannot: what this draft cannot do, with the reason: `"trees"`, `"batches"`.
        agreement: how often it guesses what its target says, if that is known already (`drafts.acceptance.agreement`).
        shares_cache: whether its sessions read the target's own cache (`Reading.share`).
        captured: what captured rounds were made of, and the copy of this draft that drafts in them, if one can.
    """

    model: CausalLM | None
    block: int = 1
    places: float = float("inf")
    blocks_after: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    cannot: Mapping[str, str] = {}
    agreement: Sequence[float] = ()
    shares_cache = False
    captured: tuple[list[Any], Any] | None = None

    @property
    def max_length(self) -> float:
        return float("inf")

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

    def session(self, vocab_size: int) -> Reading:
        """Its side of one text; `vocab_size` is the width of the target's logits."""
        raise NotImplementedError

    def round_steps(self, vocab_size: int) -> RoundSteps | None:  # noqa: ARG002
        """All steps of captured rounds; `None` where they are not captured."""
        return None

    def row_session(self, vocab_size: int) -> Reading:
        """Its side of one row of a batch."""
        return self.session(vocab_size)

    def batch(self, rows: Sequence[Any]) -> Any:  # noqa: ARG002 - for drafts whose rows share something
        """What runs the draft for the rows (their `row_session`s) that go on, as `BatchSession` does."""
        return RowsAlone()

    @property
    def tree_reader(self) -> CausalLM | None:
        """The draft's model if it has to be tried on a token tree first (`trees.attention.check_tree`); `None` where
        no model reads trees, or the model is known to."""
        return None

    def renew(self) -> None:
        """Bring copies of the target's weights up to date: it may be in training."""

    def capture_steps(self, wanted: bool, fuse: bool) -> None:
        """Let rounds be captured as CUDA graphs where that can be done, with small pieces compiled, or no longer."""
        if self.model is None or not wanted or not graphs.can_capture(self.device):
            self.captured = None
            return
        now = [fuse, *identity({name: each for name, each in vars(self).items() if name != "captured"})]
        if self.captured is None or self.captured[0] != now:
            self.captured = None  # of which the copy would have one, too
            code = next(foreign_code(self.model), None)
            reason = self.why_not_captured() if code is None else f"it runs {code.name}, which a graph would not call"
            self.captured = now, self.for_capture(fuse) if reason is None else None
            if reason is not None:
                self.give_up(reason)

    def why_not_captured(self) -> str | None:
        """What is known of it that rules out captured rounds."""
        return None

    def for_capture(self, fuse: bool) -> Any:  # noqa: ARG002
        """A copy of it whose model is captured."""
        return None

    def give_up(self, reason: str) -> None:
        """Capture nothing of it, as it is now, any more."""
        self.captured = None if self.captured is None else (self.captured[0], None)
        logger.warning(
            f"Rounds with {type(self.model).__name__} cannot be captured as CUDA graphs here ({reason}), so they run "
            'one kernel after another: the same texts, more slowly. Set graphs="off", and nothing is tried.'
        )

    @property
    def captured_copy(self) -> Any:
        """The copy of it that drafts in captured rounds, or `None`."""
        return None if self.captured is None else self.captured[1]


class StateDraft(Draft):
    """A draft on the device of the target that it has met, which reads its states and is no causal LM by itself."""

    model: Any
    draft_vocab = None  # all tokens

    def __init__(self, model: Any, reader: Any, target: CausalLM) -> None:
        check_beside(target)
        self.model, self.reader = model, reader

    @property
    def device(self) -> Any:
        return self.model.device

    @property
    def dtype(self) -> Any:
        return self.model.dtype

    @property
    def reads(self) -> Any:
        return self.reader

    def for_capture(self, fuse: bool) -> Any:
        own = copy(self)
        own.model = for_capture(self.model, fuse=fuse)
        return own

    @property
    def hidden_size(self) -> int:
        return int(self.reader.hidden_size)

    @property
    def embedding_size(self) -> int:
        return int(self.reader.embedding_size)
