"""Faster matrix products on a CPU, for float32 linear layers of the target and the draft (`FasterProducts`).

PyTorch gives float32 products to MKL. oneDNN, which comes with PyTorch and does its bfloat16 products, is faster for
some models, on some processors, and faster still if it may keep a copy of the weights in an order of its own
(`PackedWeights`). Which product the large layers of a model take for how many rows (`products.Ways`) is decided on the
target's passes (`throughput.target_passes`); small layers keep PyTorch's own.

A draft may compute in int8 (`int8_products`), which is three times as fast and not the same.

Attention over several tokens reads the keys and values as they are cached, where transformers copies them once for each
query head that shares them (`grouped_attention`). That computes the same bits.

All other products round in the last digits, each in its own way: the same kind of difference as between a pass over one
token and a pass over several, which verification has anyway.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import RLock, local
from types import MethodType
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models import int8_products
from hf_specdecpp.models.causal_lm import has_compiled_call
from hf_specdecpp.models.products import Ways, onednn, pack

Forward = Callable[[Tensor], Tensor]
UNUSUAL = ("position_bias", "cache", "softcap")  # arguments of attention that transformers handles
LEAST_ELEMENTS = 100_000  # of a weight: below, calling oneDNN costs more than the product itself
BUCKETS = 1021  # a prime, so that whatever moves rows or columns of a weight moves numbers from bucket to bucket


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

    In other threads the models compute as ever, or as in contexts that these have entered.

    Of linear layers ordinary float32 ones on a CPU take part. Inside autocast, with gradients or for another dtype they
    compute as ever, hooks run as ever, and layers of compiled, parametrised or quantised modules, or whose forward
    somebody else has replaced, are left alone. Attention takes part in every dtype, unless a model is compiled.

    Args:
        parts: models; a layer that several share goes as in the first. By default none, and then nothing changes.
        packed: keeps packed copies of the weights for which they are used; they are checked and renewed here.
        draft: modules whose large layers compute in int8 where they are given a few tokens.
        target: a layer that it shares with the draft stays as it is: int8 would change the output.
        int8: keeps the int8 copies of the draft's, likewise. Without it the draft is one of the parts.

    Attributes:
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
            shared = set() if target is None else set(target.modules())
            own = (layer for layer in linear_layers(draft) if layer not in shared)
            for layer in own:
                if int8_products.pays(layer) and can_be_packed(layer):
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
        self.groups_attention = any(map(_on_cpu, models)) and not any(map(_recompiles, models))

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
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """transformers' `sdpa` attention, the same bits, without copies of keys and values for heads that share them.

    transformers makes these copies whenever several tokens are read under a mask, as in every verification: it leaves
    the sharing to PyTorch (`enable_gqa`) without a mask only, since with one CUDA has no fast kernel for it. CPUs do.

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
    ordinary = dropout == 0.0 and not any(kwargs.get(name) is not None for name in UNUSUAL)
    supported = key.device.type == "cpu" and key.shape[-1] == value.shape[-1] and not torch.is_grad_enabled()
    if not (copies and ordinary and supported):
        arguments = {"dropout": dropout, "scaling": scaling, **kwargs}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **arguments)
    output = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


def products_of(model: nn.Module) -> dict[str, int]:
    """How many of its linear layers use which product now: `{"own": 2, "packed": 210}`. Costs depend on it."""
    layers = (layer for layer in model.modules() if type(layer) is nn.Linear)
    forwards = (_here.contexts[-1].get(layer) if _is_routed(layer) else None for layer in layers)
    return dict(sorted(Counter(getattr(forward, "product", "own") for forward in forwards).items()))


class PackedWeights:
    """Packed copies of weights. They go with this object, and each of them with its weight.

    Another object that packs the same weight in the same way shares the copy.

    Args:
        pack: makes a copy.
    """

    def __init__(self, pack: Callable[[Tensor], Any] = pack) -> None:
        self._pack = pack
        self._copies: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> PackedCopy

    def current(self, weight: Tensor) -> PackedCopy:
        """The copy of the weight as it is now: made, or made again, if it has to be.

        The whole weight is read for this, which takes about as long as a product with one row.
        """
        copies = _shared[self._pack]
        shared = copies.get(weight)
        copy = shared() if shared is not None else None
        state = fingerprint(weight)
        if copy is None or not torch.equal(copy.state, state):
            copy = PackedCopy(state, self._pack(weight))
            copies[weight] = ref(copy)
        self._copies[weight] = copy
        return copy

    def drop(self, weights: Iterable[Tensor]) -> None:
        """Give the memory of the copies of these weights back."""
        for weight in weights:
            self._copies.pop(weight, None)

    def clear(self) -> None:
        """Give the memory back."""
        self._copies.clear()

    @property
    def bytes(self) -> int:
        """Memory of the weights that there are copies of."""
        return sum(weight.nbytes for weight in self._copies)


