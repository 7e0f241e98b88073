"""A draft model's side of one generation: which tokens it has read (`ModelReading`), its KV cache (`DraftSession`)."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.paths import keep_path
from hf_specdecpp.caches.rollback import Mark, is_recurrent, num_rows
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.drafting.reading import Reading
from hf_specdecpp.models.causal_lm import num_embeddings, upload
from hf_specdecpp.sampling.randomness import waits_for_reads
from hf_specdecpp.trees.attention import tree_inputs
from hf_specdecpp.trees.tree import DraftTree, Lineage


class ModelReading(Reading):
    """What a draft model has read of one text, and what it has still to read.

    Invariant: between rounds the cache holds a prefix of the accepted tokens, each fed exactly once.

    A draft that reads the target's states reads each token together with that at the token before it; the first token
    of the text has none, and is left out. What it read of candidates with states of its own is read again with the
    target's once they are accepted. A draft with recurrent layers, too, goes back to where the round began.

    Args:
        vocab_size: width of the target's logits.
    """

    def __init__(self, drafter: DraftModel, vocab_size: int) -> None:
        super().__init__()
        self.drafter, self.vocab_size, self.embed = drafter, vocab_size, drafter.embed
        self.reads_states = drafter.fusion is not None
        # Of what is emitted and drafted; prompts may hold more.
        self.knows_all = num_embeddings(drafter.model) >= vocab_size
        self.device = drafter.device  # once: finding it takes as long as a small product
        # Tokens `[1, n]` and the states `[1, n, size]` that are read with them: put together once the draft reads them.
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._fed_candidates = 0
        self._own_states: dict[int, Tensor] = {}  # if it reads states: its own `[hidden_size]` after these nodes
        self._lineage: Lineage | None = None  # the nodes of a tree that the cache holds

    @abstractmethod
    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in `Reading`: a model always has something to propose."""

    @abstractmethod
    def _forget(self, count: int) -> None:
        """Take the last `count` candidates that were fed out of the cache."""

    @property
    def reads_again(self) -> bool:
        """Whether candidates that were accepted are read once more."""
        return self.reads_states

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        keep = 0 if self.reads_again else min(num_accepted, self._fed_candidates)
        self._forget(self._fed_candidates - keep)
        new_tokens = new_tokens[:, keep:]
        if states is not None:
            known = min(states.shape[1], new_tokens.shape[1])  # fewer than the tokens where a cache is carried on
            new_tokens, states = new_tokens[:, -known:], states[:, -known:]
        if self.length == 0 or not self.knows_all:
            new_tokens = self.drafter.known(new_tokens)
        # A view would keep the whole text, one for each round; and compiled steps look at strides.
        self._pending.append((new_tokens.clone(memory_format=torch.contiguous_format), states))
        self.unread += new_tokens.shape[1]
        self._fed_candidates, self.passes = 0, 0

    def _take(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The tokens `[1, n]` to feed now, and a conditioned draft's states `[1, n, size]` before them."""
        if candidates:
            own = self._own_states[0][None, None] if self.reads_states else None
            token = candidates[-1].view(1, 1)
            self._pending = [(token if self.knows_all else self.drafter.known(token), own)]
            self._fed_candidates += 1
        tokens = [each.to(self.device) for each, _ in self._pending]
        states = [each.to(self.device) for _, each in self._pending if each is not None]
        self._pending, self.unread = [], 0
        self.passes += 1
        return joined(tokens), joined(states) if states else None

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """As in `Reading`: the root with all that is pending, of which it is the last; then nodes below fed ones."""
        if nodes == [0]:
            self._lineage = Lineage()
            self._lineage.feed(tree, nodes)
            logits, hidden = self.step([])
            return logits[None], hidden[None]
        if self._lineage is None:
            raise ValueError("The root of a tree is fed first, by itself.")
        states = None
        if self.reads_states:
            states = torch.stack([self._own_states[tree.parents[node]] for node in nodes])[None]
        logits, hidden = self._expand(self._lineage, tree, nodes, states)
        self.passes += 1
        self._own_states.update(zip(nodes, hidden, strict=True))
        return logits, hidden

    def _expand(
        self, lineage: Lineage, tree: DraftTree, nodes: list[int], states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Read nodes below fed ones, with the draft's own states `[1, n, hidden_size]` before them if it reads any.

        Returns:
            Logits `[n, vocab_size]` and hidden states `[n, hidden_size]`.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts chains.")


class DraftSession(ModelReading):
    """The draft model's side of one generation: its KV cache, and the next step."""

    def __init__(self, drafter: DraftModel, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.cache = DynamicCache(config=drafter.text_config)
        self._recording = False
        self._mark: Mark | None = None  # of a draft with recurrent layers, before the round's candidates

    @property
    def reads_again(self) -> bool:
        return self.reads_states or self._mark is not None

    @property
    def length(self) -> int:
        return num_rows(self.cache) + self.unread

    def _forget(self, count: int) -> None:
        if self._mark is not None:
            if count:
                self._mark.back()
        elif self._recording and not self.unread:  # something was fed in the last round
            # Also with nothing to remove: sliding-window layers shrink back to their window here.
            self.cache.crop(-count)

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, states = self._take(candidates)
        hidden = self.drafter.hidden_states(tokens, self.cache, states, are_known=True)[0, -1]
        self._own_states = {0: hidden}
        if not self._recording:
            # From here on the cache must be able to roll back. Not before: the prompt needs no roll-back, and its
            # sliding-window layers would keep all of it.
            self.cache.activate_past_recording()
            self._recording = True
        if not candidates and is_recurrent(self.cache):
            self._mark = Mark(self.cache)
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def _expand(
        self, lineage: Lineage, tree: DraftTree, nodes: list[int], states: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        num_prefix = self.cache.get_seq_length() - len(lineage.nodes)
        fed = torch.tensor([[tree.tokens[node] for node in nodes]]), *lineage.feed(tree, nodes)
        tokens, ancestors, depths = upload(fed, self.device)
        inputs = tree_inputs(self.drafter.model, self.cache, ancestors, depths, num_prefix)
        hidden = self.drafter.hidden_states(tokens, self.cache, states, are_known=self.knows_all, **inputs)[0]
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def keep(self, path: list[int]) -> None:
        """After a tree: roll back to those of the accepted nodes that were fed; to the root if they are read again.

        On an accelerator they are: a pass over a few tokens more takes no longer there, and their rows would have to
        be uploaded.
        """
        if self._lineage is None:  # nothing was drafted
            return
        path = [] if self.reads_states or waits_for_reads(self.device) else path
        fed = [self._lineage.places[node] for node in path if node in self._lineage.places]
        keep_path(self.cache, self.cache.get_seq_length() - len(self._lineage.nodes), [0, *fed])
        self._fed_candidates, self._lineage = len(fed), None


def joined(pieces: list[Tensor]) -> Tensor:
    """Pieces `[1, n, ...]` of a text, one after another."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)
