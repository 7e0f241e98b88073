"""Products with copies of weights: those of the layer in float64, and a row has the same bits whatever is beside."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.devices.products import needs_float16
from torch import Tensor
from torch.nn import functional

from hf_specdecpp.models.cpu import products
from hf_specdecpp.models.cpu.products import ALL, Float16Weight, OneDnnWeight, ProductTimes, has_float16, kind_of_copy

ERROR = {torch.float32: 3e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # relative, of a whole result


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_rows(*scales: float) -> Tensor:
    """A weight in bfloat16 whose first rows are smaller than the others."""
    weight = random(33, 70).bfloat16().float()
    weight[: len(scales)] *= torch.tensor(scales)[:, None]
    return weight


def with_elements(*values: float) -> Tensor:
    weight = with_rows()
    weight[0, : len(values)] = torch.tensor(values)
    return weight


FITTING: dict[str, Tensor] = {
    "bfloat16": with_rows(),
    "float16": random(48, 64).half().float(),
    "small": with_rows() * 2.0**-24,
    "large": with_rows() * 2.0**30,
    "one small row": with_rows(2.0**-20),
    "elements below 2^-24 of their row": with_elements(1e-12, -3.1e-20, 2.0**-149, -0.0),
    "zeros": torch.zeros(5, 7),
    "one element": torch.tensor([[-3.0]]),
    "in parts": random(40, 64).bfloat16().float(),
}
OTHERS: dict[str, Tensor] = {
    "float32": random(48, 64),
    "one element of float32": with_elements(1.0 + 2.0**-20),
    "a row below what float16 holds": with_rows(2.0**-33),
    "NaN": with_elements(math.nan),
    "infinity": with_elements(1.0, -math.inf),
    "beyond the scale": with_rows() * 2.0**-70,
    "far beyond the scale": with_rows() * 2.0**80,
    "empty": torch.zeros(0, 7),
    "without inputs": torch.zeros(7, 0),
}


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of more elements are packed in parts."""
    monkeypatch.setattr(products, "AT_ONCE", 2400)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def error_of(copy: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Norm of the product's error, relative to the product in float64."""
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = copy.multiply(x, bias)
    assert (found.dtype, found.shape) == (x.dtype, expected.shape)
    return float((found.double() - expected).norm() / expected.norm().clamp_min(1e-300))


@needs_float16
@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize("dtype", ERROR, ids=str)
@pytest.mark.usefixtures("threads")
def test_the_product_is_that_of_float64(name: str, dtype: torch.dtype) -> None:
    weight = FITTING[name].to(dtype)
    if name in ("small", "large") and dtype is torch.float16:
        weight = FITTING["one small row"].to(dtype)  # float16 itself does not hold those
    copy, bias = Float16Weight.of(weight), random(len(weight), seed=2).to(dtype)
    assert kind_of_copy(weight) is Float16Weight
    assert (len(copy.parts) > 1) is (name in ("in parts", "float16"))
    for rows in (1, 3, 40):
        x = random(rows, weight.shape[1], seed=rows).to(dtype)
        for each in (None, bias):
            assert error_of(copy, x, weight, each) <= ERROR[dtype]


@needs_float16
@pytest.mark.parametrize("name", ["bfloat16", "in parts"])
@pytest.mark.parametrize("dtype", ERROR, ids=str)
def test_a_row_has_the_same_bits_whatever_is_beside(name: str, dtype: torch.dtype, threads: int) -> None:
    weight = FITTING[name].to(dtype)
    copy, bias = Float16Weight.of(weight), random(len(weight), seed=2).to(dtype)
    x = random(40, weight.shape[1], seed=3).to(dtype)
    alone = torch.cat([copy.multiply(row[None], bias) for row in x]) if threads == 1 else copy.multiply(x, bias)
    for rows in range(1, 41, 1 if threads == 1 else 9):
        assert torch.equal(copy.multiply(x[:rows], bias), alone[:rows])
    beside = x.clone()
    beside[1::2] = torch.tensor([1e4, math.nan, -math.inf, 0.0], dtype=dtype).repeat(5)[:, None]
    assert torch.equal(copy.multiply(beside, bias)[::2], alone[::2])


@needs_float16
@pytest.mark.parametrize("change", [
    lambda x: x[0], lambda x: x.view(2, 3, -1), lambda x: x[::2], lambda x: x.T.contiguous().T, lambda x: x.flip(1),
    lambda x: x[:, None], lambda x: x[:1].expand(4, -1),
], ids=["one dim", "three", "strided", "by columns", "flipped", "middle", "expanded"])  # fmt: skip
def test_inputs_of_any_shape(change: Callable[[Tensor], Tensor]) -> None:
    weight = FITTING["bfloat16"]
    x = change(random(6, weight.shape[1], seed=1))
    found = Float16Weight.of(weight).multiply(x, None)
    torch.testing.assert_close(found, functional.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", OTHERS)
def test_a_weight_that_does_not_fit_is_left_to_onednn(name: str) -> None:
    weight = OTHERS[name]
    assert not Float16Weight.fits(weight)
    assert kind_of_copy(weight) is (OneDnnWeight if torch.backends.mkldnn.is_available() else None)
    if name not in ("float32", "one element of float32"):
        # Where a part is beyond bfloat16, too.
        assert kind_of_copy(weight.bfloat16()) is None


# Mutants. -------------------------------------------------------------------------------------------------------------


@needs_float16
def test_a_forgotten_scale_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = FITTING["bfloat16"], random(3, 70, seed=1)
    assert error_of(Float16Weight.of(weight), x, weight, None) < ERROR[torch.float32]
    forgotten = Float16Weight(Float16Weight.of(weight).parts, torch.ones(1))
    assert error_of(forgotten, x, weight, None) > 1.0
    monkeypatch.setattr(products, "_scale_of", lambda _: 1.0)
    small = FITTING["small"]
    assert error_of(Float16Weight.of(small), x, small, None) > 1e-2
    assert not Float16Weight.fits(small)


@needs_float16
@pytest.mark.parametrize("name", ["float32", "a row below what float16 holds", "NaN", "beyond the scale"])
def test_a_weight_that_is_taken_though_it_does_not_fit_shows(name: str) -> None:
    weight = OTHERS[name]
    x = random(3, weight.shape[1], seed=1)
    expected, found = functional.linear(x.double(), weight.double()), Float16Weight.of(weight).multiply(x, None)
    errors = (found - expected).norm(dim=0) / expected.norm(dim=0)
    assert not bool((errors < 1e-5).all())


# Whether there are such products here. --------------------------------------------------------------------------------


def asked() -> bool:
    return has_float16.__wrapped__()


@needs_float16
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_copy_does_not_depend_on_the_default_dtype(dtype: torch.dtype) -> None:
    """`from_pretrained` changes it for all threads, also for the one that makes copies in the background."""
    weight, x = with_rows().to(dtype), random(4, 70).to(dtype)
    expected, before = Float16Weight.of(weight).multiply(x, None), torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        copy = Float16Weight.of(weight)
        assert torch.equal(copy.multiply(x, None), expected)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(copy.multiply(x, None), expected)


@needs_float16
def test_without_fbgemm_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise AttributeError("'_OpNamespace' 'quantized' object has no attribute 'linear_prepack_fp16'")

    def unable(*_: Any) -> Any:
        raise RuntimeError("this processor has no AVX2")

    product = torch.ops.quantized.linear_dynamic_fp16
    assert asked()
    for engine in ("onednn", "qnnpack"):
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.quantized, "engine", engine)
            assert not asked()
    for name, other in (
        ("linear_prepack_fp16", missing),
        ("linear_prepack_fp16", unable),
        ("linear_dynamic_fp16", lambda x, packed: 1.001 * product(x, packed)),
        ("linear_dynamic_fp16", lambda x, packed: math.nan * product(x, packed)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.quantized, name, other)
            assert not asked()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "NO AVX")
    assert not asked()


@pytest.mark.parametrize(("dtype", "expected"), [(torch.float32, OneDnnWeight), (torch.bfloat16, None)], ids=str)
def test_float32_weights_are_onednns_then(dtype: torch.dtype, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_float16", lambda: False)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert kind_of_copy(FITTING["bfloat16"].to(dtype)) is expected
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert kind_of_copy(FITTING["bfloat16"].to(dtype)) is None


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
@torch.no_grad()
def test_onednns_product() -> None:
    weight, bias = OTHERS["float32"], random(48, seed=2)
    for rows in (1, 3, 40):
        assert error_of(OneDnnWeight.of(weight), random(rows, 64, seed=1), weight, bias) < ERROR[torch.float32]


# What was measured, and what is decided by that. ----------------------------------------------------------------------


@pytest.mark.parametrize(("own", "copied", "least", "most"), [
    ((2.3, 2.4, 3.9, 12.0), (0.9, 1.4, 4.9, 15.0), 1, 24),  # of the docstring
    ((1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0), 1, 0),
    ((1.0, 1.0, 1.0, 1.0), (1.3, 0.5, 0.5, 1.0), 3, 24),
    ((1.0, 1.0, 1.0, 1.0), (1.3, 1.3, 0.5, 1.0), 9, 24),
    ((1.0, 1.0, 1.0, 1.0), (0.5, 0.5, 1.4, 0.5), 1, 8),
    ((1.0, 1.0, 1.0, 1.0), (0.5, 1.4, 0.5, 0.5), 1, 2),
    ((1.0, 1.0, 1.0, 1.0), (0.96, 0.96, 0.96, 0.96), 1, 0),
    ((3.0, 5.8, 8.3, 21.0), (0.9, 1.4, 2.9, 9.7), 1, ALL),  # an EPYC: faster for prompts, too
    ((1.0, 1.0, 1.0, 1.0), (1.3, 1.3, 1.4, 0.5), 25, ALL),
])  # fmt: skip
def test_for_which_rows(own: Any, copied: Any, least: int, most: int) -> None:
    times = ProductTimes.of(own, copied)
    assert (times.least, times.most) == (least, most)


@pytest.mark.parametrize(("own", "copied", "most"), [
    ((4.6, 10.0, 26.7, 90.0), (3.5, 4.2, 9.0, 30.0), 32),
    ((6.7, 5.6, 5.9, 10.0), (6.0, 6.0, 9.9, 30.0), 0),  # AMX: faster for one row only
    ((4.9, 6.8, 10.2, 20.0), (5.4, 5.7, 9.0, 40.0), 32),  # slower for one row only
])  # fmt: skip
def test_in_half_precision_for_all_rows_or_none(own: Any, copied: Any, most: int) -> None:
    times = ProductTimes.of(own, copied, is_half=True)
    assert (times.least, times.most) == (1, most)


@pytest.mark.parametrize("alike", [True, False])
def test_rows_round_alike_if_several_have_the_bits_of_one(alike: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.stack([row.float() @ weight.float().T for row in x])
        return rows if alike or len(x) < 4 else rows * (1 + 2.0**-20)

    monkeypatch.setattr(products, "functional", SimpleNamespace(linear=linear))
    monkeypatch.setattr(products, "_alike", {})
    state = torch.get_rng_state()
    assert products.rows_round_alike(random(40, 300).bfloat16()) is alike
    assert torch.equal(torch.get_rng_state(), state)
