"""A draft (`Draft`) and its side of one sequence (`DraftingSession`), the interfaces that a generation uses.

`draft_kinds` contains the kinds of draft: how they are made and stored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from hf_specdecpp.cuda_graphs import graphs
from hf_specdecpp.cuda_graphs.draft_steps import RoundSteps
from hf_specdecpp.cuda_graphs.identity import identity
from hf_specdecpp.cuda_graphs.model_copy import for_capture
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.foreign import foreign_code
from hf_specdecpp.models.quantised import is_quantised, rows_of
from hf_specdecpp.models.target_states import StateReader
from hf_specdecpp.trees.tree import DraftTree

logger = logging.get_logger("hf_specdecpp")


class DraftingSession(ABC):
    """A draft's side of one generated sequence, such as its KV cache. `read_verified` begins a round; then the draft
    proposes candidates, in `propose_next` for chains or in `expand` for trees.

    Attributes:
        unread: number of tokens that the draft will read in its next pass.
        passes: number of draft passes in this round.
        embed: maps token ids to their input embeddings in the draft, for an acceptance head."""

    embed: Callable[[Tensor], Tensor]

    def __init__(self) -> None:
        self.unread = self.passes = 0

    def bind_cache(self, text: Any) -> None:  # noqa: B027 - does nothing for most drafts
        """Called once, before the first round; `ValueError` if the draft cannot read the target's cache.

        `text` is a `generation.single_target.TargetContext`. A draft reads these attributes in later rounds: `cache`,
        the target's, with all tokens but the last; `shown`, bool `[rows]`, which of the cache's rows the attention mask
        shows (`None`: all); and `position`, of the last token."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Number of tokens of the sequence that the draft has read or will read in its next pass."""

    @abstractmethod
    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        """Called at the beginning of each round, to record the tokens emitted since the previous call.

        Args:
            new_tokens: `[1, n]`: in the first call the prompt, then the accepted candidates and the token after them.
            num_accepted: number of accepted candidates among `new_tokens`.
            states: for a draft that reads the target's hidden states: `[1, m, size]`, the state at the token before
                each of the last m of `new_tokens`."""

    @abstractmethod
    def propose_next(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return logits `[vocab_size]` of the next candidate, and the hidden state that they were computed from.

        `candidates`: the round's candidates so far (0-d int64 each), none in its first call, one more in each further
        call. `None` if the draft has no proposal: this must not depend on tokens drawn in this round, unless they were
        certain (a point mass)."""

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Return logits `[n, vocab_size]` and hidden states `[n, hidden_size]` after n nodes of `tree`, given by index.
        The first call of a round is for `[0]`, the root; then come nodes whose parents were in earlier calls. Nodes
        whose logits are all -inf get no children."""
        raise NotImplementedError(f"{type(self).__name__} drafts chains.")

    def commit_path(self, path: list[int]) -> None:  # noqa: B027 - most drafts read accepted candidates again
        """Called after each verification of a tree, with the accepted nodes (`path`, without the root)."""


def by_id(logits: Tensor, vocab_size: int, ids: Tensor | None = None, num_ids: int = 0) -> Tensor:
    """Return a draft's logits `[..., d]` as `[..., vocab_size]`, by token id: ids that the draft lacks get -inf. `ids`:
    `[d]`, the token ids of the d logits, all below `num_ids`; `None`: 0, 1, ..., d - 1. Ids from `vocab_size` on are
    cut, because the target's width may change at any time (`resize_token_embeddings`)."""
    if ids is not None:
        own, logits = logits, logits.new_full((*logits.shape[:-1], num_ids), float("-inf"))
        logits[..., ids] = own
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return nn.functional.pad(logits, (0, missing), value=float("-inf"))
    return logits[..., :vocab_size] if missing else logits


def slice_head(head: Any, token_ids: Tensor) -> nn.Linear:
    """Make an LM head from copies of the rows `token_ids` of `head`, which may be quantised: the copy is not."""
    with torch.no_grad():
        weight = rows_of(head, token_ids) if is_quantised(head) else head.weight[token_ids]
        bias = getattr(head, "bias", None)  # an adapter around a quantised head has none
        small = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
        small.weight = nn.Parameter(weight, requires_grad=False)
        if bias is not None:
            small.bias = nn.Parameter(bias[token_ids], requires_grad=False)
    return small


class Draft:
    """Base class: proposes candidates. The state of a generation is in the draft's sessions, not in the draft.

    Example: a draft with `block = 4` and `places = 4` gives the distributions of four positions with one pass. A chain
    of three candidates then costs one pass (`Costs.draft`) and two further positions (`Costs.branch`).

    Attributes:
        parts: the modules that a draft step runs.
        reads: converts the target's hidden states to the draft's inputs; `None` for drafts that read no such states."""

    model: CausalLM  # that drafts; `None` if nothing is drawn
    session_class: type[Any]  # `DraftingSession` of a sequence
    steps_class: type[Any]  # `RoundSteps`, for a draft that can be captured
    block: int = 1  # number of candidates that one draft pass proposes
    places: float = float("inf")  # the most candidates in a path; 0 if nothing is ever drawn
    # To train heads: final states of the blocks after several tokens of each sequence (`DFlashDraft.blocks_after`);
    # `None` for a draft that proposes one candidate per pass.
    blocks_after: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    cannot: Mapping[str, str] = {}  # unsupported uses, "trees" or "batches", with the reason
    agreement: Sequence[float] = ()  # share of candidates equal to the target's choice, by position
    shares_cache = False  # whether its sessions read the target's own cache (`DraftingSession.bind_cache`)
    max_length = float("inf")  # number of tokens in the longest sequence that the draft can read
    # Identity of the draft when its copy for captured rounds was made, and that copy, if any (`captured_copy`).
    captured: tuple[list[Any], Any] | None = None

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def parts(self) -> list[nn.Module]:
        return []

    @property
    def reads(self) -> StateReader | None:
        return None

    def session(self, vocab_size: int) -> DraftingSession:
        """Make the session of one sequence; `vocab_size` is the width of the target's logits."""
        return self.session_class(self, vocab_size)

    def round_steps(self, vocab_size: int, fuse: bool) -> RoundSteps | None:
        """The draft steps to capture in CUDA graphs of whole rounds, of `captured_copy`; `None` without a copy."""
        copied = self.captured_copy(fuse)
        return None if copied is None else self.steps_class(copied, vocab_size)

    def row_session(self, vocab_size: int) -> DraftingSession:
        """Make the session of one row of a batch."""
        return self.session(vocab_size)

    def batch(self, rows: Sequence[Any]) -> Any:
        """Make the object that runs the draft for all rows of a batch (`BatchSession`), given their sessions `rows`;
        `None` if each session runs it alone."""
        return None

    @property
    def tree_reader(self) -> CausalLM | None:
        """The draft's model if `trees.attention.check_tree` must test it before trees are drafted; `None` if the draft
        reads no tree nodes in a model, or its model is known to read them correctly."""
        return None

    def renew(self) -> None:
        """Called before each generation: update copies of the target's weights, which may be in training."""

    def captured_copy(self, fuse: bool) -> Any:
        """Return the copy of the draft that runs in rounds captured as CUDA graphs, or `None` if the draft cannot be
        captured. A new copy is made if the draft or `fuse` has changed since the last call. `fuse`: compile the small
        operations of the copy (`SpeculationConfig.compile`)."""
        if not graphs.can_capture(self.device):
            return None
        now = [fuse, *identity({name: each for name, each in vars(self).items() if name != "captured"})]
        found = self.captured  # another thread may replace it
        if found is None or found[0] != now:
            self.captured = None  # so that the copy has none
            code = next(foreign_code(self.model), None)
            reason = self.why_not_captured() if code is None else f"it runs {code.name}, which a graph would not call"
            self.captured = found = now, self.for_capture(fuse) if reason is None else None
            if reason is not None:
                self.give_up(reason)
        return found[1]

    def why_not_captured(self) -> str | None:
        """Why rounds with this draft cannot be captured; `None` if no reason is known."""
        return None

    def for_capture(self, fuse: bool) -> Any:
        """Make a copy of the draft for captured rounds; `fuse` as in `captured_copy`."""
        return None

    def give_up(self, reason: str) -> None:
        """Do not capture this draft until the draft or `fuse` changes (`captured_copy`), and warn with `reason`."""
        self.captured = None if self.captured is None else (self.captured[0], None)
        logger.warning(
            f"Rounds with {type(self.model).__name__} cannot be captured as CUDA graphs here ({reason}), so they run "
            'one kernel after another: the same texts, more slowly. Set graphs="off", and nothing is tried.'
        )


class StateDraft(Draft):
    """Base class of drafts that read the target's hidden states and use its embeddings, and that no `Drafter` can run.
    `model` is their module, `reader` becomes `reads`."""

    model: Any
    draft_vocab = None  # all tokens
    reads: Any = None

    def __init__(self, model: Any, reader: Any) -> None:
        self.model, self.reads = model, reader
        self.hidden_size, self.embedding_size = int(reader.hidden_size), int(reader.embedding_size)

    def for_capture(self, fuse: bool) -> Any:
        own = copy(self)
        own.model = for_capture(self.model, fuse=fuse)
        return own
