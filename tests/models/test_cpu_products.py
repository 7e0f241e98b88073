"""Faster float32 products on a CPU: the same numbers up to rounding, only where they may be used, and never stale."""

import gc

import pytest
import torch
from support.models import tiny
from torch import nn
from torch.nn import functional

from hf_specdecpp import SpecDecPPAssistant, SpeculationConfig
from hf_specdecpp.models.cpu_products import _packed, fast_linear, is_packed, pack, unpack

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def target():
    return tiny("llama").float()


@pytest.fixture
def calls(monkeypatch):
    """Shapes that oneDNN multiplied, with whether the weight was packed."""
    seen = []
    real = torch.ops.mkldnn._linear_pointwise

    def noted(x, weight, *rest):
        seen.append((tuple(x.shape), weight.is_mkldnn))
        return real(x, weight, *rest)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", noted)
    return seen


@pytest.mark.parametrize("rows", [1, 2, 5, 64])
@pytest.mark.parametrize("packed", [False, True])
@torch.no_grad()
def test_the_same_logits(target, calls, rows, packed):
    ids = torch.arange(rows)[None] % 7 + 1
    expected = target.double()(ids).logits
    target.float()
    if packed:
        pack(target)
    with fast_linear(target):
        actual = target(ids).logits
    assert {was_packed for _, was_packed in calls} == {packed}
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    target(ids)
    assert not calls  # outside of it everything is as before


def test_a_bias_and_several_dimensions(calls):
    layer, x = nn.Linear(12, 5), torch.randn(2, 3, 12)
    with torch.no_grad(), fast_linear(layer):
        actual = layer(x)
    assert calls
    torch.testing.assert_close(actual, functional.linear(x, layer.weight, layer.bias))


def test_only_float32_without_gradients(calls):
    layer, x = nn.Linear(4, 3), torch.ones(1, 4)
    with fast_linear(layer):
        layer(x).sum().backward()  # the kernel has no gradient
        with torch.no_grad():
            layer(x[:0])
            layer.double()(x.double())
    assert not calls
    with torch.no_grad(), fast_linear(layer):
        layer(x.double())
    assert not calls


def test_the_forward_of_others_stays(calls):
    layer = nn.Linear(4, 3)
    hooked = vars(layer)["forward"] = lambda x: x + 1.0
    other = nn.Linear(4, 4)

    def interrupted() -> None:
        with fast_linear(layer, other):
            assert layer.forward is hooked
            assert "forward" in vars(other)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert layer.forward is hooked
    assert "forward" not in vars(other)


def test_a_changed_weight_loses_its_copy(calls):
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(3, 8)
    pack(layer)
    with torch.no_grad(), fast_linear(layer):
        layer(x)
        layer.weight.mul_(2.0)
        actual = layer(x)
    assert [was_packed for _, was_packed in calls] == [True, False]
    torch.testing.assert_close(actual, x @ layer.weight.detach().T)


def test_copies_go_with_their_weights():
    before = len(_packed)
    layer = nn.Linear(8, 8)
    assert pack(layer) == 8 * 8 * 4
    assert pack(layer) == 0  # they are there
    assert len(_packed) == before + 1
    del layer
    gc.collect()
    assert len(_packed) == before
    layer = nn.Linear(8, 8)
    pack(layer)
    unpack(layer)
    assert len(_packed) == before


def test_generate_packs_and_detach_unpacks(target, calls):
    assistant = SpecDecPPAssistant.from_early_exit(target, 1, speculation=SpeculationConfig(rule="fixed", num_tokens=2))
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = target.generate(ids, max_new_tokens=12, do_sample=False)
    calls.clear()  # attaching checks the draft

    torch.testing.assert_close(target.generate(ids, max_new_tokens=12, assistant_model=assistant), expected)
    assert calls
    assert not is_packed(target)
    assistant.speculation.pack_weights = True
    calls.clear()
    torch.testing.assert_close(target.generate(ids, max_new_tokens=12, assistant_model=assistant), expected)
    assert is_packed(target)
    assert all(was_packed for _, was_packed in calls)
    assistant.detach(target)
    assert not is_packed(target)


def test_a_compiled_target(target):
    """The forward may be compiled: torch sees the products inside it as they are, or leaves it to us."""
    assistant = SpecDecPPAssistant.from_early_exit(target, 1, speculation=SpeculationConfig(rule="fixed", num_tokens=2))
    ids = torch.tensor([[3, 4, 5, 6]])
    expected = target.generate(ids, max_new_tokens=8, do_sample=False)
    target.compile(backend="eager")
    torch.testing.assert_close(target.generate(ids, max_new_tokens=8, assistant_model=assistant), expected)
