"""Quantised layers, recognised by class names and attributes, so that torchao and bitsandbytes need no import.

Targets with quantised weights need special treatment in three cases: the quantisation states of bitsandbytes, LM heads
whose rows cannot be indexed, and quantised activations."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hf_specdecpp.models.causal_lm import modules_of

ORDINARY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 64  # unit vectors in a pass, so that their logits take little memory
ACTIVATION_SETTINGS = ("act_quant_kwargs", "activation_quantization", "input_quant_func")  # of torchao's weights


def is_quantised(layer: Any) -> bool:
    """Whether the weight of a layer is anything other than an ordinary parameter of floating point numbers."""
    return type(layer.weight) is not nn.Parameter or layer.weight.dtype not in ORDINARY


def states_of(module: nn.Module) -> Iterator[object]:
    """The objects with the quantisation states of a module's bitsandbytes layers: scales, in 8 bits also the integers.

    A layer's first forward pass moves the integers from the weight to the state (8 bits), or reorders weight and scales
    (4 bits, on some CPUs). So a copy of the layer that shares the weight must also share the state."""
    for layer in module.modules():
        if _is_of_bitsandbytes(layer):
            yield from (vars(layer)[name] for name in ("state", "quant_state") if vars(layer).get(name) is not None)


@torch.no_grad()
def rows_of(head: Any, token_ids: Tensor) -> Tensor:
    """The rows `[n, hidden_size]` of a quantised LM head's weight for `token_ids` `[n]`, as floating point numbers.

    They are computed as the head's logits for unit vectors, because packed integers cannot be indexed."""
    bias = getattr(head, "bias", None)
    dtype = torch.float32 if bias is None else bias.dtype
    weight = head.weight
    if isinstance(weight, Tensor) and weight.dtype in ORDINARY:  # torchao's weights have their original dtype
        dtype = weight.dtype
    device = token_ids.device
    units = torch.eye(sizes_of(head)[0], dtype=dtype, device=device).split(AT_ONCE)
    columns = torch.cat([head(some)[:, token_ids] for some in units])
    return (columns if bias is None else columns - bias[token_ids]).T.contiguous()


def sizes_of(head: Any) -> tuple[int, int]:
    """`(hidden_size, vocab_size)` of an LM head, also if its weight is packed (4 bits)."""
    if isinstance(getattr(head, "in_features", None), int):
        return head.in_features, head.out_features
    return head.weight.shape[1], head.weight.shape[0]


def quantised_activations(model: nn.Module) -> str | None:
    """Name, for messages, of layers of the model that quantise their inputs; `None` if there are none.

    Passes over one and over several tokens round the last digits differently. Quantisation sometimes turns this into a
    whole step, and later layers amplify the error, up to half the spread of the logits (docs/using.md)."""
    layers = modules_of(model)
    for kind in set(map(type, layers)):
        if kind.__module__.startswith("bitsandbytes") and kind.__name__ == "Linear8bitLt":
            return "bitsandbytes int8"
        if kind.__module__.startswith("torch.ao.nn.quantized.dynamic"):
            return f"dynamic {kind.__name__} of torch.ao"
    for layer in layers:  # no function calls for ordinary layers, since each `generate()` runs this
        weight = layer._parameters.get("weight")
        if type(weight) is nn.Parameter or weight is None:
            continue
        if any(getattr(weight, setting, None) is not None for setting in ACTIVATION_SETTINGS):
            return f"{type(weight).__name__} of torchao"
    return None


def multiplies_in_half(model: nn.Module) -> bool:
    """Whether the model has bitsandbytes layers that compute in half precision, whatever the model's dtype is."""
    layers = [layer for layer in model.modules() if _is_of_bitsandbytes(layer)]
    dtypes = {getattr(vars(layer).get("quant_state"), "dtype", None) for layer in layers}
    dtypes |= {getattr(layer, "compute_dtype", None) for layer in layers}
    return bool(dtypes & {torch.bfloat16, torch.float16})


def _is_of_bitsandbytes(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("bitsandbytes")
