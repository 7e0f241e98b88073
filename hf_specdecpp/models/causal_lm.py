"""What is common to all causal language models of transformers."""

from __future__ import annotations

from typing import Any, TypeAlias

from peft import PeftModel
from torch._dynamo import OptimizedModule
from transformers import GenerationConfig

# A `PreTrainedModel` with `GenerationMixin` and an LM head. The annotations of `PreTrainedModel` know neither its
# methods for generation nor that its attributes are what they are, so a checker is told nothing about it.
CausalLM: TypeAlias = Any

# Decoders whose positions come from a table cannot run past its end; rotary ones merely get worse.
LEARNED_POSITIONS = frozenset({"gpt2", "opt", "gpt_neo", "gpt_bigcode", "biogpt", "xglm", "openai-gpt"})


def base_model(model: CausalLM) -> CausalLM:
    """The transformers model inside the wrappers of PEFT and `torch.compile`; other models as they are."""
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    return model.get_base_model() if isinstance(model, PeftModel) else model


def eos_ids(generation_config: GenerationConfig) -> frozenset[int]:
    """All end-of-sequence ids of a generation."""
    prepared = getattr(generation_config, "_eos_token_tensor", None)
    if prepared is not None:
        return frozenset(prepared.flatten().tolist())
    value = generation_config.eos_token_id
    if value is None:
        return frozenset()
    return frozenset([value] if isinstance(value, int) else value)


def longest_text(*models: CausalLM) -> float:
    """The most tokens that all of the models can read; infinite where no positions come from a table."""
    configs = [model.config.get_text_config(decoder=True) for model in models]
    limits = [config.max_position_embeddings for config in configs if config.model_type in LEARNED_POSITIONS]
    return min(limits, default=float("inf"))
