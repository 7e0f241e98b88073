"""Faster products on a CPU: the same numbers up to rounding, and only where they may be used."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from support.devices.products import faster, needs_float16, products_of, use_copies
from support.targets.models import assistant_for, configured, prompt, quiet_later_layers, tiny
from support.targets.snapshots import has_our_methods, of_own_class
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrize

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.choosing import assist
from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu import products
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.products import Float16Weight, OneDnnWeight, has_float16, measured_copy
from hf_specdecpp.models.cpu.weight_copies import WeightCopies, background

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

IDS = torch.tensor([[3, 4, 5, 6]])
FIXED: dict[str, Any] = {"rule": "fixed", "num_tokens": 2}

Calls = list[tuple[str, int]]


@pytest.fixture
def target() -> CausalLM:
    """With weights in float32 that float16 holds."""
    return tiny("llama").bfloat16().float()


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Which copies multiplied how many rows. Here they are the fastest for every shape up to 24 rows."""
    seen: Calls = []

    def note(kind: Any) -> None:
        multiply = kind.multiply

        def noted(self: Any, x: Tensor, bias: Tensor | None) -> Tensor:
            seen.append((self.name, x.numel() // x.shape[-1]))
            return multiply(self, x, bias)

        monkeypatch.setattr(kind, "multiply", noted)

    has_float16()  # which multiplies, too
    for kind in (Float16Weight, OneDnnWeight):
        note(kind)
    use_copies(monkeypatch)
    return seen


# Which product, and that it is right. ---------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 2, 5, 24, 64])
@pytest.mark.parametrize("kind", [pytest.param("float16", marks=needs_float16), "oneDNN"])
@torch.no_grad()
def test_the_same_logits(calls: Calls, rows: int, kind: str) -> None:
    target, ids = tiny("llama"), torch.arange(rows)[None] % 7 + 1
    target = (target.bfloat16() if kind == "float16" else target).float()
    expected = target.double()(ids).logits
    target.float()
    with faster(target):
        actual = target(ids).logits
        assert products_of(target) == {kind: 22}
    assert set(calls) == ({(kind, rows)} if rows <= 24 else set())
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-5)
    calls.clear()
    target(ids)
    assert not calls  # outside of it everything is as before
    assert products_of(target) == {"own": 22}


@needs_float16
def test_only_rows_that_gain_use_the_copy(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """In any shape."""
    use_copies(monkeypatch, least=2, most=4)
    layer = nn.Linear(8, 8).bfloat16().float()
    with torch.no_grad(), faster(layer):
        for shape in ((0,), (), (1,), (2,), (1, 3), (2, 2), (1, 5), (1, 100)):
            x = torch.randn(*shape, 8)
            y = layer(x)
            assert y.shape == (*shape, 8)
            torch.testing.assert_close(y, functional.linear(x, layer.weight, layer.bias))
    assert calls == [("float16", rows) for rows in (2, 3, 4)]


@needs_float16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@torch.no_grad()
def test_a_position_has_the_same_logits_in_passes_over_any_number(dtype: torch.dtype) -> None:
    """Without attention, whose own products differ by the number of rows."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.LayerNorm(96), nn.Linear(96, 64)).bfloat16().to(dtype)
    x = torch.randn(24, 64).to(dtype)
    with faster(layers):
        alone = torch.cat([layers(row[None]) for row in x])
        assert all(torch.equal(layers(x[:rows]), alone[:rows]) for rows in range(1, 25))


@needs_float16
@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_lm_heads_and_shared_weights_take_part(calls: Calls, tied: bool) -> None:
    target, kept = tiny("llama", tie_word_embeddings=tied).bfloat16().float(), WeightCopies(measured_copy)
    expected = target(IDS).logits
    target.model.layers[1].mlp = target.model.layers[0].mlp  # a shared module
    target.model.layers[1].self_attn.q_proj.weight = target.model.layers[0].self_attn.q_proj.weight  # a shared weight
    shared = target(IDS).logits
    assert not torch.equal(shared, expected)
    embedding = target.get_input_embeddings().weight.clone()
    with faster(target, copies=kept):
        assert products_of(target) == {"float16": 19}
        torch.testing.assert_close(target(IDS).logits, shared, rtol=1e-4, atol=1e-5)
    assert len(calls) == 22
    weights = {id(each.weight): each.weight.numel() for each in target.modules() if type(each) is nn.Linear}
    assert kept.bytes == 2 * sum(weights.values())
    assert torch.equal(target.get_input_embeddings().weight, embedding)
    assert "forward" not in vars(target.get_input_embeddings())


@needs_float16
@pytest.mark.parametrize("strided", [
    lambda weight: weight.T.contiguous().T, lambda weight: weight[:, :7].repeat(1, 2)[:, ::2],
], ids=["by columns", "every other"])  # fmt: skip
@torch.no_grad()
def test_a_strided_weight_stays_as_it_is(strided: Callable[[Tensor], Tensor], calls: Calls) -> None:
    layer = nn.Linear(14, 8)
    layer.weight = nn.Parameter(strided(layer.weight.detach()))
    x = torch.randn(3, layer.weight.shape[1])
    expected = functional.linear(x, layer.weight, layer.bias)
    with faster(layer):
        assert torch.equal(layer(x), expected)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@torch.no_grad()
def test_without_the_float16_product_other_dtypes_are_as_plain(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on ARM; float32 layers take oneDNN's product there."""
    monkeypatch.setattr(products, "has_float16", lambda: False)
    target = tiny("llama").bfloat16().to(dtype)
    expected = target(IDS).logits
    made = faster(target)
    with made:
        assert products_of(target) == {"oneDNN" if dtype is torch.float32 else "own": 22}
        assert torch.equal(target(IDS).logits, expected) or dtype is torch.float32
    if dtype is torch.float32:
        assert (made.described, len(made.layers)) == ("oneDNN", 22)
    else:
        assert (made.described, made.layers, made.seconds(1)) == ("own", {}, None)


@needs_float16
def test_seconds_follow_what_was_measured_and_which_copies_there_are() -> None:
    """For the target's layers alone."""
    target, other = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 16)).bfloat16() for _ in range(2))
    go = threading.Event()

    def make(weight: Tensor) -> Any:
        go.wait()
        return measured_copy(weight)

    kept = WeightCopies(make)
    made = FasterProducts(target, [other], copies=kept)
    described, seconds = made.described, made.seconds(4)
    go.set()
    assert described == "own"
    assert seconds == pytest.approx(192 * 2e-9)
    background.wait()
    assert made.described == "float16"
    assert made.seconds(4) == pytest.approx(192e-9)
    assert made.seconds(4, own=True) == made.seconds(25) == pytest.approx(192 * 2e-9)
    assert FasterProducts(draft=[target, other], copies=kept).seconds(4) is None
    assert FasterProducts(target).seconds(4) is None


