"""Which product the linear layers of target and draft take in a pass on a CPU (`FasterProducts`).

Of the products in `models.products` large float32 layers take one by the number of rows; small ones keep PyTorch's own.
Attention over several tokens reads the keys and values as they are cached, where transformers copies them once for each
query head that shares them (`grouped_attention`). That computes the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import RLock, local
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import devices_of, has_compiled_call, modules_of
from hf_specdecpp.models.products import MOST_INT8_ROWS, PackedCopy, PackedWeights, Ways, int8_product, onednn

Forward = Callable[[Tensor], Tensor]
UNUSUAL = frozenset({"position_bias", "cache", "softcap"})  # arguments of attention that transformers handles
LEAST_ELEMENTS = 100_000  # of a weight: below, calling another product costs more than PyTorch's own
# Where a container's limit of memory and what it uses stand.
CONTAINERS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


class Part(NamedTuple):
    """What belongs to a model, and how its large linear layers multiply."""

    modules: Sequence[nn.Module]
    ways: Ways


class _Here(local):
    """What layers multiply with in this thread: the last of the contexts that it is in counts."""

    def __init__(self) -> None:
        self.contexts: list[Mapping[nn.Linear, Forward]] = [{}]


_here = _Here()
# In how many contexts layers are, in all threads, and how many of them group attention; changed under the lock.
_uses: Counter[nn.Linear] = Counter()
_groups: Counter[str] = Counter()
_lock = RLock()


class FasterProducts:
    """A context in which models on a CPU use the products that are fastest for them here. It can be entered again.

    In other threads the models compute as ever, or as in contexts that these have entered. Inside autocast, with
    gradients or for another dtype layers compute as ever, hooks run as ever, and layers of compiled, parametrised or
    quantised modules, or whose forward somebody else has replaced, are left alone. Attention takes part in every dtype,
    unless a model is compiled.

    Args:
        parts: models; a layer that several share goes as in the first. By default none, and then nothing changes.
        packed: keeps packed copies of the weights for which they are used; they are checked and renewed here.
        draft: modules whose large layers compute in int8 where they are given a few tokens.
        target: a layer that it shares with the draft stays as it is: int8 would change the output.
        int8: keeps the int8 copies of the draft's, likewise. Without it the draft is one of the parts.

    Attributes:
        layers: that take other products, with how they multiply.
        has_choice: whether layers of the parts can take another product than PyTorch's.
    """

    def __init__(
        self,
        *parts: Part,
        packed: PackedWeights | None = None,
        draft: Iterable[nn.Module] = (),
        target: nn.Module | None = None,
        int8: PackedWeights | None = None,
    ) -> None:
        self.layers: dict[nn.Linear, Forward] = {}
        if int8 is not None:
            shared = set() if target is None else set(modules_of(target))
            for layer in large_layers(draft):
                if layer not in shared and can_be_packed(layer):
                    self.layers[layer] = _int8_forward(layer, int8.current(layer.weight))
        seen: set[nn.Module] = set()
        for modules, ways in parts:
            for layer in large_layers(modules, seen):
                copy = None
                if packed is not None and "packed" in ways.products and can_be_packed(layer):
                    copy = packed.current(layer.weight)
                if ways.products != {"own"}:
                    self.layers.setdefault(layer, _forward(layer, ways, copy))
        self.has_choice = any(ways.products != {"own"} for _, ways in parts)
        models = [module for modules, _ in parts for module in modules]
        # Attention that comes and goes would compile a compiled model again.
        on_cpu = any(all(device.type == "cpu" for device in devices_of(model)) for model in models)
        self.groups_attention = on_cpu and not any(map(_recompiles, models))

    def __enter__(self) -> None:
        with _lock:
            if self.groups_attention:
                _groups["sdpa"] += 1
                if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
                    ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention  # the same bits for whoever else calls it
            for layer in self.layers:
                _uses[layer] += 1
                vars(layer).setdefault("forward", MethodType(_multiply, layer))
        _here.contexts.append(self.layers)

    def __exit__(self, *_: object) -> None:
        _here.contexts.pop()
        with _lock:
            for layer in self.layers:
                _uses[layer] -= 1
                if not _uses[layer]:
                    del _uses[layer]
                    if _is_routed(layer):
                        del vars(layer)["forward"]
            if self.groups_attention:
                _groups["sdpa"] -= 1
                if not _groups["sdpa"] and ALL_ATTENTION_FUNCTIONS["sdpa"] is grouped_attention:
                    del ALL_ATTENTION_FUNCTIONS["sdpa"]  # the override, which leaves transformers' own


def _multiply(layer: nn.Linear, input: Tensor) -> Tensor:
    """The forward of a layer that some thread multiplies faster: in this one perhaps as ever."""
    here = _here.contexts[-1].get(layer)
    return functional.linear(input, layer.weight, layer.bias) if here is None else here(input)


_multiply.__name__ = "forward"  # by which pickle finds it: a pickle that another thread makes has the layer's own


def _is_routed(layer: nn.Module) -> bool:
    return getattr(vars(layer).get("forward"), "__func__", None) is _multiply


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """transformers' `sdpa` attention, the same bits, without copies of keys and values for heads that share them.

    transformers makes these copies whenever several tokens are read under a mask, as in every verification, since CUDA
    has no fast kernel for it; CPUs have.

    Example: 12 query heads share 2 heads of keys and values. For two tokens of each of eight rows, with 512 tokens in
    the cache, the copies are 50 MB a layer.

    Args:
        query: `[batch, heads, tokens, width]`.
        key, value: `[batch, heads of keys, cached tokens, width]`.
        attention_mask: `[batch, 1, tokens, cached tokens]`, boolean or to be added.

    Returns:
        `[batch, tokens, heads, width]`, and no weights.
    """
    copies = query.shape[2] > 1 and attention_mask is not None and query.shape[1] > key.shape[1]
    if not (  # in this order: every layer asks in every pass, and most passes read one token
        copies
        and not torch.is_grad_enabled()
        and key.device.type == "cpu"
        and key.shape[-1] == value.shape[-1]
        and not kwargs.get("dropout")
        and (not (given := UNUSUAL & kwargs.keys()) or all(kwargs[name] is None for name in given))
    ):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def large_layers(models: Iterable[nn.Module], seen: set[nn.Module] | None = None) -> Iterator[nn.Linear]:
    """Ordinary float32 linear layers on a CPU that are large enough for other products than PyTorch's own.

    Each comes once, without modules that were `seen`, to which they are added, and what is below compiled ones. Each
    `generate()` walks over all modules here, of which there may be thousands, so nothing is called for a usual one.
    """
    seen = set() if seen is None else seen
    left: list[nn.Module | None] = list(models) if torch.backends.mkldnn.is_available() else []
    while left:
        module = left.pop()
        if module is None or module in seen:
            continue
        own, below = vars(module), module._modules
        is_usual = (
            "forward" not in own
            and "_compiled_call" not in own
            and "_orig_mod" not in below
            and module._compiled_call_impl is None
        )
        if not is_usual and _recompiles(module):
            continue
        seen.add(module)
        left.extend(below.values())
        if type(module) is nn.Linear and (is_usual or _is_routed(module)):
            weight: Any = module._parameters.get("weight")
            is_ordinary = type(weight) is nn.Parameter and weight.dtype is torch.float32
            if is_ordinary and weight.device.type == "cpu" and weight.numel() >= LEAST_ELEMENTS:
                yield module


def _recompiles(module: nn.Module) -> bool:
    """Whether a forward that comes and goes would have it compiled again each time."""
    return has_compiled_call(module) or "_compiled_call" in vars(module)  # `generate(cache_implementation="static")`


def can_be_packed(layer: nn.Linear) -> bool:
    """Whether a copy of the weight can be kept up to date: no hook changes it before each product."""
    weight = layer.weight
    even = weight.numel() % 2 == 0 and weight.storage_offset() % 2 == 0  # for `fingerprint`
    return even and weight.is_contiguous() and not weight.is_inference() and not layer._forward_pre_hooks


def free_memory() -> float:
    """Bytes that this process may still use; 0 where the system does not say."""
    try:
        found = dict(line.split(":") for line in Path("/proc/meminfo").read_text("utf-8").splitlines())
        free = 1024.0 * int(found["MemAvailable"].split()[0])
        for limit, used in CONTAINERS:
            if Path(limit).is_file() and (most := Path(limit).read_text("utf-8").strip()) != "max":
                free = min(free, int(most) - int(Path(used).read_text("utf-8")))
    except (OSError, KeyError, ValueError):
        return 0.0
    return max(free, 0.0)


def _forward(layer: nn.Linear, ways: Ways, packed: PackedCopy | None) -> Forward:
    """A forward of the layer that goes these ways; without a packed copy oneDNN takes the weight as it is."""
    is_current, width = _unchanged(layer), layer.in_features

    def forward(input: Tensor) -> Tensor:
        product = ways.of(input.numel() // width)  # first: there are hundreds of layers
        if product == "own" or not _plain_rows(layer, input):
            return functional.linear(input, layer.weight, layer.bias)
        if product == "onednn" or packed is None:
            return onednn(input, layer.weight, layer.bias)
        if not is_current():
            return functional.linear(input, layer.weight, layer.bias)
        return onednn(input, packed.tensor, layer.bias)

    return forward


def _int8_forward(layer: nn.Linear, copy: PackedCopy) -> Forward:
    """A forward of the layer that is in int8 for up to `MOST_INT8_ROWS` rows."""
    is_current = _unchanged(layer)

    def forward(input: Tensor) -> Tensor:
        if 0 < _plain_rows(layer, input) <= MOST_INT8_ROWS and is_current():
            return int8_product(input, copy.tensor, layer.bias)
        return functional.linear(input, layer.weight, layer.bias)

    return forward


def _plain_rows(layer: nn.Linear, input: Tensor) -> int:
    """Rows of a product that may take another way; 0 where it has to be PyTorch's own."""
    if (
        input.dtype is not torch.float32
        or layer.weight.dtype is not torch.float32
        or torch.is_autocast_enabled("cpu")
        or torch.is_grad_enabled()
    ):
        return 0
    return input.numel() // layer.in_features


def _unchanged(layer: nn.Linear) -> Callable[[], bool]:
    """Says whether the weight is the one that it is now."""
    made_of = layer.weight
    version, address = made_of._version, made_of.data_ptr()
    return lambda: layer.weight is made_of and made_of._version == version and made_of.data_ptr() == address
