"""Which product the linear layers of target and draft take in a pass on a CPU (`FasterProducts`).

Large layers use copies of their weights (`models.cpu.products`) for the numbers of rows that gain by it
(`ProductTimes`); small layers keep PyTorch's own product. Attention over several tokens reads the keys and
values as they are cached, where transformers copies them once for each query head that shares them
(`grouped_attention`). That computes the same bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from threading import RLock, local
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_specdecpp.models.causal_lm import devices_of, has_compiled_call, modules_of
from hf_specdecpp.models.cpu.products import ProductTimes, product_times
from hf_specdecpp.models.cpu.weight_copies import WeightCopies, WeightCopy, background, can_fingerprint

Forward = Callable[[Tensor], Tensor]
UNUSUAL = frozenset({"position_bias", "cache", "softcap"})  # arguments of attention that transformers handles
LEAST_ELEMENTS = 100_000  # of a weight: below, calling another product costs more than PyTorch's own
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


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

    In other threads the models compute with PyTorch's own products, or as the contexts say that these have entered.
    Inside autocast, with gradients or for another dtype layers compute with PyTorch's own product, hooks run as usual,
    and layers of compiled, parametrised or quantised modules, or whose forward somebody else has replaced, are left
    alone. Attention takes part in every dtype, unless a model is compiled.

    A layer uses the copy of its weight as soon as that was made in the background, also in the middle of a text.

    Args:
        models: target and draft, or their modules. By default none, and then nothing changes.
        copies: keeps exact copies of the weights, which are checked and renewed here. `None`: no layer uses any.
        draft: modules whose large layers compute in int8 where they are given a few tokens.
        target: the model whose passes `seconds` is about. A layer that it shares with the draft stays as it is: int8
            would change the output.
        int8: keeps the int8 copies of the draft's weights, likewise. `None`: no layer computes in int8.

    Attributes:
        layers: that may take other products, with how they multiply.
    """

    def __init__(
        self,
        *models: nn.Module,
        copies: WeightCopies | None = None,
        draft: Iterable[nn.Module] = (),
        target: nn.Module | None = None,
        int8: WeightCopies | None = None,
    ) -> None:
        self.layers: dict[nn.Linear, Forward] = {}
        self._of_target: list[tuple[int, WeightCopy, ProductTimes]] = []  # elements, copy and times of its layers
        shared = set() if target is None or (int8 is None and copies is None) else set(modules_of(target))
        if int8 is not None:
            for layer in large_layers(draft):
                if layer not in shared and can_be_copied(layer):
                    self.layers[layer] = _copied_forward(layer, int8.current(layer.weight))
        for layer in large_layers(models) if copies is not None else ():
            times = product_times(layer.weight) if layer not in self.layers and can_be_copied(layer) else None
            if copies is not None and times is not None:
                copy = copies.prepared(layer.weight)
                self.layers[layer] = _copied_forward(layer, copy)
                if layer in shared:
                    self._of_target.append((layer.weight.numel(), copy, times))
        # Attention that comes and goes would compile a compiled model again.
        on_cpu = any(all(device.type == "cpu" for device in devices_of(model)) for model in models)
        self.groups_attention = on_cpu and not any(map(_recompiles, models))

    @property
    def described(self) -> str:
        """How the target's large layers multiply now: "own", or such as "float16 (200 of 210 layers)"."""
        made = Counter(found.copy.name for _, copy, _ in self._of_target if (found := copy.made) is not None)
        count = len(self._of_target)
        names = [name if number == count else f"{name} ({number} of {count} layers)" for name, number in made.items()]
        return ", ".join(names) or "own"

    def seconds(self, rows: int, own: bool = False) -> float | None:
        """Seconds of processor time that the target's large layers take in a pass over so many tokens, as measured when
        the assistant was attached; `None` where it has no such layers. `own`: with PyTorch's own products."""
        if not self._of_target:
            return None
        seconds = 0.0
        for count, copy, usual in self._of_target:
            made = copy.made
            times = usual if made is None else made.times
            seconds += count * times.seconds(rows, with_copy=not own and made is not None)
        return seconds

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
        background.begin_text()

    def __exit__(self, *_: object) -> None:
        background.end_text()
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


def large_layers(models: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """Ordinary linear layers on a CPU that are large enough for other products than PyTorch's own.

    Each comes once, and none below compiled modules. Each `generate()` walks over all modules here, of which there may
    be thousands, so nothing is called for a usual one.
    """
    seen: set[nn.Module] = set()
    left: list[nn.Module | None] = list(models)
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
            is_ordinary = type(weight) is nn.Parameter and weight.layout is torch.strided and weight.dtype in DTYPES
            if is_ordinary and weight.device.type == "cpu" and weight.numel() >= LEAST_ELEMENTS:
                yield module


def _recompiles(module: nn.Module) -> bool:
    """Whether a forward that comes and goes would have it compiled again each time."""
    return has_compiled_call(module) or "_compiled_call" in vars(module)  # `generate(cache_implementation="static")`


def can_be_copied(layer: nn.Linear) -> bool:
    """Whether a copy of the weight can be kept up to date: no hook changes the weight before each product."""
    return can_fingerprint(layer.weight) and not layer.weight.is_inference() and not layer._forward_pre_hooks


def _copied_forward(layer: nn.Linear, copy: WeightCopy) -> Forward:
    """A forward of the layer that uses the copy of its weight once that was made, for the rows that it is for."""
    width = layer.in_features

    def forward(input: Tensor) -> Tensor:
        made, rows = copy.made, input.numel() // width
        if (
            made is not None  # first: there are hundreds of layers
            and made.times.least <= rows <= made.times.most
            and _is_plain(layer, input)
            and copy.is_of(layer.weight)
        ):
            output: Tensor = made.copy.multiply(input, layer.bias)
            return output
        return functional.linear(input, layer.weight, layer.bias)

    return forward


def _is_plain(layer: nn.Linear, input: Tensor) -> bool:
    """Whether the layer computes in the dtype of its weight, and nothing is to be differentiated."""
    return (
        input.dtype is layer.weight.dtype
        and input.dtype in DTYPES
        and not torch.is_autocast_enabled("cpu")
        and not torch.is_grad_enabled()
    )
