"""The DSpark draft (DeepSpec, 2026): a DFlash block (`modeling_dflash`), a low-rank bias of the logits that depends on
the token before (`MarkovHead`), and an estimate of acceptance that is known before the draw (the confidence head).

One pass over the block gives a state h_k and logits U_k for each candidate k. Candidates are then drawn from left to
right, or along each path of a tree, with e = W1[x_{k-1}], where x_{-1} is the last token of the sequence:

    q_k = softmax(U_k + bias(e, h_k)),    c_k = sigmoid(w [h_k; e] + b)"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.draft_kinds.dflash.modeling_dflash import BlockLayer, DFlashDraft, DFlashModel
from hf_specdecpp.draft_kinds.dspark.config_dspark import DSparkSettings
from hf_specdecpp.draft_kinds.dspark.gemma4_layers import Gemma4Layer
from hf_specdecpp.models.causal_lm import CausalLM


class MarkovHead(nn.Module):
    """The bias of a candidate's logits, computed from e = W1[token before], of size r, and the row's final state h:

        vanilla: bias = W2 e
        gated:   bias = W2 (sigmoid(G [h; e]) * e)
        rnn:     (z, c, o) = J [s; e; h],   s' = sigmoid(z) s + (1 - sigmoid(z)) tanh(c),   bias = W2 tanh(o)

    s (`memory`) is 0 for the first candidate of a path, then the s' of the candidate before."""

    def __init__(self, settings: DSparkSettings, hidden_size: int, vocab_size: int) -> None:
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


class DSparkModel(DFlashModel):
    """The weights of a DSpark draft. `markov_head` and `confidence_head` are `None` in a draft without them."""

    settings: DSparkSettings

    def __init__(self, settings: DSparkSettings) -> None:
        super().__init__(settings)
        size, vocab_size = self.config.hidden_size, self.config.vocab_size
        self.markov_head = MarkovHead(settings, size, vocab_size) if settings.markov_rank else None
        # A linear layer on a row's state, and maybe on the embedding of the token before, for `DSpark.head_of`.
        width = size + settings.markov_rank * settings.confidence_with_markov
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)}) if settings.confidence_head else None

    @property
    def layer_class(self) -> Any:
        return Gemma4Layer if self.settings.gemma4_layers else BlockLayer


class DSparkDraft(DFlashDraft):
    """The `Draft` of a `DSparkModel`: a `DFlashDraft` in which a candidate's logits also depend on the candidates
    before. Without a Markov head it drafts as a `DFlashDraft` does."""

    def __init__(self, model: DSparkModel, target: CausalLM) -> None:
        super().__init__(model, target)
        self.memory_size = 0 if model.markov_head is None else model.markov_head.memory_size
        self.hidden_size += model.settings.markov_rank

    def logits(self, hidden: Tensor, vocab_size: int) -> Tensor:
        if (markov := self.model.markov_head) is None:
            return super().logits(hidden, vocab_size)
        rank = self.model.settings.markov_rank
        own, e, memory = hidden.split((self.hidden_size - rank, rank, self.memory_size), dim=-1)
        return self.of_target(self.head_logits(own) + markov(e, own, memory)[0], vocab_size)

    def after(self, previous: Tensor, logits: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in `DFlashDraft`; adds the Markov head's bias to the logits. The state of candidate k is [h_k; e; s]."""
        if (markov := self.model.markov_head) is None:
            return logits, hidden, memory
        e = markov.embed(previous)
        bias, later = markov(e, hidden, memory)
        return logits + bias, torch.cat((hidden, e, memory), dim=-1), later
