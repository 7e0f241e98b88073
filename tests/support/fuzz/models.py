"""Tiny targets of many families, and every kind of draft for them."""

from functools import cache
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_specdecpp import AcceptanceHead, SpecDecPPAssistant
from hf_specdecpp.models.causal_lm import CausalLM
from support.fuzz.cases import Case
from support.targets.models import (
    VOCAB_SIZE,
    configured,
    partly_agreeing,
    quiet_later_layers,
    random_fusion,
    random_layer,
)
from support.targets.zoo import tiny_of

RULES: dict[str, dict[str, Any]] = {
    "fixed": {"rule": "fixed", "num_tokens": 4},
    "fixed one": {"rule": "fixed", "num_tokens": 1},
    "threshold": {"rule": "threshold", "threshold": 0.8, "max_tokens": 7},
    "throughput cheap": {"rule": "throughput", "costs": {"draft": 0.05, "verify": [1.0, 1.05, 1.1]}},
    "throughput dear": {"rule": "throughput", "costs": {"draft": 0.6, "verify": [1.0, 1.2]}},
}
TREES: dict[str, dict[str, Any]] = {
    "none": {},
    "dyspec": {"tree": "dyspec", "tree_budget": 8, "tree_depth": 4},
    "dyspec wide": {"tree": "dyspec", "tree_budget": 24, "tree_depth": 3},
    "dyspec sparse": {"tree": "dyspec", "tree_budget": 12, "tree_depth": 6, "tree_threshold": 0.1},
    "dyspec-exact": {"tree": "dyspec-exact", "tree_budget": 6, "tree_depth": 4},
    "static": {"tree": [3, 2, 1]},
    "static ragged": {"tree": [[0], [1], [2], [0, 0], [1, 0], [1, 1], [0, 0, 0]]},
    "static chain": {"tree": [1, 1, 1, 1]},
}
DRAFT_VOCABS: dict[str, Any] = {
    "all": None,
    "most": [
        i for i in range(VOCAB_SIZE - 8) if i % 4 != 3
    ],  # what "grammar" in `arguments.py` allows is outside of it
    "few": [5, 9, 30],  # "fewer ids" leaves out the ids from 40 on
}
LORA_MODULES = {"q_proj", "v_proj", "qkv_proj", "c_attn", "o_proj"}


@cache
def target_of(family: str, attention: str, dtype: str) -> CausalLM:
    """A random target whose first layers already say much of what it says, so that early exits guess some tokens."""
    implementation = None if attention == "sdpa" else attention  # None: sdpa where the family has it
    target = quiet_later_layers(tiny_of(family, implementation, bos_token_id=None, eos_token_id=None))
    target.generation_config.eos_token_id = None
    return target.to(getattr(torch, dtype))


@cache
def draft_of(family: str, attention: str, dtype: str, kind: str) -> CausalLM:
    if kind == "close":
        return partly_agreeing(target_of(family, attention, dtype), mix=0.98)
    vocab_size = {"other": VOCAB_SIZE, "more ids": VOCAB_SIZE + 16, "fewer ids": VOCAB_SIZE - 8}[kind]
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        bos_token_id=None, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()


def head_of(kind: str, model: CausalLM) -> AcceptanceHead | None:
    if kind == "none":
        return None
    with torch.random.fork_rng():
        torch.manual_seed(3)
        hidden_size = model.get_output_embeddings().weight.shape[1]
        embedding_size = model.get_input_embeddings().weight.shape[1]
        more = {"embedding_size": embedding_size} if kind == "before" else {}
        return AcceptanceHead(hidden_size, inputs=kind, num_blocks=1, **more).to(model.dtype)


def assistant_for(case: Case, target: CausalLM) -> SpecDecPPAssistant:
    """The case's assistant, attached to `target`, or a draft of its own that the first call attaches.

    Raises:
        ValueError: this target or draft is refused."""
    common: dict[str, Any] = {"draft_vocab": DRAFT_VOCABS[case.draft_vocab]}
    if case.draft.startswith("exit"):
        layers: Any = [0, 2] if case.draft == "exit some" else 2
        assistant = SpecDecPPAssistant.from_early_exit(target, layers, head=head_of(case.head, target), **common)
    elif case.draft == "conditioned":
        head = head_of(case.head, target)
        assistant = SpecDecPPAssistant.from_conditioned(target, 2, fusion=random_fusion(target), head=head, **common)
    elif case.draft == "eagle3":
        vocab = DRAFT_VOCABS[case.draft_vocab]
        layer = random_layer(target, vocab=None if vocab is None else torch.tensor(vocab))
        assistant = SpecDecPPAssistant.from_draft(layer, target, head=head_of(case.head, target))
    else:
        draft = draft_of(case.family, case.attention, case.dtype, case.draft)
        attached = target if case.door == "attached" else None
        assistant = SpecDecPPAssistant.from_draft(draft, attached, head=head_of(case.head, draft), **common)
    return configured(assistant, **RULES[case.rule], **TREES[case.tree])
