"""Which products a model's passes run on: measured on its own passes, once, then kept."""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import assistant_for, partly_agreeing, prompt, tiny
from torch import nn

from hf_specdecpp import files
from hf_specdecpp.drafting.drafter import Drafter
from hf_specdecpp.models import cpu_products
from hf_specdecpp.models.cpu_products import FasterProducts, PackedWeights, products_of
from hf_specdecpp.models.products import OWN, Product, Ways
from hf_specdecpp.throughput import plain_passes, product_choice
from hf_specdecpp.throughput.plain_passes import PassSeconds

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

Times = dict[int, dict[Product, float]]
PACKED: Times = {1: {"own": 4.0, "onednn": 4.0, "packed": 2.0}}
ONEDNN: Times = {1: {"own": 4.0, "onednn": 2.0, "packed": 2.0}}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Empty caches, on disk and in memory; layers of every size take part."""
    monkeypatch.setattr(product_choice, "_known", {})
    monkeypatch.setattr(files, "cached_assets_path", lambda *names: tmp_path)
    monkeypatch.setattr(cpu_products, "LEAST_ELEMENTS", 1)
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of modules of each measurement; the times are made up."""
    counts: list[int] = []

    def made_up(modules: Any, _read: Any, packed: PackedWeights | None, _longest: float) -> Times:
        counts.append(len(modules))
        if packed is None:
            return {1: {"own": 4.0, "onednn": 4.0}}
        for module in modules:
            FasterProducts(cpu_products.Part([module], Ways.always("packed")), packed=packed)
        return PACKED

    monkeypatch.setattr(product_choice, "measure", made_up)
    return counts


def test_target_and_draft_are_measured_once(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny("llama").float()
    drafter = Drafter(partly_agreeing(target))
    first = product_choice.parts_of(target, drafter, PackedWeights())
    assert [part.ways for part in first] == [Ways.fastest(PACKED)] * 2
    monkeypatch.setattr(product_choice, "_known", {})  # another process
    again = product_choice.parts_of(target, drafter, PackedWeights())
    assert [part.ways for part in again] == [part.ways for part in first]
    assert len(measured) == 2
    assert all(part.ways.are_own for part in product_choice.parts_of(target, None, None))
    assert len(measured) == 3, "without packed weights other products are the fastest"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    product_choice.parts_of(target, None, None)
    assert len(measured) == 4
    product_choice.forget_products()
    product_choice.parts_of(target, None, None)
    assert len(measured) == 5


def test_copies_are_dropped_where_they_do_not_pay(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    target, packed = tiny("llama").float(), PackedWeights()
    product_choice.parts_of(target, None, packed)
    assert packed.bytes > 0
    product_choice.forget_products()
    made_up = product_choice.measure
    monkeypatch.setattr(product_choice, "measure", lambda *args: made_up(*args) and ONEDNN)
    parts = product_choice.parts_of(target, None, packed)
    assert packed.bytes == 0
    with FasterProducts(*parts, packed=packed):
        assert products_of(target) == {"onednn": 22}
    assert packed.bytes == 0


def test_models_without_large_layers_are_not_measured(measured: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_products, "LEAST_ELEMENTS", 10**9)
    assert [part.ways for part in product_choice.parts_of(tiny("llama").float(), None, None)] == [OWN]
    assert not measured


@pytest.mark.parametrize("packs", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_a_measurement(family: str, packs: bool) -> None:
    target = tiny(family).float()
    lengths: list[int] = []
    target.register_forward_pre_hook(
        lambda _, __, kwargs: lengths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    begin = time.perf_counter()
    times = product_choice.measure(
        [target], lambda count: target(input_ids=torch.arange(count)[None] % 7), PackedWeights() if packs else None, 32
    )
    assert time.perf_counter() - begin < 2.0 * product_choice.SECONDS
    assert sorted(times) == [1, 2, 3, 4, 6, 8, 16], "64 are more than it can read"
    assert set(lengths) == set(times), "whole passes"
    assert all(set(each) == {"own", "onednn"} | ({"packed"} if packs else set()) for each in times.values())
    assert all(0.0 < seconds < 1.0 for each in times.values() for seconds in each.values())


def test_a_slow_model_is_measured_by_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choice, "SECONDS", 0.0)
    passes: list[int] = []
    times = product_choice.measure([nn.Linear(8, 8)], passes.append, PackedWeights())
    assert sorted(times) == [1, 2, 4, 8]
    assert len(passes) == 1 + 4 * 3


def test_a_pass_that_fails_leaves_the_products_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    def read(_: int) -> None:
        raise TypeError("forward() needs pixel_values")

    layer = nn.Linear(8, 8)
    assert product_choice.ways_of([layer], {"class": "Odd"}, lambda: nullcontext(read), PackedWeights()) == OWN


@pytest.mark.parametrize("error", [OSError("read-only"), ValueError("Corrupted assets folder")])
def test_a_cache_that_cannot_be_made_is_no_error(
    error: Exception, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> Path:
        raise error

    monkeypatch.setattr(files, "cached_assets_path", fail)
    target = tiny("llama").float()
    for _ in range(2):
        product_choice.parts_of(target, None, None)
    assert measured == [1], "kept for this process all the same"


# What a text finds. ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("same", "asked", "stays"), [(2.0, [3, 9, 3], False), (1.01, [3], True), (0.5, [3], True)])
def test_products_that_a_text_finds_slower_are_left(
    same: float, asked: list[int], stays: bool, measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next text makes its passes over one token as plain generation does, and so do later processes."""
    passes: list[int] = []
    target = tiny("llama").float()

    def way_of_one_row() -> tuple[Product, int]:
        return product_choice.parts_of(target, None, PackedWeights())[0].ways.of(1)

    def time_passes(*args: Any) -> PassSeconds:
        passes.append(args[4] if len(args) > 4 else plain_passes.TIMED_PASSES)
        return PassSeconds(1.0, 1.0 if way_of_one_row() == ("own", 0) else same)

    monkeypatch.setattr(plain_passes, "time_passes", time_passes)
    assistant = assistant_for(target, rule="fixed", num_tokens=2, pack_weights=True)
    plain = target.generate(prompt(), max_new_tokens=12, do_sample=False)
    for _ in range(3):
        text = target.generate(prompt(), assistant_model=assistant, max_new_tokens=12, do_sample=False)
        assert torch.equal(text, plain)
    assert passes == asked
    monkeypatch.setattr(product_choice, "_known", {})  # another process
    assert (way_of_one_row() == ("packed", 0)) == stays
