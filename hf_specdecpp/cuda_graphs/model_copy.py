"""The model of captured passes: a copy of a model's modules that shares its tensors but not its attention function."""

from __future__ import annotations

import inspect
from functools import cache, partial
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hf_specdecpp.caches.masks import GROUPED, is_replaced
from hf_specdecpp.cuda_graphs.graphs import is_capturing
from hf_specdecpp.cuda_graphs.identity import tensors_of
from hf_specdecpp.models.cpu.grouped_attention import UNUSUAL
from hf_specdecpp.models.early_exit import copy_sharing
from hf_specdecpp.models.foreign import package_of

NORM, PIECE = "RMSNorm", "MLP"  # ends of class names of norms, and of modules that are compiled
ROTARY = "apply_rotary_pos_emb"  # name of the function of rotary embeddings in transformers' modules
LONG, ROWS, FEW = 4096, 512, 32  # attention is split from `LONG` rows of a cache on, into pieces; most tokens of a pass


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """The attention function `GROUPED` of captured passes, without copies of keys and values for heads that share them.

    The query heads of a group become further queries of one head. On CUDA, PyTorch's `enable_gqa` has no fast kernel
    for passes with a mask, and transformers copies all rows of a fixed cache in each layer.

    Example: 12 query heads share 2 heads of keys and values. Four tokens are read as 24 queries of each of these heads.

    Args:
        query, key, value, scaling: as of `models.cpu.grouped_attention`, which also describes the result.
        attention_mask: bool `[batch, 1, tokens, cached tokens]`, or from `caches.masks.as_mask`."""
    if any(kwargs.get(name) is not None for name in UNUSUAL):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    batch, heads, tokens, _ = query.shape
    shared = key.shape[1]
    group = heads // shared
    mask = attention_mask
    if mask.shape[2] != group * tokens:
        mask = mask.repeat(1, 1, group, 1)
    queries, rows = query.reshape(batch, shared, group * tokens, -1), key.shape[2]
    if rows >= LONG and rows % ROWS == 0 and tokens <= FEW:
        output = split_attention(queries, key, value, mask, scaling)
    else:
        output = F.scaled_dot_product_attention(queries, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(batch, heads, tokens, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(GROUPED, grouped_attention)


def split_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """`scaled_dot_product_attention` for few queries `[batch, heads, n, size]` and many keys and values `[batch, heads,
    rows, size]`, in pieces of 512 rows (`ROWS`). `mask`: bool or additive, `[batch, 1, n, rows]`.

    PyTorch's kernels for masks read all rows of a head in one block of threads, so that few of a GPU's processors read
    a long cache. Here each piece has a multiplication of its own. Softmax and the sum of pieces use float32 or more."""
    exact = torch.promote_types(torch.float32, query.dtype)
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-1, -2)
    scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=exact).to(query.dtype)
    pieces = weights.unflatten(-1, (-1, ROWS)).transpose(2, 3) @ value.unflatten(2, (-1, ROWS))
    return pieces.sum(2, dtype=exact).to(query.dtype)


def for_capture(model: Any, *others: Any, fuse: bool = False) -> Any:
    """A copy of a model's modules for captured passes, with `GROUPED` attention and faster norms, which shares all
    tensors with the model. The original is not changed, so that other threads may use it.

    Args:
        others: `model.model`, if the model refers to it without having registered it as a submodule.
        fuse: compile MLPs and rotary embeddings in captures, once for all layers, in some seconds per width of a pass.
    """
    copied = copy_sharing(model, *others, tensors=tensors_of(model, *others)).eval()
    parts = [copied, *(copied.model for _ in others)]
    for module in (each for part in parts for each in part.modules()):
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig) and is_replaced(config):
            config._attn_implementation = GROUPED
        if type(module).__name__.endswith(NORM):
            _use_fast_norm(module)
        if fuse:
            _fuse(module)
    return copied


def rms_norm(weight: Tensor, eps: float, hidden: Tensor) -> Tensor:
    """The forward of most of transformers' norms in one kernel instead of eight. In half precision the result is not
    rounded before it is multiplied by the weight."""
    if hidden.dtype == weight.dtype != torch.float64:  # for which transformers' norms compute in float32
        return F.rms_norm(hidden, weight.shape, weight, eps)
    return weight * F.rms_norm(hidden.float(), weight.shape, None, eps).to(hidden.dtype)


def rms_norm_around_one(weight: Tensor, eps: float, hidden: Tensor) -> Tensor:
    """The forward of Gemma's norms, which multiply by 1 + weight, in float32."""
    factor = 1.0 + weight.float()
    return F.rms_norm(hidden.float(), factor.shape, factor, eps).type_as(hidden)


@torch.no_grad()
def _use_fast_norm(module: Any) -> None:
    """Replace the forward of a norm, in place, by `rms_norm` or `rms_norm_around_one` if one computes the same values,
    which is tried with two tokens, of which the first has a mean square near epsilon."""
    own, weight, forward = vars(module), module._parameters.get("weight"), type(module).forward
    eps = own.get("variance_epsilon", own.get("eps"))
    is_known = package_of(forward) == "transformers" and "forward" not in own
    if not is_known or weight is None or weight.is_meta or eps is None:
        return
    token = torch.linspace(-1.0, 1.0, len(weight), device=weight.device)
    tokens = torch.stack((2.0 * eps**0.5 * token, 3.0 - token))
    expected = forward(module, tokens).double()
    for norm in (rms_norm, rms_norm_around_one):
        if torch.allclose(norm(weight, eps, tokens).double(), expected, rtol=1e-4):
            module.forward = partial(norm, weight, eps)
            return


def _fuse(module: nn.Module) -> None:
    """Replace, in place, the forward of an MLP, or the rotary embedding in a module's forward, by a compiled one that
    runs in captures only: other passes may have any number of tokens, each of which would be compiled."""
    forward = type(module).forward
    if "forward" in vars(module):  # replaced by other code
        return
    if type(module).__name__.endswith(PIECE):
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
    """`function`, compiled in captures: once for each shape of the argument at index `place` without its first axis."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return (_compiled(function, args[place].shape[1:]) if is_capturing() else function)(*args, **kwargs)

    return run


@cache
def _compiled(function: Any, shape: torch.Size) -> Any:
    """`function`, compiled for one shape of its argument, as a copy with its own code object: torch.compile gives up
    after eight compilations of one code object, which other shapes and models may have used up."""
    code = function.__code__.replace(co_name=f"{function.__name__}_{'_'.join(map(str, shape))}")
    own = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    return torch.compile(own, dynamic=False)
