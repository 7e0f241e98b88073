"""Choice of the matrix multiplication of each linear layer of target and draft on a CPU (`FasterProducts`).

Large layers use copies of their weights (`models.cpu.products`) for numbers of rows for which copies are faster
(`ProductTimes`); small layers use PyTorch's own kernel. Attention over several tokens reads cached keys and values
directly, whereas transformers copies them for each query head; models in half precision whose layers have copies attend
in float32 (`grouped_attention`)."""

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
from hf_specdecpp.models.cpu.grouped_attention import HALF, grouped_attention, of_thread
from hf_specdecpp.models.cpu.products import ProductTimes, product_times, rows_round_alike
from hf_specdecpp.models.cpu.weight_copies import WeightCopies, WeightCopy, background, can_fingerprint

Forward = Callable[[Tensor], Tensor]
LEAST_ELEMENTS = 100_000  # of a weight; smaller layers gain less than the call of another kernel costs
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Local(local):
    """`FasterProducts.layers` of the contexts that this thread has entered. The last decides how layers multiply."""

    def __init__(self) -> None:
        self.contexts: list[Mapping[nn.Linear, Forward]] = [{}]


_local = _Local()
# Of all threads, guarded by the lock: the number of entered contexts, by layer and by attention that they replace.
_uses: Counter[nn.Linear] = Counter()
_groups: Counter[str] = Counter()
_lock = RLock()


class FasterProducts:
    """A reentrant context in which models on a CPU use the fastest matrix multiplications for this machine.

    A large linear layer uses the copy of its weight (`models.cpu.products`) as soon as the copy exists, even within a
    generation, but PyTorch's own kernel in autocast, with gradients, for inputs of another dtype and in other threads.
    Hooks run as usual. Layers with compiled, parametrised, quantised or replaced forwards or weights are not changed.
    Attention of these models is that of `grouped_attention` in every dtype, unless a model is compiled.

    Args:
        target: the target; `seconds` and `described` are about its layers.
        draft: modules of the draft. Layers that are the target's, too, do not use int8, which would change the output.
        copies: owner of exact copies of the weights; missing and changed ones are requested. `None`: no exact copies.
        int8: owner of the int8 copies of the draft's weights, for passes over few tokens. Missing and changed ones are
            made here. `None`: the draft's layers use exact copies, too.

    Attributes:
        layers: for each layer that may have a copy, its forward in this context.
        attending: the modules of target and draft, whose attention is replaced; none if it is not replaced.
        attends_in_float32: whether the replaced attention of half precision computes in float32, in passes over few
            tokens: if the target has a large layer that cannot compute the bits of plain passes over one token anyway.
    """

    def __init__(
        self,
        target: nn.Module | None = None,
        draft: Iterable[nn.Module] = (),
        copies: WeightCopies | None = None,
        int8: WeightCopies | None = None,
    ) -> None:
        self.layers: dict[nn.Linear, Forward] = {}
        self._of_target: list[tuple[int, WeightCopy, ProductTimes]] = []  # elements, copy, times of each layer
        self.attends_in_float32 = False
        self._seconds: dict[tuple[int, bool, int], float] = {}  # results of `seconds`, by number of all copies, too
        drafts = [*draft]
        models = drafts if target is None else [target, *drafts]
        own = set() if target is None else set(modules_of(target))
        for layer in filter(can_be_copied, large_layers(models)):
            if int8 is not None and layer not in own:
                self.layers[layer] = _copied_forward(layer, int8.current(layer))
            elif copies is not None and (times := product_times(layer.weight)) is not None:
                copy = copies.prepared(layer)
                self.layers[layer] = _copied_forward(layer, copy)
                if layer in own:
                    if layer.weight.dtype in HALF and not self.attends_in_float32:
                        self.attends_in_float32 = times.most > 0 or not rows_round_alike(layer.weight)
                    self._of_target.append((layer.weight.numel(), copy, times))
        # Replacing attention would recompile a compiled model each time.
        on_cpu = any(all(device.type == "cpu" for device in devices_of(model)) for model in models)
        replaces = on_cpu and not any(map(_recompiles, models))
        self.attending = own.union(*map(modules_of, drafts)) if replaces else set()
        self._drafts_in_int8 = int8 is not None

    @property
    def described(self) -> str:
        """The kernels of the target's large layers at present: "float16", "own" (PyTorch's), or for example "float16
        (200 of 210 layers), own (10 of 210 layers), draft in int8"."""
        names = Counter("own" if (made := copy.made) is None else made.copy.name for _, copy, _ in self._of_target)
        several = [f"{name} ({number} of {names.total()} layers)" for name, number in names.most_common()]
        return (", ".join(several if len(names) > 1 else names) or "own") + ", draft in int8" * self._drafts_in_int8

    def seconds(self, rows: int, own: bool = False) -> float | None:
        """Processor seconds that the target's large layers take in a pass over `rows` tokens, from measured times;
        `None` if there are no such layers. `own`: as if no layer had a copy yet."""
        if not self._of_target:
            return None
        if (key := (rows, own, background.made)) not in self._seconds:  # 0.3 ms for a model of 28 layers
            seconds = 0.0
            for count, copy, usual in self._of_target:
                made = copy.made
                times = usual if made is None else made.times
                seconds += count * times.seconds(rows, with_copy=not own and made is not None)
            self._seconds[key] = seconds
        return self._seconds[key]

    def __enter__(self) -> None:
        with _lock:
            background.texts += 1
            if self.attending:
                _groups["sdpa"] += 1
                if ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa_attention_forward:
                    ALL_ATTENTION_FUNCTIONS["sdpa"] = grouped_attention  # the same bits, also in other threads
            for layer in self.layers:
                _uses[layer] += 1
                vars(layer).setdefault("forward", MethodType(_multiply, layer))
        _local.contexts.append(self.layers)
        of_thread.contexts.append((self.attending, self.attends_in_float32))

    def __exit__(self, *_: object) -> None:
        _local.contexts.pop()
        of_thread.contexts.pop()
        of_thread.buffers.clear()
        with _lock:
            background.texts -= 1
            for layer in self.layers:
                _uses[layer] -= 1
                if not _uses[layer]:
                    del _uses[layer]
                    if _is_routed(layer):
                        del vars(layer)["forward"]
            if self.attending:
                _groups["sdpa"] -= 1
                if not _groups["sdpa"] and ALL_ATTENTION_FUNCTIONS["sdpa"] is grouped_attention:
                    del ALL_ATTENTION_FUNCTIONS["sdpa"]  # only the override; transformers' own remains


