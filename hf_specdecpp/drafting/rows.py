"""A draft model's passes over all rows of a batch (`BatchSession`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.batches import BatchContext
from hf_specdecpp.models.causal_lm import inner_decoder, takes_positions


class BatchSession:
    """Runs a draft model for all rows of a batch, with one cache; `ValueError` if it has layers that are not attention.
    `rows`: their sessions (`drafter.RowSession`).

    Each pass is over all rows that still draft in this round. In a round's first pass rows have different numbers of
    unread tokens, so shorter rows are padded on the left with dummies; a row that does not draft has dummies only."""

    def __init__(self, rows: Sequence[Any]) -> None:
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
