"""The model of captured passes: a copy of a model's modules that shares its tensors but not its attention function."""

from __future__ import annotations

import inspect
from functools import cache
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdecpp.cuda_graphs.graphs import is_capturing
from hf_specdecpp.cuda_graphs.identity import tensors_of
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.faster_products import UNUSUAL
from hf_specdecpp.models.early_exit import copy_sharing

GROUPED = "specdecpp_grouped"
PIECES = ("RMSNorm", "MLP")  # ends of class names of modules that are compiled
ROTARY = "apply_rotary_pos_emb"  # its name in transformers' modules


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Attention for grouped queries, as `faster_products.grouped_attention`, without copies of keys and values.

    The query heads of a group become further queries of a head. On CUDA, PyTorch's `enable_gqa` has no fast kernel for
    passes with a mask, and transformers copies all rows of a fixed cache in each layer.

    Example: 12 query heads share 2 heads of keys and values. Four tokens are read as 24 queries of each of these heads.
    The mask is boolean `[batch, 1, tokens, cached tokens]`, or from `for_groups`.
    """
    if any(kwargs.get(name) is not None for name in UNUSUAL):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, tokens, _ = query.shape
    shared = key.shape[1]
    group = heads // shared
    mask = attention_mask
    if mask.shape[2] != group * tokens:
        mask = mask.repeat(1, 1, group, 1)
    output = F.scaled_dot_product_attention(
        query.reshape(batch, shared, group * tokens, -1), key, value, attn_mask=mask, scale=scaling
    )
    return output.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


def for_groups(mask: Any, model: CausalLM) -> Any:
    """The additive mask `[batch, 1, group * tokens, cached tokens]` of `grouped_attention`, made once for all layers of
    a pass from a boolean one `[batch, 1, tokens, cached tokens]`, or a dictionary with one for each kind of layer."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != GROUPED:
        return mask
    if isinstance(mask, dict):
        return {kind: for_groups(each, model) for kind, each in mask.items()}
    group = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    added = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
    return added.repeat(1, 1, group, 1)


AttentionInterface.register(GROUPED, grouped_attention)


def for_capture(model: Any, *others: Any, fuse: bool = False) -> Any:
    """A copy of a model's modules for captured passes, which shares all tensors with the model.

    The original is not changed, so that other threads may use it.

    Args:
        others: modules that the model refers to without having registered them, as in `copy_sharing`.
        fuse: compile norms, MLPs and rotary embedding in captures, each once for all layers: they launch half of a
            pass's kernels. Takes some seconds for each new width.
    """
    copied = copy_sharing(model, *others, tensors=tensors_of(model, *others)).eval()
    parts = [copied, *(copied.model for _ in others)]
    for module in (each for part in parts for each in part.modules()):
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation == "sdpa":
            config._attn_implementation = GROUPED
        if fuse:
            _fuse(module)
    return copied


def _fuse(module: nn.Module) -> None:
    """Let a module of a copy run compiled pieces, in captures only: other passes have any number of tokens."""
    forward = type(module).forward
    if "forward" in vars(module):  # replaced by other code
        return
    if type(module).__name__.endswith(PIECES):
        module.forward = MethodType(_compiling(forward, 1), module)
        return
    code: Any = inspect.unwrap(forward)  # without the decorators of transformers
    if isinstance(code, FunctionType) and ROTARY in code.__code__.co_names:
        rotary = code.__globals__.get(ROTARY)
        if not isinstance(rotary, FunctionType):  # a kernel of the Hub
            return
        known = {**code.__globals__, ROTARY: _compiling(rotary, 0)}
        own = FunctionType(code.__code__, known, code.__name__, code.__defaults__)
        own.__kwdefaults__ = code.__kwdefaults__
        module.forward = MethodType(own, module)


def _compiling(function: Any, place: int) -> Any:
    """A function that in captures runs compiled, for the shape of argument `place` without its first axis."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return (_compiled(function, args[place].shape[1:]) if is_capturing() else function)(*args, **kwargs)

    return run


@cache
def _compiled(function: Any, shape: torch.Size) -> Any:
    """A function compiled for one shape of its argument, as a copy with its own code object: torch.compile stops after
    eight compilations of one code object, which other shapes and models may have used up."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{'_'.join(map(str, shape))}")
    own = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    return torch.compile(own, dynamic=False)