def _multiply(layer: nn.Linear, input: Tensor) -> Tensor:
    """Replaces a layer's forward while contexts use it: runs the context's in its thread, PyTorch's own in others."""
    here = _local.contexts[-1].get(layer)
    return functional.linear(input, layer.weight, layer.bias) if here is None else here(input)


_multiply.__name__ = "forward"  # so that pickle in another thread finds the layer's own forward by name


def _is_routed(layer: nn.Module) -> bool:
    return getattr(vars(layer).get("forward"), "__func__", None) is _multiply


def large_layers(models: Iterable[nn.Module]) -> Iterator[nn.Linear]:
    """Ordinary linear layers on a CPU with at least 100,000 elements, each once, outside of compiled modules.

    Each `generate()` visits all modules here, perhaps thousands, so no function is called for an ordinary module."""
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
    """Whether the module is compiled, so that replacing a layer's forward or the attention would recompile it."""
    return has_compiled_call(module) or "_compiled_call" in vars(module)  # `generate(cache_implementation="static")`


def can_be_copied(layer: nn.Linear) -> bool:
    """Whether all changes of the layer's weight can be noticed, and no hook may change the weight before a forward."""
    return can_fingerprint(layer.weight) and not layer.weight.is_inference() and not layer._forward_pre_hooks


def _copied_forward(layer: nn.Linear, copy: WeightCopy) -> Forward:
    """A forward for the layer that uses the `copy` of its weight once it is made, for numbers of rows that suit it."""
    width = layer.in_features

    def forward(input: Tensor) -> Tensor:
        made, rows = copy.made, input.numel() // width
        if (
            made is not None  # first, since there are hundreds of layers
            and made.times.least <= rows <= made.times.most
            and input.dtype is layer.weight.dtype
            and not torch.is_autocast_enabled("cpu")
            and not torch.is_grad_enabled()
            and copy.is_of(layer.weight)
        ):
            return made.copy.multiply(input, layer.bias)
        return functional.linear(input, layer.weight, layer.bias)

    return forward
