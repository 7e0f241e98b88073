"""A small kind of draft that is not a model of its own. It shows what the interface asks.

`BlockDraft` gives the distributions of several places with one pass of a tiny model, and knows no more of a generation
than its `Reading`."""

from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.drafting.draft import Draft, Reading
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.trees.tree import DraftTree

BLOCK, HIDDEN_SIZE, IMPOSSIBLE = 3, 4, float("-inf")


class TextReading(Reading):
    """Keeps the text. `rows` is filled when a round first asks, with one pass at most.

    `text`: all tokens that were emitted, as a list. `rows`: logits `[vocab_size]` of the places of this round: of the
    first candidate, the second, ..."""

    def __init__(self, draft: Any, vocab_size: int) -> None:
        super().__init__()
        self.draft, self.vocab_size = draft, vocab_size
        self.text: list[int] = []
        self.rows: list[Tensor] | None = None
        self.embed = lambda tokens: torch.zeros(*tokens.shape, HIDDEN_SIZE)

    @property
    def length(self) -> int:
        return len(self.text)

    def begin_round(self, new_tokens: Tensor, num_accepted: int, states: Tensor | None = None) -> None:
        self.text += new_tokens[0].tolist()
        self.unread, self.passes, self.rows = 1, 0, None

    def step(self, candidates: list[Tensor]) -> tuple[Tensor, Tensor] | None:
        rows = self._rows()
        if len(candidates) == len(rows):
            return None
        return rows[len(candidates)], torch.zeros(HIDDEN_SIZE)

    def expand(self, tree: DraftTree, nodes: list[int]) -> tuple[Tensor, Tensor]:
        """By depth: every node of a depth has the same distribution."""
        rows, nothing = self._rows(), torch.full((self.vocab_size,), IMPOSSIBLE, dtype=torch.float64)
        depths = [tree.depths[node] for node in nodes]
        found = [rows[depth] if depth < len(rows) else nothing for depth in depths]
        return torch.stack(found), torch.zeros(len(nodes), HIDDEN_SIZE)

    def keep(self, path: list[int]) -> None:
        """What was accepted comes with the next round."""

    def _rows(self) -> list[Tensor]:
        if self.rows is None:
            self.rows, passes = self.draft.propose(self.text, self.vocab_size)
            self.passes, self.unread = self.passes + passes, 0
        return self.rows


class BlockDraft(Draft):
    """`BLOCK` places from one pass: logits of the model after the text, each shifted so that places differ.

    `model`: any causal LM, the target itself for a draft that is often right. `sharpness`: what its logits are
    multiplied with."""

    block = BLOCK
    places = BLOCK

    model: CausalLM

    def __init__(self, model: CausalLM, sharpness: float = 1.0) -> None:
        self.model, self.sharpness = model, sharpness

    def session(self, vocab_size: int) -> Reading:
        return TextReading(self, vocab_size)

    def describe(self) -> dict[str, Any]:
        return {"kind": "block", "places": BLOCK}

    def propose(self, text: list[int], vocab_size: int) -> tuple[list[Tensor], int]:
        with torch.inference_mode():
            ids = torch.tensor([text])
            rows = [self.model(ids).logits[0, -1, :vocab_size]]
            for _ in range(BLOCK - 1):  # a real block has these from the same pass
                ids = torch.cat((ids, rows[-1].argmax().view(1, 1)), dim=1)
                rows.append(self.model(ids).logits[0, -1, :vocab_size])
        return [self.sharpness * row for row in rows], 1
