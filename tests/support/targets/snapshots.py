"""Everything about a target that must stay as it is."""

import hashlib
from inspect import unwrap
from typing import Any

import torch

from hf_specdecpp.config.speculation import SpeculationConfig
from hf_specdecpp.generation.doors.attached import Method
from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import prompt

PROMPT, FIXED = prompt(12), SpeculationConfig("fixed", num_tokens=4)


def generate(target: Any, **arguments: Any) -> Any:
    return target.generate(input_ids=PROMPT, **{"do_sample": False, "max_new_tokens": 24, **arguments})


def hash_of(model: CausalLM) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode() + tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def hooks_of(target: CausalLM) -> int:
    """Forward hooks."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())


def of_own_class(target: CausalLM) -> CausalLM:
    """The target, of a class that no other test's models are of, with a method of its own for us to put ours over."""
    kind = type(target)
    own = {"__module__": kind.__module__, "_validate_generation_mode": unwrap(kind._validate_generation_mode)}
    target.__class__ = type(kind.__name__, (kind,), own)
    return target


def has_our_methods(target: CausalLM) -> bool:
    """Whether the target's class (`of_own_class`) asks for assistants."""
    return any(isinstance(each, Method) for each in vars(type(target)).values())


def snapshot(target: CausalLM) -> dict[str, Any]:
    """All that a user could notice about a target."""
    with torch.no_grad():
        logits = target(PROMPT).logits
    return {
        "logits": logits.numpy().tobytes(),
        "weights": hash_of(target),
        "class": type(target),
        "attributes": [sorted(vars(module)) for module in target.modules()],
        "config": target.config.to_dict(),
        "generation_config": target.generation_config.to_dict(),
        "flags": [(name, p.requires_grad, p.data_ptr()) for name, p in target.named_parameters()],
        "training": [module.training for module in target.modules()],
        "hooks": hooks_of(target),
    }
