"""The draft as it is taught with a LoRA adapter (`Student`). Apart, because PEFT takes a second to import."""

from __future__ import annotations

import copy
from typing import Any

from peft import LoraConfig, PeftModel
from torch import Tensor, nn

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.learning.taught import DISTANCES, Taught
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.target_states import StateReader


def with_own_parameters(model: CausalLM) -> CausalLM:
    """The model's structure with new, frozen `Parameter` objects over the same memory.

    So an early exit can be trained although it shares its tensors with the target: whatever freezes, wraps or gathers
    gradients of the copy's parameters does not reach the target's.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach(), requires_grad=False) for p in model.parameters()}
    memo |= {id(buffer): buffer for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


class Student(Taught, PeftModel):
    """The draft with a LoRA adapter. A PEFT model, so that checkpoints hold the adapter and nothing else.

    Args:
        draft: its weights stay as they are.
        lora: the adapter. For a conditioned draft its `modules_to_save` names `"fusion"`, which is trained, too.
        draft_vocab: token ids that the draft may propose, or `None` for all.
        fusion: of a conditioned draft.
        unroll: steps of a round that a conditioned draft is taught.
        loss: one of `DISTANCES`.
    """

    def __init__(
        self,
        draft: CausalLM,
        lora: LoraConfig,
        draft_vocab: Tensor | None,
        fusion: StateReader | None = None,
        unroll: int = 1,
        loss: str = "kl",
    ) -> None:
        own = with_own_parameters(draft)
        if fusion is not None:
            own.fusion = fusion
        PeftModel.__init__(self, own, lora)
        base: Any = self.get_base_model()
        drafter = Drafter(base, draft_vocab, shares_target=True, fusion=fusion)
        if fusion is not None:
            drafter.fusion = base.fusion.modules_to_save["default"]
        object.__setattr__(self, "drafter", drafter)
        self.unroll = unroll
        self.distance = DISTANCES[loss]
