"""Which products a target's passes run on: decided on the passes of texts, in turns. Seconds are made up."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.models import assistant_for, prompt, tiny
from support.watchers import unnoticed

from hf_specdecpp.models import cpu_products
from hf_specdecpp.models.products import Product
from hf_specdecpp.throughput.target_passes import AT_ONCE, FEW, PASSES, TargetPasses, passes_of, rarest, ratio_of

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")

Seconds = dict[Product, float]


def busy(every: int, times: float = 2.0) -> Iterator[float]:
    """Now and then a pass takes longer."""
    while True:
        yield from [1.0] * (every - 1)
        yield times


def decide(passes: TargetPasses, seconds: Seconds, load: Iterator[float], rows: int = 1, most: int = 99) -> int:
    """Passes in turns until they are enough: how many there were."""
    for count in range(most):
        if rows in passes.chosen:
            return count
        product = rarest(passes._seconds[rows])
        passes.note(rows, product, seconds[product] * next(load))
    return most


@pytest.mark.parametrize(("packed", "chosen", "most"), [
    (2.0, "own", 2 * FEW),
    (1.05, "own", 2 * PASSES),
    (1.0, "own", 2 * PASSES),
    (0.97, "own", 2 * PASSES),
    (0.93, "packed", 2 * PASSES),
    (0.5, "packed", 2 * FEW),
])  # fmt: skip
@pytest.mark.parametrize("every", [1000, 3, 5, 7])
def test_a_product_that_loses_is_gone_within_some_passes(packed: float, chosen: str, most: int, every: int) -> None:
    """Single passes that take twice as long change nothing, and delay little."""
    passes = TargetPasses("packed")
    count = decide(passes, {"own": 1.0, "packed": packed}, busy(every))
    assert passes.of(1) == chosen
    assert count <= (most if every == 1000 else 2 * PASSES)


@pytest.mark.parametrize("after", range(24))
@pytest.mark.parametrize("times", [0.4, 2.5])
def test_a_load_that_comes_or_goes_decides_nothing(after: int, times: float) -> None:
    """Medians of each product by itself would: half of its passes are of another machine."""
    load, passes = iter([1.0] * after + [times] * (24 - after)), TargetPasses("packed")
    decide(passes, {"own": 1.0, "packed": 1.0}, load)
    assert passes.of(1) == "own"


def test_the_example_of_the_docstring() -> None:
    passes = TargetPasses("packed")
    for own, packed in ((120.0, 66.0), (114.0, 52.0), (128.0, 60.0), (240.0, 130.0)):
        passes.note(3, "own", own)
        assert not passes.chosen
        passes.note(3, "packed", packed)
    assert [passes.of(rows) for rows in (1, 2, 3, 4, 16, 500)] == ["own", *["packed"] * 5]


def test_a_product_that_is_taken_for_all_numbers_of_rows_has_their_gain() -> None:
    """Passes over twelve rows, those of three texts with candidates, decide before enough of three were made."""
    passes = TargetPasses("packed")
    passes.note(3, "own", 1.0, is_beside=True)
    decide(passes, {"own": 1.0, "packed": 0.5}, busy(1000), rows=12)
    assert passes.of(3) == "packed"
    assert passes.seconds(3, 24) == pytest.approx((1.0, 0.5))


def test_copies_are_kept_while_they_may_be_used() -> None:
    passes = TargetPasses("packed")
    assert passes.products == {"own", "packed"}
    decide(passes, {"own": 1.0, "packed": 1.0}, busy(1000))
    assert passes.products == {"own"}
    with passes.timed(3, has_choice=False, device=torch.device("cpu")):
        assert passes.of(3) == "own", "this text has no copies"
    assert passes.products == {"own", "packed"}, "the next one has"
    decide(passes, {"own": 1.0, "packed": 0.5}, busy(1000), rows=3)
    assert (passes.products, passes.of(1)) == ({"own", "packed"}, "own")


def test_plain_passes_are_those_of_the_machine_now() -> None:
    """The example of the docstring: a machine that becomes faster shows in the rounds alone."""
    passes = TargetPasses()
    passes.note(4, "own", 900.0)  # kernels are made
    passes.note(1, "own", 900.0, is_beside=True)
    for plain, four in ((110.0, 100.0), (60.0, 50.0)):
        passes.note(1, "own", plain, is_beside=True)
        passes.note(4, "own", four)
        passes.note(4, "own", four)
    assert passes.seconds(1, 4)[0] == pytest.approx(1.15 * 75.0)
    for seconds in (50.0, 52.0, 54.0) * 8:
        passes.note(4, "own", seconds)
    assert passes.seconds(1, 24) == pytest.approx((1.15 * 52.0, 1.15 * 52.0))
    assert ratio_of({(4, "own"): [1.0], (8, "packed"): [2.0]}, (3, "packed")) == 2.0


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> Seconds:
    """What a row costs with each product; layers of every size take part."""
    made_up: Seconds = {"own": 1.0, "packed": 1.0, "onednn": 1.0}
    note = TargetPasses.note

    def pretended(self: TargetPasses, rows: int, product: Product, _: float, is_beside: bool = False) -> None:
        note(self, rows, product, rows * made_up[product], is_beside)

    monkeypatch.setattr(TargetPasses, "note", pretended)
    monkeypatch.setattr(cpu_products, "LEAST_ELEMENTS", 1)
    return made_up


@pytest.mark.every(5)
@pytest.mark.parametrize(("packed", "gain"), [(2.0, 1.0), (1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize(
    "settings", [{"rule": "fixed", "num_tokens": 2}, {"rule": "throughput"}], ids=["fixed", "best"]
)
def test_texts_decide(packed: float, gain: float, settings: dict[str, Any], seconds: Seconds) -> None:
    """From the second text on passes over one token are as fast as plain ones, or faster; the text is never another."""
    seconds["packed"] = packed
    target = tiny("llama").float()
    assistant = assistant_for(target, **settings, pack_weights=True)
    how: dict[str, Any] = {"max_new_tokens": 96, "do_sample": False}
    plain = target.generate(prompt(), **how)
    for _ in range(2):
        assert torch.equal(target.generate(prompt(), assistant_model=assistant, **how), plain)
        assert assistant.stats.plain_pass_seconds == 1.0
    assert passes_of(target, assistant.setup().other_product(target)).of(1) == ("packed" if gain > 1.0 else "own")
    assert assistant.stats.same_pass_seconds == pytest.approx(1.0 / gain)


def test_a_setting_without_a_choice_makes_few_passes_of_its_own() -> None:
    target = tiny("llama").float()
    assistant = assistant_for(target, rule="fixed", num_tokens=2, cpu_products="off")
    passes: list[int] = []
    target.register_forward_pre_hook(unnoticed(lambda *_: passes.append(1)))
    for most in (AT_ONCE, 1):  # the latter for the verdict: EVERY passes after the last one
        passes.clear()
        target.generate(prompt(), assistant_model=assistant, max_new_tokens=160, do_sample=False)
        assert len(passes) - assistant.stats.target_passes == most


def test_forgetting(seconds: Seconds) -> None:
    target = tiny("llama").float()
    assistant = assistant_for(target, rule="fixed", num_tokens=2)
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=24, do_sample=False)
    assistant.memory.measure_again()
    assert passes_of(target, assistant.setup().other_product(target)).seconds(1, 1) == (None, None)
