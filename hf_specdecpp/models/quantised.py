"""What quantised layers need of us. torchao and bitsandbytes are not imported: what their layers hold tells them apart.

Weights that are quantised and multiplied by activations as they are give every token its own product, as ordinary
layers do, so such a target is assisted like any other. Three things are their own: what bitsandbytes keeps beside its
weights, LM heads whose rows cannot be taken, and activations that are quantised, too, with one scale for a whole pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

ORDINARY = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AT_ONCE = 64  # unit vectors, so that their logits take little memory


def is_quantised(layer: Any) -> bool:
    """Whether the weight of a layer is more than numbers of floating point."""
    return type(layer.weight) is not nn.Parameter or layer.weight.dtype not in ORDINARY


def states_of(module: nn.Module) -> Iterator[object]:
    """What bitsandbytes keeps beside the weights below a module: scales, and in 8 bits the numbers, too.

    The first pass of a layer takes these out of the weight (8 bits), or brings weight and scales into another order
    (4 bits, on some CPUs). So a copy of the layer that shares the weight has to share them: a layer that finds nothing
    any more in the weight quantises its integers as if they were numbers.
    """
    for layer in module.modules():
        if _is_of(layer, "bitsandbytes"):
            yield from (vars(layer)[name] for name in ("state", "quant_state") if vars(layer).get(name) is not None)


@torch.no_grad()
def rows_of(head: Any, token_ids: Tensor) -> Tensor:
    """The rows `[n, hidden_size]` of a quantised LM head for n tokens, as ordinary numbers and without its bias.

    They are the logits of unit vectors: packed integers cannot be indexed, and each library unpacks its own.
    """
    bias = getattr(head, "bias", None)
    dtype = torch.float32 if bias is None else bias.dtype
    weight = head.weight
    if isinstance(weight, Tensor) and weight.dtype in ORDINARY:  # torchao's are of the dtype that they stand for
        dtype = weight.dtype
    device = token_ids.device
    units = torch.eye(sizes_of(head)[0], dtype=dtype, device=device).split(AT_ONCE)
    columns = torch.cat([head(some)[:, token_ids] for some in units])
    return (columns if bias is None else columns - bias[token_ids]).T.contiguous()


def sizes_of(head: Any) -> tuple[int, int]:
    """Inputs and outputs of an LM head: the shape of a packed weight (4 bits) says neither."""
    if isinstance(getattr(head, "in_features", None), int):
        return head.in_features, head.out_features
    return head.weight.shape[1], head.weight.shape[0]


def shares_scales(model: nn.Module) -> str | None:
    """Why a token's logits depend on the other tokens of a pass, where activations are quantised together."""
    for layer in model.modules():
        if _is_of(layer, "bitsandbytes") and (threshold := getattr(vars(layer).get("state"), "threshold", 0)) > 0:
            return (
                f"quantizes activations over a whole pass (bitsandbytes int8 with llm_int8_threshold={threshold}), "
                "where an outlier of one candidate changes how the other tokens are rounded. Load it with "
                "llm_int8_threshold=0.0, which rounds each token by itself, or in 4 bits"
            )
        if _is_of(layer, "torch.ao.nn.quantized.dynamic"):
            return (
                f"quantizes activations over a whole pass ({type(layer).__name__} of torch.ao), so candidates change "
                "the scale of all tokens. Quantize weights only, or token by token (torchao)"
            )
        if _has_one_scale(layer._parameters.get("weight")):
            return (
                "quantizes activations over a whole pass (torchao with PerTensor), so candidates change the scale of "
                "all tokens. Quantize them with PerRow, or weights only"
            )
    return None


def _has_one_scale(weight: Any) -> bool:
    """Whether it is a weight of torchao that is multiplied by activations with a scale found anew for each pass."""
    granularity = getattr(getattr(weight, "act_quant_kwargs", None), "granularity", None)
    return type(granularity).__name__ == "PerTensor" and getattr(weight, "act_quant_scale", None) is None


def _is_of(layer: nn.Module, library: str) -> bool:
    return type(layer).__module__.startswith(library)
