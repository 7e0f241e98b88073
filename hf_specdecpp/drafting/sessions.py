"""Sessions of a causal LM that drafts: for one sequence (`DraftSession`), and in a batch one for each row
(`RowSession`), with one cache for all (`BatchSession`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.batches import BatchContext
from hf_specdecpp.caches.cached_context import GrowingContext, PathRows
from hf_specdecpp.caches.masks import tree_inputs
from hf_specdecpp.drafting.draft import DraftingSession
from hf_specdecpp.models.causal_lm import inner_decoder, num_embeddings, takes_positions
from hf_specdecpp.sampling.randomness import waits_for_reads
from hf_specdecpp.trees.tree import DraftTree, TreePass


class ModelSession(DraftingSession):
    """Base class of a draft model's sessions: decides which tokens of the sequence the model reads in each pass.

    Invariant: between rounds the draft's cache contains a prefix of the verified sequence, each token once.

    A draft that reads the target's states reads each token with the target's state at the token before; the first token
    of the sequence has none and is skipped. It reads candidates with its own states at the token before. After each
    round it rolls back, and reads accepted candidates again, with the target's states. A draft with recurrent layers
    also rolls back to the start of the round, and reads accepted candidates again."""

    length = 0

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        super().__init__()
        self.drafter, self.vocab_size, self.embed = drafter, vocab_size, drafter.embed
        self.reads_states = self.reads_again = drafter.fusion is not None  # the latter: accepted candidates again
        # Whether all emitted and drafted ids are in the embedding table; prompts may contain others.
        self.knows_all = num_embeddings(drafter.model) >= vocab_size
        self.device = drafter.device  # looked up once, which takes as long as a small matrix multiplication
        # Unread tokens `[1, n]` and their states `[1, n, size]`, by round; concatenated when the draft reads them.
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._num_read_candidates = 0
        self._own_states: dict[int, Tensor] = {}  # its own states `[hidden_size]` by tree node; a chain uses 0

    @abstractmethod
    def _keep(self, count: int, of: int) -> None:
        """Called after a round: of the last `of` tokens that the draft has read, keep the first `count` in the cache,
        and remove the others."""

    def read_verified(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        # The last token is always read, because the next candidate follows it. It can be an accepted candidate if the
        # rows of a batch end their rounds together.
        keep = 0 if self.reads_again else max(min(num_accepted, self._num_read_candidates, new_tokens.shape[1] - 1), 0)
        self._keep(keep, of=self._num_read_candidates)
        new_tokens = new_tokens[:, keep:]
        if states is not None:
            known = min(states.shape[1], new_tokens.shape[1])  # fewer than tokens if a cache is reused
            new_tokens, states = new_tokens[:, -known:], states[:, -known:]
        if self.length == 0 or not self.knows_all:
            new_tokens = self.drafter.known(new_tokens)
        # A view would keep the whole sequence alive, once per round.
        self._pending.append((new_tokens.clone(), states))
        self.length += keep + new_tokens.shape[1]
        self.unread += new_tokens.shape[1]
        self._num_read_candidates = self.passes = 0

    def next_tokens(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Begin a draft pass: return the tokens `[1, n]` that the pass must read, all unread ones or the last of
        `candidates`, and the states `[1, n, size]` at the token before each (`None` unless the draft reads states)."""
        self.passes += 1
        if candidates:
            self._num_read_candidates += 1
            token = candidates[-1].view(1, 1).to(self.device)
            own = self._own_states[0][None, None].to(self.device) if self.reads_states else None
            return token if self.knows_all else self.drafter.known(token), own
        tokens = torch.cat([each for each, _ in self._pending], dim=1)
        known = [each for _, each in self._pending if each is not None]
        states = torch.cat(known, dim=1) if known else None
        self._pending, self.unread = [], 0
        return tokens.to(self.device), states if states is None else states.to(self.device)