# Only where they may be used. -----------------------------------------------------------------------------------------


def test_only_without_gradients_in_the_dtype_of_the_weight(calls: Calls) -> None:
    layer, x = nn.Linear(4, 4), torch.ones(1, 4)
    with faster(layer):
        layer(x).sum().backward()  # the kernel has no gradient
        with torch.no_grad():
            layer(x[:0])
            layer.double()(x.double())
    assert not calls
    with torch.no_grad(), faster(layer):
        layer(x.double())
    assert not calls


@torch.no_grad()
def test_autocast_is_as_plain(target: CausalLM, calls: Calls) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        expected = target(IDS).logits
        with faster(target):
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


@needs_float16
@torch.no_grad()
def test_hooks_run(calls: Calls) -> None:
    layer, x = nn.Linear(4, 4).bfloat16().float(), torch.randn(2, 4)
    layer.register_forward_hook(lambda module, args, output: output + 1.0)
    expected = layer(x)
    with faster(layer):
        torch.testing.assert_close(layer(x), expected)
    assert calls == [("float16", 2)]
    layer.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))
    expected = layer(x)
    with faster(layer):
        assert torch.equal(layer(x), expected)
    assert calls == [("float16", 2)], "a hook before the product may change the weight"


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


def logits_of(target: CausalLM, **arguments: Any) -> Tensor:
    arguments |= {"output_logits": True, "return_dict_in_generate": True}
    outputs = target.generate(IDS, max_new_tokens=12, do_sample=False, **arguments)
    return torch.stack(outputs.logits)


@needs_float16
def test_generate_uses_copies_and_detach_gives_them_back(target: CausalLM, calls: Calls) -> None:
    expected, state, threads = logits_of(target), set(target.state_dict()), threading.active_count()
    assistant = configured(SpecDecPPAssistant.from_early_exit(target, 1), **FIXED)
    background.wait()
    torch.testing.assert_close(logits_of(target, assistant_model=assistant), expected)
    assert ("float16", 4) in calls, "the prompt's pass too"
    assert assistant.stats.decided["products"] == "float16"
    assert (set(target.state_dict()), assistant.copies.bytes) == (state, 2 * elements_of(target))
    made = [weakref.ref(copy) for copy in {each.made.copy for each in assistant.copies._copies.values()}]
    assert len(made) == 22
    assistant.detach(target)
    gc.collect()
    assert (assistant.copies.bytes, [each() for each in made], threading.active_count()) == (0, [None] * 22, threads)
    calls.clear()
    assert torch.equal(logits_of(target), expected)
    assert not calls


