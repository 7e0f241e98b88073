"""The Markov head of DSpark drafts (DeepSpec, 2026): a low-rank bias of the logits that depends on the token before.

One pass over a DFlash block gives a state h_k and logits U_k for each candidate k. Candidates are then drawn from left
to right, or along each path of a tree, with e = W1[x_{k-1}], where x_{-1} is the last token of the sequence. The
confidence c_k, an estimate of acceptance, is known before the draw:

    q_k = softmax(U_k + bias(e, h_k)),    c_k = sigmoid(w [h_k; e] + b)"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hf_specdecpp.draft_kinds.dflash.config_dflash import DFlashSettings


class MarkovHead(nn.Module):
    """The bias of a candidate's logits, computed from e = W1[token before], of size r, and the row's final state h:

        vanilla: bias = W2 e
        gated:   bias = W2 (sigmoid(G [h; e]) * e)
        rnn:     (z, c, o) = J [s; e; h],   s' = sigmoid(z) s + (1 - sigmoid(z)) tanh(c),   bias = W2 tanh(o)

    s (`memory`) is 0 for the first candidate of a path, then the s' of the candidate before."""

    def __init__(self, settings: DFlashSettings, hidden_size: int, vocab_size: int) -> None:
        super().__init__()
        self.kind, rank = settings.markov_head, settings.markov_rank
        self.memory_size = rank if self.kind == "rnn" else 0
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, settings.draft_vocab_size or vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return e = W1[tokens] `[..., r]`, given the target's token ids; ids that W1 lacks count as id 0."""
        return self.markov_w1(tokens.where(tokens < self.markov_w1.num_embeddings, 0))

    def forward(self, e: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the float32 bias `[..., d]`, and s' `[..., memory_size]`, given e, h (`hidden`) and s (`memory`)."""
        if self.kind == "gated":
            e = self.gate_proj(torch.cat((hidden, e), dim=-1)).sigmoid() * e
        if self.kind == "rnn":
            gate, new, out = self.joint_proj(torch.cat((memory, e, hidden), dim=-1)).chunk(3, dim=-1)
            gate = gate.sigmoid()
            memory, e = gate * memory + (1.0 - gate) * new.tanh(), out.tanh()
        return self.markov_w2(e).float(), memory
