"""A draft model's side of one generation: which tokens it has read (`ModelReading`), its KV cache (`DraftSession`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.batches import BatchText
from hf_specdecpp.caches.text import GrowingText, PathRows
from hf_specdecpp.drafting.draft import Reading
from hf_specdecpp.drafting.draft_model import DraftModel
from hf_specdecpp.models.causal_lm import inner_decoder, num_embeddings, takes_positions, upload
from hf_specdecpp.sampling.randomness import waits_for_reads
from hf_specdecpp.trees.attention import tree_inputs
from hf_specdecpp.trees.tree import DraftTree, Lineage


class ModelReading(Reading):
    """What a draft model has read of one text, and what it has still to read.

    Invariant: between rounds the cache holds a prefix of the accepted tokens, each fed exactly once.

    A draft that reads the target's states reads each token together with that at the token before it; the first token
    of the text has none, and is left out. What it read of candidates with states of its own is read again with the
    target's once they are accepted. A draft with recurrent layers, too, goes back to where the round began.
    """

    def __init__(self, drafter: DraftModel, vocab_size: int) -> None:
        super().__init__()
        self.drafter, self.vocab_size, self.embed = drafter, vocab_size, drafter.embed
        self.reads_states = self.reads_again = drafter.fusion is not None  # the latter: what was accepted, once more
        # Of what is emitted and drafted; prompts may hold more.
        self.knows_all = num_embeddings(drafter.model) >= vocab_size
        self.device = drafter.device  # once: finding it takes as long as a small product
        self.waits = waits_for_reads(self.device)
        # Tokens `[1, n]` and the states `[1, n, size]` that are read with them: put together once the draft reads them.
        self._pending: list[tuple[Tensor, Tensor | None]] = []
        self._fed_candidates = 0
        self._own_states: dict[int, Tensor] = {}  # if it reads states: its own `[hidden_size]` after these nodes

    @abstractmethod
    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in `Reading`: a model always has something to propose."""

    @abstractmethod
    def _keep(self, count: int, of: int, rows: Sequence[int] | None = None) -> None:
        """Keep in the cache the first `count` of the last `of` tokens that were read, or of a tree these rows."""

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        # The last token is read in any case, since the next candidate comes after it. It is an accepted candidate where
        # rows in step end a round together.
        keep = 0 if self.reads_again else max(min(num_accepted, self._fed_candidates, new_tokens.shape[1] - 1), 0)
        self._keep(keep, of=self._fed_candidates)
        new_tokens = new_tokens[:, keep:]
        if states is not None:
            known = min(states.shape[1], new_tokens.shape[1])  # fewer than the tokens where a cache is carried on
            new_tokens, states = new_tokens[:, -known:], states[:, -known:]
        if self.length == 0 or not self.knows_all:
            new_tokens = self.drafter.known(new_tokens)
        # A view would keep the whole text, one for each round.
        self._pending.append((new_tokens.clone(), states))
        self.unread += new_tokens.shape[1]
        self._fed_candidates = self.passes = 0

    def _take(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The tokens `[1, n]` to feed now, and a conditioned draft's states `[1, n, size]` before them."""
        self.passes += 1
        if candidates:
            self._fed_candidates += 1
            token = candidates[-1].view(1, 1).to(self.device)
            own = self._own_states[0][None, None].to(self.device) if self.reads_states else None
            return token if self.knows_all else self.drafter.known(token), own
        tokens, states = self._pending[0]
        if len(self._pending) > 1:  # after rounds without candidates
            tokens = torch.cat([each for each, _ in self._pending], dim=1)
            known = [each for _, each in self._pending if each is not None]
            states = torch.cat(known, dim=1) if known else None
        self._pending, self.unread = [], 0
        return tokens.to(self.device), states if states is None else states.to(self.device)


class DraftSession(ModelReading):
    """The draft model's side of one generation: its KV cache, and the next step."""

    def __init__(self, drafter: DraftModel, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.cache = DynamicCache(config=drafter.text_config)
        self.text = GrowingText(self.cache)
        self._recording = False
        self._lineage: Lineage | None = None  # the nodes of a tree that the cache holds

    @property
    def length(self) -> int:
        return self.text.held + self.unread

    def _keep(self, count: int, of: int, rows: Sequence[int] | None = None) -> None:
        if self._recording and not self.unread:  # something was fed in the last round
            path = None if rows is None else PathRows(list(rows), torch.tensor(rows))
            self.text.keep(count, of, path)

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        tokens, states = self._take(candidates)
        hidden = self.drafter.hidden_states(tokens, self.cache, states, are_known=True)[0, -1]
        self._own_states = {0: hidden}
        if not self._recording:
            # From here on the cache must be able to roll back. Not before: the prompt needs no roll-back, and its
            # sliding-window layers would keep all of it.
            self.cache.activate_past_recording()
            self._recording = True
        if not candidates:
            self.text.begin()
            self.reads_again = self.reads_states or self.text.mark is not None
        return self.drafter.logits(hidden, self.vocab_size), hidden

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
        num_prefix = self.cache.get_seq_length() - len(self._lineage.nodes)
        fed = torch.tensor([[tree.tokens[node] for node in nodes]]), *self._lineage.feed(tree, nodes)
        tokens, ancestors, depths = upload(fed, self.device)
        inputs = {}  # of a node that sees all before it, as in a chain
        if len(nodes) > 1 or not bool(fed[1].all()):
            inputs = tree_inputs(self.drafter.model, self.cache, ancestors, depths, num_prefix)
        hidden = self.drafter.hidden_states(tokens, self.cache, states, are_known=self.knows_all, **inputs)[0]
        self.passes += 1
        self._own_states.update(zip(nodes, hidden, strict=True))
        return self.drafter.logits(hidden, self.vocab_size), hidden

    def keep(self, path: list[int]) -> None:
        """As in `Reading`: of the accepted nodes those stay that were fed, or the root alone if they are read again.

        On an accelerator they are: a pass over a few tokens more takes no longer there, and their rows would have to
        be uploaded.
        """
        if self._lineage is None:  # nothing was drafted
            return
        again = self.reads_states or self.waits
        places = self._lineage.places
        rows = [0] + [places[node] for node in path if node in places and not again]
        self._keep(len(rows), len(self._lineage.nodes), rows)
        self._fed_candidates, self._lineage = len(rows) - 1, None


class RowSession(ModelReading):
    """What the draft has read of one row. The batch feeds it, and leaves here what the row's next step has `found`:
    logits `[vocab_size]` and hidden state. `forgotten` tokens are to be taken out of the row's part of the cache."""

    found: tuple[Tensor, Tensor]

    def __init__(self, drafter: DraftModel, vocab_size: int) -> None:
        super().__init__(drafter, vocab_size)
        self.forgotten = 0
        self._num_read = 0

    @property
    def length(self) -> int:
        return self._num_read + self.unread

    def _keep(self, count: int, of: int, rows: Sequence[int] | None = None) -> None:  # noqa: ARG002 - no trees
        self.forgotten += of - count
        self._num_read -= of - count

    def feed(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """The tokens `[1, n]` that the row reads next, and the target's states `[1, n, size]` before them."""
        tokens, states = self._take(candidates)
        self._num_read += tokens.shape[1]
        return tokens, states

    def leave(self, logits: Tensor, hidden: Tensor) -> None:
        """What the draft said after them."""
        self.found, self._own_states = (logits, hidden), {0: hidden}

    def step(self, _candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in `DraftSession`: the batch has run the draft for these candidates."""
        return self.found


class BatchSession:
    """The draft's cache for all rows of a batch; `ValueError` if the draft has layers that are not attention.

    Rows that draft on are fed together. In a round's first step rows have different numbers of tokens to read, so
    dummies stand before the shorter ones; a row that does not draft is fed dummies only.
    """

    def __init__(self, rows: Sequence[RowSession]) -> None:
        self.rows, self.vocab_size, self.drafter = list(rows), rows[0].vocab_size, rows[0].drafter
        cache = DynamicCache(config=self.drafter.text_config)
        self.text = BatchText(self.drafter.model, cache, len(rows))
        self._takes_positions = takes_positions(inner_decoder(self.drafter.model))

    def step(self, asking: dict[int, list[Tensor]]) -> None:
        """Run the draft for the rows that go on: each finds in its session what comes after its candidates. `asking`:
        their candidates, by place in the batch: none of them has any in a round's first step."""
        if not any(asking.values()):
            forgotten = torch.tensor([row.forgotten for row in self.rows])
            self.text.keep(torch.zeros_like(forgotten), of=forgotten)
            self.text.close_up()
            for row in self.rows:
                row.forgotten = 0
        fed = {place: self.rows[place].feed(candidates) for place, candidates in asking.items()}
        hidden = self._read(fed)
        places = list(fed)
        logits = self.drafter.logits(hidden[places], self.vocab_size)
        for place, of_row in zip(places, logits, strict=True):
            self.rows[place].leave(of_row, hidden[place])

    def _read(self, fed: dict[int, tuple[Tensor, Tensor | None]]) -> Tensor:
        """Feed tokens and states by row: the draft's hidden state after the last of each, `[rows, hidden_size]`."""
        device, dtype = self.rows[0].device, self.drafter.dtype
        width = max(tokens.shape[1] for tokens, _ in fed.values())
        all_tokens = torch.zeros(len(self.rows), width, dtype=torch.long, device=device)
        all_states, is_token = None, torch.zeros(len(self.rows), width, dtype=torch.bool)
        for place, (tokens, states) in fed.items():
            begin = width - tokens.shape[1]
            all_tokens[place, begin:] = tokens[0]
            is_token[place, begin:] = True
            if states is not None:
                if all_states is None:
                    all_states = torch.zeros(len(self.rows), width, states.shape[2], dtype=dtype, device=device)
                all_states[place, begin:] = states[0]
        inputs = {"attention_mask": self.text.mask(is_token)}
        if self._takes_positions:
            positions = self.text.held[:, None] + is_token.cumsum(dim=1) - 1
            inputs["position_ids"] = positions.where(is_token, 0).to(device)
        hidden = self.drafter.hidden_states(all_tokens, self.text.cache, all_states, are_known=True, **inputs)[:, -1]
        self.text.note(is_token)
        return hidden

    def select(self, places: Sequence[int]) -> None:
        self.rows = [self.rows[place] for place in places]
        self.text.select(places)