def elements_of(target: CausalLM) -> int:
    return sum(each.weight.numel() for each in target.modules() if type(each) is nn.Linear)


@needs_float16
def test_texts_are_not_delayed_by_copies_that_are_not_made(target: CausalLM, calls: Calls) -> None:
    """The first text begins with PyTorch's own products, and says so."""
    go, expected = threading.Event(), logits_of(target)

    def make(weight: Tensor) -> Any:
        go.wait()
        return measured_copy(weight)

    assistant = assistant_for(target, attached=False, **FIXED, int8_draft=False)
    assistant.copies = WeightCopies(make)
    assistant.attach(target)
    try:
        torch.testing.assert_close(logits_of(target, assistant_model=assistant), expected)
        assert (calls, assistant.stats.decided["products"]) == ([], "own")
    finally:
        go.set()
    assert assistant.warm_up() >= 0.0, "which waits for them"
    logits_of(target, assistant_model=assistant)
    assert (bool(calls), assistant.stats.decided["products"]) == (True, "float16")


@pytest.mark.parametrize("off", [{"cpu_products": "off"}, {"reproducible": True}], ids=str)
def test_off_is_off(target: CausalLM, calls: Calls, off: dict[str, Any]) -> None:
    expected = logits_of(target)
    assistant = assistant_for(target, **FIXED, **off)
    actual = logits_of(target, assistant_model=assistant)
    background.wait()
    assert (calls, assistant.copies.bytes) == ([], 0)
    assert torch.equal(actual[0], expected[0]), "the prompt's pass is bit for bit that of plain generation"
    torch.testing.assert_close(actual, expected)


def test_turned_off_later_they_are_given_back(target: CausalLM, calls: Calls) -> None:
    assistant = assistant_for(target, **FIXED)
    background.wait()
    assert assistant.copies.bytes > 0
    configured(assistant, **FIXED, cpu_products="off")
    logits_of(target, assistant_model=assistant)
    assert (calls, assistant.copies.bytes) == ([], 0)


DRAFTS: dict[str, Callable[[CausalLM], SpecDecPPAssistant]] = {
    "early exit": lambda target: configured(SpecDecPPAssistant.from_early_exit(target, 1), **FIXED),
    "model": lambda target: assistant_for(target, **FIXED),
    "lookup": lambda target: assist(target, "lookup", default=False),
    "tree": lambda target: assistant_for(target, tree="dyspec", tree_budget=6),
    "throughput": lambda target: assistant_for(target, rule="throughput"),
}


@needs_float16
@pytest.mark.daily("1-tree", "2-throughput")
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rows", [1, 2])
def test_greedy_texts_are_plains(draft: str, rows: int, calls: Calls) -> None:
    """In float32; in bfloat16 a text is that of plain generation on the same products, up to attention's rounding."""
    if rows > 1 and draft == "tree":
        pytest.skip("batches draft chains")
    target = quiet_later_layers(tiny("llama")).bfloat16().float()
    ids = torch.cat([prompt(12, seed) for seed in range(rows)])
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    expected = target.generate(ids, **options)
    assistant = DRAFTS[draft](target)
    background.wait()
    for _ in range(2):
        assert torch.equal(target.generate(ids, assistant_model=assistant, **options), expected)
    assert {name for name, _ in calls} == {"float16"}


def test_a_deleted_assistant_leaves_nothing(target: CausalLM) -> None:
    of_own_class(target)
    first, second = (assistant_for(target, **FIXED) for _ in range(2))
    for assistant in (first, second):
        target.generate(IDS, max_new_tokens=4, assistant_model=assistant)
    background.wait()
    copies = weakref.ref(second.copies.current(cast("nn.Linear", target.lm_head)))
    del first, assistant
    gc.collect()
    assert copies() is not None
    assert has_our_methods(target), "the second is attached"
    del second
    gc.collect()
    assert copies() is None
    assert not has_our_methods(target)


def test_copies_of_a_target_are_neither_pickled_nor_copied(target: CausalLM) -> None:
    size = len(pickle.dumps(target))
    assistant = assistant_for(target, **FIXED)
    background.wait()
    with assistant.setup().products(target):
        assert len(pickle.dumps(target)) < size + 2000
        twin = copy.deepcopy(target)
        assert products_of(twin) == {"own": 22}
    assert set(twin.state_dict()) == set(target.state_dict())
    assert torch.equal(logits_of(twin), logits_of(target))
