"""Generations with trees."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import prompt, tiny

PROMPT = prompt(20)  # longer than every sliding window
ARGUMENTS: dict[str, Any] = {"max_new_tokens": 150, "no_repeat_ngram_size": 6, "do_sample": False}
TREES: dict[str, dict[str, Any]] = {
    "dyspec": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 5},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 8, "tree_depth": 4},
    "static": {"tree": [3, 2, 1]},
}


def sharp(model: CausalLM) -> CausalLM:
    """More certain of the same tokens, so that dynamic trees become deep."""
    with torch.no_grad():
        model.get_output_embeddings().weight *= 5.0
    return model


@lru_cache
def target_of(family: str) -> CausalLM:
    return sharp(tiny(family))


@lru_cache
def plain_text(family: str) -> Tensor:
    text = target_of(family).generate(PROMPT, **ARGUMENTS)
    assert text[0, 20:].unique().numel() > 8, "a constant text would prove nothing"
    return text


def generate(target: CausalLM, assistant: Any = None, **arguments: Any) -> Any:
    arguments = {"do_sample": False, "max_new_tokens": 40, **arguments}
    try:
        return target.generate(PROMPT, assistant_model=assistant, **arguments)
    finally:
        if assistant is not None:
            assistant.detach()