@dataclass(eq=False)
class PackedCopy:
    """A weight in another order, or rounded.

    Args:
        state: `fingerprint` of the weight that it was made of.
        tensor: the copy.
    """

    state: Tensor
    tensor: Any


# By the function that packs: weight -> weak reference to its copy.
_shared: defaultdict[Callable[[Tensor], Any], WeakIdKeyDictionary] = defaultdict(WeakIdKeyDictionary)


def fingerprint(weight: Tensor) -> Tensor:
    """Sums over all bits of a weight, to notice writes that autograd does not count (`.data`, numpy).

    The numbers are taken two by two as 64-bit integers; number j is added to sum j mod 1021, overflow wrapping around.
    So a write to a single element always shows. Several writes are missed only if they cancel out in each of the sums,
    which no ordinary operation on weights does.

    Returns:
        `[1021 + rest]` int64, the `rest` (less than 1021) being numbers that do not fill a row of 1021.
    """
    numbers = weight.detach().view(-1).view(torch.int64)
    whole = numbers.numel() - numbers.numel() % BUCKETS
    return torch.cat((numbers[:whole].view(-1, BUCKETS).sum(0), numbers[whole:]))


def large_layers(models: Iterable[nn.Module], seen: set[nn.Module] | None = None) -> Iterator[nn.Linear]:
    """Those of `linear_layers` that are large enough for other products than PyTorch's own."""
    return (layer for layer in linear_layers(models, seen) if layer.weight.numel() >= LEAST_ELEMENTS)


def linear_layers(models: Iterable[nn.Module], seen: set[nn.Module] | None = None) -> Iterator[nn.Linear]:
    """Ordinary float32 linear layers on a CPU, each once, without modules that were `seen`, to which they are added."""
    if not torch.backends.mkldnn.is_available():
        return
    seen = set() if seen is None else seen
    for model in models:
        yield from _ordinary(model, seen)


def _ordinary(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Linear]:
    if module in seen or _recompiles(module):
        return
    seen.add(module)
    is_own = "forward" not in vars(module) or _is_routed(module)
    if type(module) is nn.Linear and is_own and _is_ordinary(module.weight):
        yield module
    for child in module.children():
        yield from _ordinary(child, seen)


def _recompiles(module: nn.Module) -> bool:
    """Whether a forward that comes and goes would have it compiled again each time."""
    return has_compiled_call(module) or "_compiled_call" in vars(module)  # `generate(cache_implementation="static")`


def _on_cpu(model: nn.Module) -> bool:
    return all(parameter.device.type == "cpu" for parameter in model.parameters())


def _is_ordinary(weight: Tensor) -> bool:
    return type(weight) is nn.Parameter and weight.dtype == torch.float32 and weight.device.type == "cpu"


def can_be_packed(layer: nn.Linear) -> bool:
    """Whether a copy of the weight can be kept up to date: no hook changes it before each product."""
    weight = layer.weight
    even = weight.numel() % 2 == 0 and weight.storage_offset() % 2 == 0  # for `fingerprint`
    return even and weight.is_contiguous() and not weight.is_inference() and not layer._forward_pre_hooks


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

    return _named(forward, "onednn" if packed is None else "packed")


def _int8_forward(layer: nn.Linear, copy: PackedCopy) -> Forward:
    """A forward of the layer that is in int8 for up to `MOST_ROWS` rows."""
    is_current = _unchanged(layer)

    def forward(input: Tensor) -> Tensor:
        if 0 < _plain_rows(layer, input) <= int8_products.MOST_ROWS and is_current():
            return int8_products.multiply(input, copy.tensor, layer.bias)
        return functional.linear(input, layer.weight, layer.bias)

    return _named(forward, "int8")


def _named(forward: Forward, product: str) -> Forward:
    """The forward, with the name of its product, which `products_of` reads."""
    vars(forward)["product"] = product
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
