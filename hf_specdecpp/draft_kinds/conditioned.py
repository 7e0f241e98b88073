"""Drafts made of the target's layers that read its hidden states (`Conditioned`), and their input (`Fusion`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.config.assistant_config import SpecDecPPConfig
from hf_specdecpp.draft_kinds.checkpoints import read_module
from hf_specdecpp.draft_kinds.plain import EarlyExit
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.quantised import sizes_of
from hf_specdecpp.models.target_states import FINAL, StateReader

FUSION = "fusion.safetensors"
# Why a draft that reads the target's states cannot have a head with `inputs="after"`.
NO_LATE_VERDICTS = (
    "reads a text that mixes the draft's tokens in, where a draft that reads the target's states finds none"
)


class Fusion(StateReader):
    """Computes the input x of a conditioned draft for a token from its embedding and the state at the token before.

        x = F [s; e],   s = h + R [h_1; ...; h_n]

    e is the token's input embedding. For verified tokens, h is the target's final hidden state (after its final norm)
    at the token before, and h_1, ..., h_n are the outputs of its layers `reads` at that token. Before a candidate that
    follows another candidate the target has no state yet: s is the draft's own final state at the token before.

    Example: candidates d and e are drafted after the sequence "a b c". The draft reads b with the target's state at a,
    and c with the target's state at b, and proposes d. It reads d with its own state at c, and proposes e. After d is
    accepted, the draft reads d again, with the target's state at c.

    Args:
        hidden_size: H, the hidden size of target and draft.
        embedding_size: E, the size of e and x.
        reads: indices of the target's layers whose outputs are read in addition to its final state.
        rank: rank of F and R, each factored into two smaller matrices; `None` for full matrices."""

    def __init__(
        self, hidden_size: int, embedding_size: int, reads: list[int] | None = None, rank: int | None = None
    ) -> None:
        super().__init__()
        reads = reads or []
        if min(hidden_size, embedding_size, rank or 1) < 1 or any(read < 0 for read in reads):
            raise ValueError(
                f"A fusion with hidden_size={hidden_size}, embedding_size={embedding_size}, reads={reads} and "
                f"rank={rank} makes no sense: sizes are at least 1, layers are counted from 0."
            )
        self.hidden_size, self.embedding_size, self.rank = hidden_size, embedding_size, rank
        self.reads = [FINAL, *reads]
        self.fuse = _linear(hidden_size + embedding_size, embedding_size, rank)
        self.read = _linear(len(reads) * hidden_size, hidden_size, rank) if reads else None
        self.reset()

    def to_config(self) -> dict[str, Any]:
        """Return the arguments of `__init__`, for `config.json`."""
        sizes = {name: getattr(self, name) for name in ("hidden_size", "embedding_size", "rank")}
        return {**sizes, "reads": self.reads[1:]}

    @classmethod
    def untrained(cls, target: CausalLM, reads: Sequence[int], rank: int | None = None) -> Fusion:
        """Make a fusion for training, with the target's hidden and embedding size; other arguments as of the class."""
        hidden_size, _ = sizes_of(target.get_output_embeddings())
        return cls(hidden_size, target.get_input_embeddings().weight.shape[1], list(reads), rank)

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise: R = 0, and if F is a full matrix, F so that x = e. A factored F is not changed: it is random."""
        if isinstance(self.fuse, nn.Linear):
            self.fuse.weight.zero_()
            self.fuse.weight[:, self.hidden_size :].fill_diagonal_(1.0)
        if self.read is not None:
            _last(self.read).weight.zero_()

    def forward(self, states: Tensor, embeddings: Tensor) -> Tensor:
        """Return x `[..., E]`, given the target's states `[..., width]` or the draft's own `[..., H]` at the tokens
        before, and the embeddings e `[..., E]`."""
        if self.read is not None and states.shape[-1] == self.width:
            final, read = states.split((self.hidden_size, self.width - self.hidden_size), dim=-1)
            states = final + self.read(read)
        return self.fuse(torch.cat((states, embeddings), dim=-1))


def _linear(inputs: int, outputs: int, rank: int | None) -> nn.Module:
    if rank is None:
        return nn.Linear(inputs, outputs, bias=False)
    return nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))


def _last(layer: nn.Module) -> Any:
    return layer[-1] if isinstance(layer, nn.Sequential) else layer


OTHERS = "It does not belong to the fusion that config.json describes: download or save both again."


class Conditioned(EarlyExit):
    """Draft with some of the target's layers, usually one, which read the target's hidden states through a `Fusion`."""

    name = "conditioned"
    own_file, own_field = FUSION, "fusion"
    unserved = (
        "This assistant drafts with {draft}: a layer of the target whose input is made of the target's states, in a "
        "form that no other engine has, so nothing is exported. Engines serve drafts that read states in the form of "
        "EAGLE-3. Train one and export it: `specdecpp train --draft eagle3 --target {target} --data FILE --output "
        "NEW`, then `specdecpp export NEW --output {output}`."
    )
    first_layers = None
    cannot = {
        "stay untrained": "a conditioned draft has to be trained, so leave it on",
        "late verdicts": NO_LATE_VERDICTS,
    }

    def describe(self, config: SpecDecPPConfig, target: str = "the target") -> str:
        """Example: "layer 2 of the target, which reads its states"."""
        several = len(config.draft_layers or []) != 1
        return f"{super().describe(config, target)}, which read{'' if several else 's'} its states"

    def read_own(self, arguments: dict[str, Any], path: Path) -> Fusion:
        return read_module(Fusion, "fusion", arguments, path, OTHERS)
