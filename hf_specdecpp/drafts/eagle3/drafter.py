"""An EAGLE-3 draft as one generation sees it: `Eagle3Drafter`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache

from hf_specdecpp.drafting.draft import Beside
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.drafts.eagle3.model import Eagle3Model
from hf_specdecpp.models.causal_lm import CausalLM


class Eagle3Drafter(Drafter):
    """Drafts with an `Eagle3Model` that has met its target.

    Args:
        model: on the target's device, in its dtype.
        target: whose embeddings it may share.
    """

    def __init__(self, model: Eagle3Model, target: CausalLM) -> None:
        super().__init__(model, model.token_ids, shares_target=True, fusion=model.reader)
        self.beside = Beside(target)

    @property
    def num_ids(self) -> int:
        return int(self.model.config.vocab_size)

    def _head_of_draft_vocab(self) -> nn.Module | None:
        return None if self.draft_vocab is None else self._head()

    def _decode(self, cache: Cache | None, **inputs: Any) -> Tensor:
        """The states that a further step goes on from."""
        states = super()._decode(cache, **inputs)
        return self.model.norm(states) if self.model.settings.norm_output else states

    def before_head(self, hidden: Tensor) -> Tensor:
        return hidden if self.model.settings.norm_output else self.model.norm(hidden)

    def _check_logits(self) -> None:
        """How states become logits is known: the model is ours."""

    def check_tree(self) -> None:
        """It reads trees: it is a Llama, with attention that takes any mask."""

    def check_unmoved(self, has_adapter: bool) -> None:  # noqa: ARG002
        self.beside.check()