class DraftSession(ModelSession):
    """A draft model's session for a single sequence, with its own KV cache."""

    def __init__(self, drafter: Any, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.cache = DynamicCache(config=drafter.text_config)
        self.context = GrowingContext(self.cache)
        self._nodes: list[int] = []  # of the round's tree, in the order read

    def _keep(self, count: int, of: int) -> None:
        if self.passes:
            self.context.commit(count, of)

    def propose_next(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, states = self.next_tokens(candidates)
        hidden = self.drafter.hidden_states(tokens, self.cache, states, are_known=True)[0, -1]
        self._own_states = {0: hidden}
        if not candidates:
            if not self.context.num_tokens:
                # From here on the cache must be able to roll back. The prompt needs no roll-back: recording it, layers
                # with a sliding window would keep all of it.
                self.cache.activate_past_recording()
            self.context.begin_round()
            self.reads_again = self.reads_states or self.context.rollback_point is not None
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """As in `DraftingSession`. The call for the root reads all unread tokens, of which the root is the last."""
        if nodes == [0]:
            self._nodes = [0]
            logits, hidden = self.propose_next([])
            return logits[None], hidden[None]
        states = None
        if self.reads_states:
            states = torch.stack([self._own_states[tree.parents[node]] for node in nodes])[None]
        read = len(self._nodes)
        self._nodes += nodes
        tokens, ancestors, depths = TreePass(tree, self._nodes).upload(self.device, first=read)
        inputs = {}
        if len(nodes) > 1 or tree.depths[nodes[0]] < read:  # a single node that sees all earlier ones extends a chain
            num_prefix = self.cache.get_seq_length() - read
            inputs = tree_inputs(self.drafter.model, self.cache, ancestors, depths, num_prefix)
        hidden = self.drafter.hidden_states(tokens[None], self.cache, states, are_known=self.knows_all, **inputs)[0]
        self.passes += 1
        self._own_states.update(zip(nodes, hidden, strict=True))
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def commit_path(self, path: list[int]) -> None:
        """As in `DraftingSession`: keep the root and the accepted nodes that were read in the draft's cache.

        If the draft reads states or runs on an accelerator, only the root is kept, and accepted nodes are read again: a
        pass over a few more tokens takes no longer on an accelerator, and moving rows would need an upload."""
        if not self._nodes:  # nothing was drafted
            return
        again = self.reads_states or waits_for_reads(self.device)
        rows = [0, *(self._nodes.index(node) for node in path if node in self._nodes and not again)]
        self.context.commit(len(rows), len(self._nodes), PathRows(rows, torch.tensor(rows, device="cpu")))
        self._num_read_candidates, self._nodes = len(rows) - 1, []


class RowSession(ModelSession):
    """A draft model's session for one row of a batch. `BatchSession` runs the draft for all rows, and stores the row's
    next logits `[vocab_size]` and hidden state in `found`. `num_dropped`: number of the row's last tokens in the cache
    that were rejected and are not removed yet."""

    found: tuple[Tensor, Tensor]
    num_dropped = 0

    def _keep(self, count: int, of: int) -> None:
        self.num_dropped += of - count

    def store(self, logits: Tensor, hidden: Tensor) -> None:
        """Called after a pass over the tokens of `next_tokens`, with logits and hidden state at the last of them."""
        self.found, self._own_states = (logits, hidden), {0: hidden}

    def propose_next(self, _candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in `DraftingSession`: returns the result of `BatchSession.run_draft`, which was called before."""
        return self.found


class BatchSession:
    """Runs a draft model for all rows of a batch, with one cache; `ValueError` if it has layers that are not attention.

    Each pass is over all rows that still draft in this round. In a round's first pass rows have different numbers of
    unread tokens, so shorter rows are padded on the left with dummies; a row that does not draft has dummies only."""

    def __init__(self, rows: Sequence[RowSession]) -> None:
        self.rows, self.vocab_size, self.drafter = list(rows), rows[0].vocab_size, rows[0].drafter
        cache = DynamicCache(config=self.drafter.text_config)
        self.context = BatchContext(self.drafter.model, cache, len(rows))
        self._takes_positions = takes_positions(inner_decoder(self.drafter.model))

    def run_draft(self, asking: dict[int, list[Tensor]]) -> None:
        """Run one draft pass and store the results in the rows' sessions. `asking`: the candidates so far of each row
        that still drafts in this round, by its index in the batch; none has any before the round's first pass."""
        if not any(asking.values()):
            num_dropped = torch.tensor([row.num_dropped for row in self.rows], device="cpu")
            self.context.commit(torch.zeros_like(num_dropped), of=num_dropped)
            self.context.close_up()
            for row in self.rows:
                row.num_dropped = 0
        fed = {place: self.rows[place].next_tokens(candidates) for place, candidates in asking.items()}
        hidden = self._read(fed)
        places = list(fed)
        logits = self.drafter.logits(hidden[places], self.vocab_size)
        for place, of_row in zip(places, logits, strict=True):
            self.rows[place].store(of_row, hidden[place])

    def _read(self, fed: dict[int, tuple[Tensor, Tensor | None]]) -> Tensor:
        """Run the pass. `fed`: tokens and states from `next_tokens`, by index of the row. Returns hidden states `[rows,
        hidden_size]` at the last token of each row."""
        device, dtype = self.rows[0].device, self.drafter.dtype
        width = max(tokens.shape[1] for tokens, _ in fed.values())
        all_tokens = torch.zeros(len(self.rows), width, dtype=torch.long, device=device)
        all_states, is_token = None, torch.zeros(len(self.rows), width, dtype=torch.bool, device="cpu")
        for place, (tokens, states) in fed.items():
            begin = width - tokens.shape[1]
            all_tokens[place, begin:] = tokens[0]
            is_token[place, begin:] = True
            if states is not None:
                if all_states is None:
                    all_states = torch.zeros(len(self.rows), width, states.shape[2], dtype=dtype, device=device)
                all_states[place, begin:] = states[0]
        inputs = {"attention_mask": self.context.mask(is_token)}
        if self._takes_positions:
            positions = self.context.num_tokens[:, None] + is_token.cumsum(dim=1) - 1
            inputs["position_ids"] = positions.where(is_token, 0).to(device)
        hidden = self.drafter.hidden_states(all_tokens, self.context.cache, all_states, are_known=True, **inputs)[:, -1]
        self.context.record_pass(is_token)
        return hidden

    def select(self, places: Sequence[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        self.context.select(places)
