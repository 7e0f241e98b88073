"""Drafts that compute in int8: the target's output is as ever, and its layers are left alone."""

from typing import Any

import pytest
import torch
from support.devices.products import products_of
from support.targets import models
from support.targets.models import configured, prompt, quiet_later_layers, tiny
from support.targets.watchers import heard
from torch import nn
from torch.nn import functional

from hf_specdecpp.assistant import SpecDecPPAssistant
from hf_specdecpp.config.speculation import Decisions
from hf_specdecpp.generation import setup
from hf_specdecpp.models.cpu import faster_products
from hf_specdecpp.models.cpu.faster_products import FasterProducts
from hf_specdecpp.models.cpu.products import MOST_INT8_ROWS, Int8Weight, has_int8, int8_copy
from hf_specdecpp.models.cpu.weight_copies import WeightCopies

pytestmark = pytest.mark.skipif(not has_int8(), reason="this PyTorch has no int8 products")
SPECULATION: list[dict[str, Any]] = [
    {"rule": "fixed", "num_tokens": 4},
    {"rule": "threshold", "threshold": 0.6},
    {"tree": "dyspec", "tree_budget": 8, "tree_depth": 4},
]


@pytest.fixture
def small_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of tiny models take part, too."""
    monkeypatch.setattr(faster_products, "LEAST_ELEMENTS", 1)


@pytest.mark.parametrize("shape", [(64,), (1, 64), (2, 3, 64)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_product_is_nearly_that_of_the_layer(shape: tuple[int, ...], bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 48, bias=bias).to(dtype), torch.randn(shape).to(dtype)
    with torch.no_grad():
        expected, found = layer(x), Int8Weight.of(layer.weight).multiply(x, layer.bias)
    assert (found.shape, found.dtype) == (expected.shape, dtype)
    assert 0.0 < float((found - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_sums_do_not_overflow(sign: float) -> None:
    """Where they would, inputs have 7 bits; sums of products of two largest levels are exact then."""
    found = Int8Weight.of(torch.full((16, 256), -3.0)).multiply(torch.full((2, 256), sign * 2.0), None)
    torch.testing.assert_close(found, torch.full((2, 16), sign * -6.0 * 256), rtol=1e-5, atol=0.0)


def test_nothing_is_nothing() -> None:
    weight, bias = torch.randn(16, 64), torch.randn(16)
    weight[3] = 0.0
    assert torch.equal(Int8Weight.of(weight).multiply(torch.zeros(2, 64), bias), bias.expand(2, -1))
    assert float(Int8Weight.of(weight).multiply(torch.randn(2, 64), None)[:, 3].abs().max()) == 0.0


@pytest.mark.usefixtures("small_layers")
def test_only_a_few_rows_of_an_unchanged_weight_are_in_int8() -> None:
    layer, int8 = nn.Linear(64, 48), WeightCopies(int8_copy)
    few, many = torch.randn(MOST_INT8_ROWS, 64), torch.randn(MOST_INT8_ROWS + 1, 64)
    with torch.no_grad():
        with FasterProducts(draft=[layer], int8=int8):
            assert products_of(layer) == {"int8": 1}
            assert not torch.equal(layer(few), functional.linear(few, layer.weight, layer.bias))
            assert torch.equal(layer(many), functional.linear(many, layer.weight, layer.bias))
            layer.weight.mul_(2.0)
            assert torch.equal(layer(few), functional.linear(few, layer.weight, layer.bias))
        with FasterProducts(draft=[layer], int8=int8):  # the copy is made anew
            assert 0.0 < float((layer(few) - functional.linear(few, layer.weight, layer.bias)).abs().max()) < 0.2
    assert products_of(layer) == {"own": 1}


def assistant_of(kind: str, target: Any, **speculation: Any) -> SpecDecPPAssistant:
    if kind != "early exit":
        return models.assistant_of(kind, target, **speculation)
    return configured(SpecDecPPAssistant.from_early_exit(target, 2, draft_vocab=range(3, 46)), **speculation)


@pytest.mark.daily(
    "{'rule': 'fixed', 'num_tokens': 4}-independent", "{'rule': 'threshold', 'threshold': 0.6}-early exit",
    "{'tree': 'dyspec', 'tree_budget': 8, 'tree_depth': 4}-conditioned",
)  # fmt: skip
@pytest.mark.usefixtures("small_layers")
@pytest.mark.parametrize("kind", ["independent", "early exit", "conditioned", "eagle3"])
@pytest.mark.parametrize("speculation", SPECULATION, ids=str)
def test_the_output_is_the_targets(kind: str, speculation: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    target = quiet_later_layers(tiny("llama")).float()
    options: dict[str, Any] = {"max_new_tokens": 24, "pad_token_id": 0}
    plain = target.generate(prompt(), do_sample=False, **options)
    assistant = assistant_of(kind, target, int8_draft=True, cpu_products="off", **speculation)
    used: dict[bool, list[set[str]]] = {True: [], False: []}  # by whether it was the target
    heard(
        monkeypatch,
        type(target.model),
        "forward",
        lambda decoder, *_, **__: used[decoder is target.model].append(set(products_of(decoder))),
    )
    assert torch.equal(target.generate(prompt(), do_sample=False, assistant_model=assistant, **options), plain)
    assert all(products == {"own"} for products in used[True])
    assert {"int8"} in used[False]
    assert assistant.stats.accepted > 0
    target.generate(prompt(), do_sample=True, assistant_model=assistant, **options)


@pytest.mark.usefixtures("small_layers")
def test_a_layer_that_is_the_targets_too_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that somebody made of the target's own modules; the mutant puts them into int8."""
    target = quiet_later_layers(tiny("llama")).float()
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(prompt(), output_logits=True, return_dict_in_generate=True, **options)

    def off_by() -> float:
        draft = tiny("llama", num_hidden_layers=2).float()
        draft.model.layers[0], draft.lm_head = target.model.layers[0], target.lm_head
        assistant = SpecDecPPAssistant.from_draft(draft, target)
        configured(assistant, rule="fixed", num_tokens=4, int8_draft=True, cpu_products="off")
        found = target.generate(
            prompt(), assistant_model=assistant, output_logits=True, return_dict_in_generate=True, **options
        )
        assistant.detach()
        return float((found.logits[-1] - plain.logits[-1]).abs().max())

    assert off_by() < 1e-3
    monkeypatch.setattr(setup, "FasterProducts", lambda _, draft, **rest: FasterProducts(None, draft, **rest))
    assert off_by() > 1e-3


@pytest.mark.usefixtures("small_layers")
def test_copies_go_with_the_setting_and_the_target() -> None:
    target = quiet_later_layers(tiny("llama")).float()
    options: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assistant = assistant_of("early exit", target, rule="fixed", int8_draft=True)
    target.generate(prompt(), assistant_model=assistant, **options)
    assert assistant.int8.bytes > 0
    assistant.decisions = Decisions(int8_draft=False)
    target.generate(prompt(), assistant_model=assistant, **options)
    assert assistant.int8.bytes == 0
    assistant.decisions = Decisions(int8_draft=True)
    target.generate(prompt(), assistant_model=assistant, **options)
    assistant.detach()
    assert assistant.int8.bytes == 0
