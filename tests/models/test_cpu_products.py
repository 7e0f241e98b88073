"""Faster float32 products on a CPU: the same numbers up to rounding, only where they may be used, and never stale."""

import gc
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
from support.models import assistant_for, tiny, told
from support.products import products_of
from support.snapshots import has_our_methods, of_own_class
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from hf_specdecpp import SpecDecPPAssistant
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.models import cpu_products
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu_products import FasterProducts, Part
from hf_specdecpp.models.products import Always, PackedWeights, Product
from hf_specdecpp.throughput import target_passes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

IDS = torch.tensor([[3, 4, 5, 6]])
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 2}

Calls = list[tuple[int, bool]]


@pytest.fixture
def target() -> CausalLM:
    return tiny("llama").float()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Rows that oneDNN multiplied, and whether the weight was packed. Here it is the fastest for every shape."""
    seen: Calls = []

    def noted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((x.numel() // x.shape[-1], weight.is_mkldnn))
        return real(x, weight, bias)

    def fastest(_target: CausalLM, other: Product | None) -> Always:
        return Always(other or "own")

    real = cpu_products.onednn
    monkeypatch.setattr(cpu_products, "onednn", noted)
    monkeypatch.setattr(cpu_products, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(target_passes, "ways_of", fastest)
    return seen


def faster(*modules: nn.Module, packed: PackedWeights | None = None) -> FasterProducts:
    """All products by oneDNN, with packed weights where they may be."""
    ways = Always("onednn" if packed is None else "packed")
    return FasterProducts(*[Part([module], ways) for module in modules], packed=packed)


# Which product, and that it is right. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_the_same_logits(target: CausalLM, calls: Calls, rows: int, packed: bool) -> None:
    ids = torch.arange(rows)[None] % 7 + 1
    expected = target.double()(ids).logits
    target.float()
    with faster(target, packed=PackedWeights() if packed else None):
        actual = target(ids).logits
        assert products_of(target) == {"packed" if packed else "onednn": 22}
    assert {was_packed for _, was_packed in calls} == {packed}
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    target(ids)
    assert not calls  # outside of it everything is as before
    assert products_of(target) == {"own": 22}


class ByRows:
    """One row as it is, up to three packed, others with the weight as it is."""

    products: ClassVar[set[Product]] = {"own", "packed", "onednn"}

    def of(self, rows: int) -> Product:
        return "own" if rows == 1 else "packed" if rows < 4 else "onednn"


def test_each_number_of_rows_goes_its_way(calls: Calls) -> None:
    """In any shape."""
    layer = nn.Linear(8, 8)
    with torch.no_grad(), FasterProducts(Part([layer], ByRows()), packed=PackedWeights()):
        for shape in ((1,), (2,), (1, 3), (2, 2), (1, 100)):
            x = torch.randn(*shape, 8)
            y = layer(x)
            assert y.shape == (*shape, 8)
            torch.testing.assert_close(y, functional.linear(x, layer.weight, layer.bias))
    assert calls == [(2, True), (3, True), (4, False), (100, False)]


def test_small_layers_are_left_alone(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert not faster(target, packed=PackedWeights()).layers


# Only where they may be used. -----------------------------------------------------------------------------------------


def test_only_float32_without_gradients(calls: Calls) -> None:
    layer, x = nn.Linear(4, 3), torch.ones(1, 4)
    with faster(layer):
        layer(x).sum().backward()  # the kernel has no gradient
        with torch.no_grad():
            layer(x[:0])
            layer.double()(x.double())
    assert not calls
    with torch.no_grad(), faster(layer):
        layer(x.double())
    assert not calls


@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_autocast_is_as_plain(target: CausalLM, calls: Calls, packed: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = target(IDS).logits
        with faster(target, packed=PackedWeights() if packed else None):
            assert torch.equal(target(IDS).logits, expected)
    assert not calls


def test_the_forward_of_others_stays() -> None:
    layer = nn.Linear(4, 3)
    hooked = vars(layer)["forward"] = lambda x: x + 1.0
    other = nn.Linear(4, 4)

    def interrupted() -> None:
        with faster(layer, other):
            assert layer.forward is hooked
            assert "forward" in vars(other)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert layer.forward is hooked
    assert "forward" not in vars(other)


@torch.no_grad()
def test_hooks_run(calls: Calls) -> None:
    layer, x = nn.Linear(4, 3), torch.randn(2, 4)
    layer.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    layer.register_forward_hook(lambda module, args, output: output + 1.0)
    expected = layer(x)
    with faster(layer, packed=PackedWeights()):
        torch.testing.assert_close(layer(x), expected)
    assert calls == [(2, False)]  # a hook before the product may change the weight, so there is no packed copy


def doubled() -> nn.Module:
    class Double(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return 2.0 * weight

    return parametrize.register_parametrization(nn.Linear(4, 4), "weight", Double())


def compiled() -> nn.Module:
    module: Any = torch.compile(nn.Linear(4, 4), backend="eager")
    return nn.Sequential(module)


def compiled_forward() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 4))
    module.forward = torch.compile(module.forward, backend="eager")  # type: ignore[method-assign]
    return module


@pytest.mark.parametrize("make", [doubled, compiled, compiled_forward])
@torch.no_grad()
def test_modules_of_others_compute_as_ever(make: Callable[[], nn.Module], calls: Calls) -> None:
    module, x = make(), torch.randn(2, 4)
    expected = module(x)
    with faster(module):
        assert torch.equal(module(x), expected)
    assert not calls


def test_a_compiled_target(target: CausalLM) -> None:
    assert faster(target).layers
    target.compile(backend="eager")
    assert not faster(target).layers


WRITES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "counted by autograd": torch.no_grad()(lambda weight, new: weight.copy_(new)),
    "other data": lambda weight, new: setattr(weight, "data", new),
    "data in place": lambda weight, new: weight.data.mul_(new / weight.data),
    "NumPy": lambda weight, new: np.copyto(weight.detach().numpy(), new.numpy()),
    "one element": lambda weight, _: np.add.at(weight.detach().numpy(), (7, 3), 1e-6),
    "rows swapped": lambda weight, _: weight.data.copy_(weight.data.flip(0)),
    "columns swapped": lambda weight, _: weight.data.copy_(weight.data.roll(2, dims=1)),
}


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_noticed(write: str, calls: Calls) -> None:
    layer, x, packed = nn.Linear(64, 64, bias=False), torch.randn(3, 64, dtype=torch.float64), PackedWeights()
    faster(layer, packed=packed)
    WRITES[write](layer.weight, torch.randn(64, 64))
    with torch.no_grad(), faster(layer, packed=packed):
        actual = layer(x.float())
    assert calls == [(3, True)]
    torch.testing.assert_close(actual.double(), x @ layer.weight.detach().double().T, rtol=0.0, atol=2e-5)
    assert torch.equal(packed.current(layer.weight).tensor.to_dense(), layer.weight.detach())


def test_an_unchanged_weight_keeps_its_copy() -> None:
    layer, packed = nn.Linear(64, 64), PackedWeights()
    first = packed.current(layer.weight)
    assert packed.current(layer.weight) is first
    assert PackedWeights().current(layer.weight) is first  # another assistant's
    assert packed.bytes == 64 * 64 * 4


def test_a_write_during_a_generation_is_noticed_where_torch_counts_it(calls: Calls) -> None:
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(3, 8)
    with torch.no_grad(), faster(layer, packed=PackedWeights()):
        layer(x)
        layer.weight.mul_(2.0)
        torch.testing.assert_close(layer(x), x @ layer.weight.T)
        layer.weight.data = torch.randn(8, 8)
        torch.testing.assert_close(layer(x), x @ layer.weight.T)
        layer.weight = nn.Parameter(torch.randn(8, 8))
        torch.testing.assert_close(layer(x), x @ layer.weight.T)
    assert calls == [(3, True)]


def logits_of(target: CausalLM, **arguments: Any) -> Tensor:
    arguments |= {"output_logits": True, "return_dict_in_generate": True}
    outputs = target.generate(IDS, max_new_tokens=12, do_sample=False, **arguments)
    return torch.stack(outputs.logits)


def test_generate_packs_and_detach_gives_back(target: CausalLM, calls: Calls) -> None:
    assistant, expected = told(SpecDecPPAssistant.from_early_exit(target, 1), **FIXED), logits_of(target)
    assert not calls
    for pack_weights in (False, True):
        assistant.decisions = Decisions(pack_weights=pack_weights)
        calls.clear()
        torch.testing.assert_close(logits_of(target, assistant_model=assistant), expected)
        assert {was_packed for _, was_packed in calls} == {pack_weights}
        assert (4, pack_weights) in calls, "the prompt's pass too"
    assert assistant.packed.bytes > 0
    assistant.detach(target)
    assert assistant.packed.bytes == 0
    assert torch.equal(logits_of(target), expected)


@pytest.mark.parametrize("attach", [True, False])
def test_off_is_off(target: CausalLM, calls: Calls, attach: bool) -> None:
    expected = logits_of(target)
    assistant = assistant_for(target, attach, **FIXED, cpu_products="off", pack_weights=True)
    actual = logits_of(target, assistant_model=assistant)
    assert not calls
    if attach:  # transformers' own loop has no pass over the prompt alone
        assert torch.equal(actual[0], expected[0]), "the prompt's pass is bit for bit that of plain generation"
    torch.testing.assert_close(actual, expected)


def test_an_unattached_draft(target: CausalLM, calls: Calls) -> None:
    assistant, expected = assistant_for(target, attached=False, **FIXED, pack_weights=True), logits_of(target)
    assert torch.equal(logits_of(target, assistant_model=assistant).argmax(-1), expected.argmax(-1))
    assert not calls, "no pass of the target is timed there"


def test_a_deleted_assistant_leaves_nothing(target: CausalLM) -> None:
    of_own_class(target)
    first, second = (assistant_for(target, **FIXED, pack_weights=True) for _ in range(2))
    for assistant in (first, second):
        target.generate(IDS, max_new_tokens=4, assistant_model=assistant)
    copies = weakref.ref(second.packed.current(cast("Tensor", target.lm_head.weight)))
    del first, assistant
    gc.collect()
    assert copies() is not None
    assert has_our_methods(target), "the second is attached"
    del second
    gc.collect()
    assert copies() is None
    assert not has_our_methods(target)


def test_copies_go_with_their_weights() -> None:
    packed, layer = PackedWeights(), nn.Linear(8, 8)
    copied = weakref.ref(packed.current(layer.weight))
    del layer
    gc.collect()
    assert copied() is None
    assert packed.bytes == 0
