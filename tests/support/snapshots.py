"""Everything about a target that must stay as it is."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from hf_specdecpp import SpeculationConfig
from hf_specdecpp.models.causal_lm import CausalLM
from support.models import prompt

PROMPT = prompt(12)
FIXED = SpeculationConfig("fixed", num_tokens=4)


def generate(target: Any, **arguments: Any) -> Any:
    return target.generate(input_ids=PROMPT, **{"do_sample": False, "max_new_tokens": 24, **arguments})


def hash_of(model: CausalLM) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hooks_of(target: CausalLM) -> int:
    """Forward hooks, but for those that transformers leaves in a model whose hidden states were asked for."""
    hooks = [
        hook for m in target.modules() for each in (m._forward_hooks, m._forward_pre_hooks) for hook in each.values()
    ]
    return sum(hook.__module__ != "transformers.utils.output_capturing" for hook in hooks)


def snapshot(target: CausalLM) -> dict[str, Any]:
    """All that a user could notice about a target."""
    with torch.no_grad():
        logits = target(PROMPT).logits
    return {
        "logits": logits.numpy().tobytes(),
        "weights": hash_of(target),
        "class": type(target),
        "attributes": sorted(vars(target).keys() - {"_output_capturing_hooks_installed"}),  # transformers' own
        "config": target.config.to_dict(),
        "generation_config": target.generation_config.to_dict(),
        "flags": [(name, p.requires_grad, p.data_ptr()) for name, p in target.named_parameters()],
        "training": [module.training for module in target.modules()],
        "hooks": hooks_of(target),
    }
