"""The draft's side of one generation: its KV cache, and which tokens it has read (`DraftSession`)."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.estimation.estimators import DraftStep
from hf_specdecpp.models.kv_cache import keep_path
from hf_specdecpp.trees.attention import tree_inputs
from hf_specdecpp.trees.tree import DraftTree, Lineage


class DraftSession:
    """The draft's side of one generation: which tokens its cache holds, and the next step.

    Invariant: between rounds the cache holds a prefix of the accepted tokens, each fed exactly once.

    A conditioned draft reads each token together with a state of the target at the token before it; the first token of
    the text has none, and is left out. What it read of candidates with states of its own is read again with the
    target's once they are accepted.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.cache = DynamicCache(config=drafter.text_config)
        self._recording = False
        self._device = drafter.device
        # Tokens `[1, n]` and, for a conditioned draft, states `[1, n, size]`: put together once the draft reads them.
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._num_pending = 0
        self._fed_candidates = 0
        self._lineage: Lineage | None = None  # the nodes of a tree that the cache holds
        self._own_states: dict[int, Tensor] = {}  # of a conditioned draft: `[hidden_size]` after each of these nodes

    @property
    def length(self) -> int:
        """Tokens that the draft has read or is about to read."""
        return self.cache.get_seq_length() + self._num_pending

    @property
    def unread(self) -> int:
        """Tokens that the draft is about to read."""
        return self._num_pending

    @property
    def _is_conditioned(self) -> bool:
        return self.drafter.fusion is not None

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        """Take note of what the last round emitted.

        Args:
            new_tokens: `[1, n]`, the prompt in the first round, then the accepted candidates and the token after them.
            num_accepted: how many of them were candidates of the last round.
            states: `[1, m, size]`, for a conditioned draft: the target's, at the tokens before the last m of these.
        """
        keep = 0 if self._is_conditioned else min(num_accepted, self._fed_candidates)
        if self._recording and not self._num_pending:  # something was fed in the last round
            # Also with nothing to remove: sliding-window layers shrink back to their window here.
            self.cache.crop(keep - self._fed_candidates)
        new_tokens = new_tokens[:, keep:]
        if states is not None:
            known = min(states.shape[1], new_tokens.shape[1])  # fewer than the tokens where a cache is carried on
            new_tokens, states = new_tokens[:, -known:], states[:, -known:]
        self._pending.append((new_tokens.clone(), states))  # a view would keep the whole text, one for each round
        self._num_pending += new_tokens.shape[1]
        self._fed_candidates = 0

    def step(self, candidates: list[int]) -> tuple[Tensor, Tensor]:
        """Feed what is pending and the newest candidate: logits `[vocab_size]` and hidden state after it.

        `candidates` must grow by one token from call to call within a round, starting empty.
        """
        if candidates:
            own = self._own_states[0][None, None] if self._is_conditioned else None
            self._pending = [(torch.tensor([[candidates[-1]]]), own)]
            self._fed_candidates += 1
        tokens = torch.cat([each.to(self._device) for each, _ in self._pending], dim=1)
        states = [each.to(self._device) for _, each in self._pending if each is not None]
        hidden = self.drafter.hidden_states(tokens, self.cache, torch.cat(states, dim=1) if states else None)[0, -1]
        self._pending, self._num_pending, self._own_states = [], 0, {0: hidden}
        if not self._recording:
            # From here on the cache must be able to roll back. Not before: the prompt needs no roll-back, and its
            # sliding-window layers would keep all of it.
            self.cache.activate_past_recording()
            self._recording = True
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """Feed nodes of a tree in one pass: logits `[n, vocab_size]` and hidden states `[n, hidden_size]` after them.

        First the root, with all that is pending (it is the last of it); then any nodes whose parents have been fed.
        """
        if nodes == [0]:
            self._lineage = Lineage()
            self._lineage.feed(tree, nodes)
            logits, hidden = self.step([])
            return logits[None], hidden[None]
        if self._lineage is None:
            raise ValueError("The root of a tree is fed first, by itself.")
        num_prefix = self.cache.get_seq_length() - len(self._lineage.nodes)
        ancestors, depths = self._lineage.feed(tree, nodes)
        inputs = tree_inputs(self.drafter.model, self.cache, ancestors, depths, num_prefix)
        tokens = torch.tensor([[tree.tokens[node] for node in nodes]], device=self.drafter.device)
        states = None
        if self._is_conditioned:
            states = torch.stack([self._own_states[tree.parents[node]] for node in nodes])[None]
        hidden = self.drafter.hidden_states(tokens, self.cache, states, **inputs)[0]
        self._own_states.update(zip(nodes, hidden, strict=True))
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def keep(self, path: list[int]) -> None:
        """After a tree: roll back to those of the accepted nodes that were fed; to the root if they are read again."""
        if self._lineage is None:  # nothing was drafted
            return
        path = [] if self._is_conditioned else path
        fed = [self._lineage.places[node] for node in path if node in self._lineage.places]
        keep_path(self.cache, self.cache.get_seq_length() - len(self._lineage.nodes), [0, *fed])
        self._fed_candidates, self._lineage = len(fed), None

    def draft_step(self, index: int, scores: Tensor, hidden: Tensor, greedy: bool) -> DraftStep:
        return DraftStep(index=index, scores=scores, hidden=hidden, embed=self.drafter.embed, greedy=greedy)
