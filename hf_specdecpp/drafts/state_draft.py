"""What drafts have in common that read a target's states and are no causal LM by themselves: `StateDraft`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hf_specdecpp.drafting.draft import Beside, Draft
from hf_specdecpp.drafting.drafter import NO_STATES
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader


class StateDraft(Draft):
    """A draft beside the target that it has met.

    Args:
        model: on the target's device, in its dtype.
        reader: of the target's states.
        target: which it drafts for.

    Attributes:
        lacks: what it cannot do beside drafting unattached (`Draft.cannot`).
    """

    model: Any
    draft_vocab = None  # all tokens
    lacks: Mapping[str, str] = {}

    def __init__(self, model: Any, reader: Any, target: CausalLM) -> None:
        self.model, self.reader, self.beside = model, reader, Beside(target)

    @property
    def cannot(self) -> Mapping[str, str]:
        return {"unattached": NO_STATES, **self.lacks}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def reads(self) -> StateReader:
        reader: StateReader = self.reader
        return reader

    @property
    def hidden_size(self) -> int:
        return self.reads.hidden_size

    @property
    def embedding_size(self) -> int:
        return self.reads.embedding_size

    def check_unmoved(self, has_adapter: bool) -> None:  # noqa: ARG002
        self.beside.check()
