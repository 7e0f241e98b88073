"""A draft model in a batch: one `RowSession` for each row, and one cache for all (`BatchSession`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.batches import BatchContext
from hf_specdecpp.drafting.draft_model import ModelSession
from hf_specdecpp.models.causal_lm import inner_decoder, takes_positions


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
