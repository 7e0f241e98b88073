"""Drafts that learn by a LoRA adapter beside what they are (`Adapted`): models of their own, layers of the target."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.kinds.kind import Kind, Made, Parts
from hf_specdecpp.learning.taught import LOSS, UNROLL
from hf_specdecpp.models.adapters import Adapter, Lora, LoraLinear, add_adapter, joined, read_adapter
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.quantised import is_quantised

RANK = 8  # of the adapter that learns; one of 32 learned no more and forgot more
ALPHA = 16


class Adapted(Kind):
    """A kind whose draft is a model of transformers, or layers of one."""

    def student(self, drafter: Drafter) -> Any:
        from peft import LoraConfig  # takes a second, which only those wait for who learn

        from hf_specdecpp.learning.student import Student

        _check_can_learn(drafter.model)
        fusion = copy.deepcopy(drafter.fusion)
        if fusion is not None:
            fusion.to(torch.promote_types(drafter.dtype, torch.float32)).requires_grad_(True)
        kept = [r"fusion\..*"] if fusion is not None else []
        kept += [r".*\.lora_[AB]"] if any(isinstance(each, LoraLinear) for each in drafter.model.modules()) else []
        lora = LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules="all-linear",
            exclude_modules="|".join(kept) or None,
            modules_to_save=None if fusion is None else ["fusion"],
        )
        return Student(drafter.model, lora, drafter.draft_vocab, fusion, UNROLL, LOSS)

    def taught(self, before: Made, student: Any) -> Made:
        parts, drafter = before.parts, before.drafter
        loras = {
            name: _lora_of(module) for name, module in student.get_base_model().named_modules() if _is_taught(module)
        }
        fusion = copy.deepcopy(student.fusion)
        if fusion is not None:
            fusion.to(drafter.dtype).requires_grad_(False)
        model = add_adapter(drafter.model, Adapter({}, loras, {}), parts.merge)
        made = Drafter(model, drafter.draft_vocab, drafter.shares_target, fusion)
        # An adapter that was not merged has the module as its `base_layer`.
        named = {name.removesuffix(".base_layer"): lora for name, lora in loras.items()}
        adapter = joined(_in_memory(parts), Adapter({}, named, {}))
        return Made(before.config, replace(parts, adapter=adapter, module=fusion), made)


def _is_taught(module: Any) -> bool:
    """Whether PEFT's adapter is beside a module; one that was there before has no `scaling`."""
    return hasattr(module, "lora_A") and hasattr(module, "scaling")


def _lora_of(module: Any) -> Lora:
    a, b = (half["default"].weight.detach().clone() for half in (module.lora_A, module.lora_B))
    return Lora(a, b, module.scaling["default"])


def _in_memory(parts: Parts) -> Adapter:
    if parts.adapter is None:
        return Adapter({}, {}, {})
    return parts.adapter if isinstance(parts.adapter, Adapter) else read_adapter(parts.adapter)


def _check_can_learn(model: CausalLM) -> None:
    """Raise `ValueError` where an adapter beside the model could not be trained or not be stored."""
    name = type(model).__name__
    if hasattr(model, "peft_config"):
        raise ValueError(
            f"The draft {name} carries a PEFT adapter in memory, beside which no other is trained. Merge it first: "
            "draft.merge_and_unload()."
        )
    if any(is_quantised(module) for module in model.modules() if isinstance(getattr(module, "weight", None), Tensor)):
        raise ValueError(
            f"The draft {name} has quantised layers, through which nothing is learned here. Load it, or the target "
            "that it is made of, in bfloat16."
        )
