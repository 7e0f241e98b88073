"""Tiny quantised models. torchao and bitsandbytes are optional: what needs one that is missing is skipped."""

import warnings
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hf_specdecpp.models.causal_lm import CausalLM
from support.targets.models import quiet_later_layers, tiny

# bitsandbytes packs 64 numbers at a time, and 32 rows.
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 64}


def ordinary(dtype: torch.dtype = torch.float32, **overrides: Any) -> CausalLM:
    """What the others are before they are quantised."""
    return quiet_later_layers(tiny("llama", **{**SHAPE, **overrides})).to(dtype)


def with_torchao(
    config: str = "Int8WeightOnlyConfig", dtype: torch.dtype = torch.float32, kinds: Any = nn.Linear, **arguments: Any
) -> CausalLM:
    """All layers of these kinds quantised in place, the LM head too."""
    return quantised_in_place(ordinary(dtype), config, kinds, **arguments)


def quantised_in_place(
    model: CausalLM, config: str = "Int8WeightOnlyConfig", kinds: Any = nn.Linear, **arguments: Any
) -> CausalLM:
    """A model whose layers of these kinds torchao has quantised."""
    torchao = optional("torchao.quantization")
    quantize = getattr(torchao, config)(**arguments)
    torchao.quantize_(model, quantize, filter_fn=lambda layer, _: isinstance(layer, kinds))
    return model


def with_bitsandbytes(bits: int, dtype: torch.dtype = torch.float32, **arguments: Any) -> CausalLM:
    """Loaded by transformers, which leaves the LM head as it is unless `llm_int8_skip_modules` is given."""
    optional("bitsandbytes")
    quantize = BitsAndBytesConfig(**{f"load_in_{bits}bit": True}, **arguments)
    with TemporaryDirectory() as folder:
        ordinary().save_pretrained(folder)
        model: CausalLM = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=quantize)
    return model.eval()


def with_torch_ao() -> CausalLM:
    """PyTorch's own dynamic quantisation, which finds one scale for all activations of a pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torchao is to follow it
        return torch.ao.quantization.quantize_dynamic(ordinary(), {nn.Linear})


def optional(library: str) -> Any:
    return pytest.importorskip(library, exc_type=ImportError)
