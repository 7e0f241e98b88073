"""A draft model's side of a batch: the tokens read of each row (`RowSession`), and one cache (`BatchSession`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_specdecpp.caches.batches import BatchContext
from hf_specdecpp.drafting.draft_model import ModelSession
from hf_specdecpp.models.causal_lm import inner_decoder, takes_positions


class RowSession(ModelSession):
    """The tokens that the draft reads of one row. `BatchSession` runs the draft, and stores logits `[vocab_size]` and
    hidden state of the row's next step in `found`. `num_dropped`: rejected tokens that its cache still has."""

    found: tuple[Tensor, Tensor]
    num_dropped = 0

    def _keep(self, count: int, of: int) -> None:
        self.num_dropped += of - count

    def store(self, logits: Tensor, hidden: Tensor) -> None:
        """Store the draft's logits and hidden state after the tokens of `next_tokens`."""
        self.found, self._own_states = (logits, hidden), {0: hidden}

    def propose_next(self, _candidates: list[Tensor]) -> tuple[Tensor, Tensor]:
        """As in `DraftingSession`. `BatchSession.run_draft` has run the draft for these candidates already."""
        return self.found


class BatchSession:
    """The draft's cache for all rows of a batch; `ValueError` if the draft has layers that are not attention.

    Unfinished rows are read in one pass. In a round's first step rows have different numbers of unread tokens, so
    shorter rows are padded on the left with dummies; a row that does not draft has dummies only.
    """

    def __init__(self, rows: Sequence[RowSession]) -> None:
        self.rows, self.vocab_size, self.drafter = list(rows), rows[0].vocab_size, rows[0].drafter
        cache = DynamicCache(config=self.drafter.text_config)
        self.context = BatchContext(self.drafter.model, cache, len(rows))
        self._takes_positions = takes_positions(inner_decoder(self.drafter.model))

    def run_draft(self, asking: dict[int, list[Tensor]]) -> None:
        """Run the draft for the unfinished rows and store the results in their sessions. `asking`: their candidates, by
        index in the batch; in a round's first step no row has any."""
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
        """Read `fed`, what `next_tokens` gives by row: hidden states `[rows, hidden_size]` after each last token."""
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
