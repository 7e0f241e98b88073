"""What a pass of the target over one token takes, by passes over several: seconds are made up."""

from typing import Any

import pytest
from support.devices.products import needs_float16, use_copies
from support.targets.models import assistant_for, prompt, tiny
from support.targets.watchers import unnoticed

from hf_specdecpp.models.causal_lm import CausalLM
from hf_specdecpp.models.cpu.weight_copies import background
from hf_specdecpp.throughput import pass_times
from hf_specdecpp.throughput.pass_times import EVERY, WARM, PassTimes, pass_times_of


class Products:
    """Seconds of the target's large layers for 1 and 4 tokens, with copies and with PyTorch's own products."""

    copied, own = {1: 0.070, 4: 0.080}, {1: 0.095, 4: 0.125}

    def seconds(self, rows: int, own: bool = False) -> float:
        return (self.own if own else self.copied)[rows]


class NoLayers:
    def seconds(self, rows: int, own: bool = False) -> None:
        return None


PRODUCTS: Any = Products()
NONE: Any = NoLayers()


def times_of(*passes: tuple[int, float, float], products: Any = PRODUCTS) -> PassTimes:
    times = PassTimes()
    for each in passes:
        times.record_pass(*each, 1, products)
    return times


def test_the_example_of_the_docstring(monkeypatch: pytest.MonkeyPatch) -> None:
    times = times_of(*[(4, 0.120, 0.120)] * 5)
    assert times.seconds(1, 5, PRODUCTS) == pytest.approx((0.135, 0.110))
    monkeypatch.setattr(pass_times, "_narrower", lambda seconds, *_: seconds)  # the mutant
    assert times.seconds(1, 5, PRODUCTS)[1] == pytest.approx(0.120)


def test_passes_that_were_made_count_more_than_what_is_known_of_products() -> None:
    times = times_of(*[(4, 0.120, 0.120)] * 5, (1, 0.1, 0.1), (1, 0.1, 0.1))
    same = times.seconds(1, 7, PRODUCTS)[1]
    assert same is not None
    assert 0.1 < same < 0.11, "two are too few"
    times.record_pass(1, 0.1, 0.1, 1, PRODUCTS)
    assert times.seconds(1, 8, PRODUCTS) == pytest.approx((0.125, 0.1))


@pytest.mark.parametrize(("tokens", "before", "after"), [(1, 0.135, 0.110), (4, 0.165, 0.120)])
def test_passes_before_copies_were_made_had_plain_products(tokens: int, before: float, after: float) -> None:
    """What copies save is added to the passes that had them, and not to those before, which are compared with passes
    over one token on the same products."""
    products: Any = Products()
    with_copies, products.copied = products.copied, products.own
    times = times_of(*[(tokens, before, before)] * 20, products=products)
    products.copied = with_copies
    for _ in range(5):
        times.record_pass(tokens, after, after, 1, products)
    assert times.seconds(1, 25, products) == pytest.approx((0.135, (20 * 0.135 + 5 * 0.110) / 25))
    times._latest = type(times._latest)(each._replace(saved=0.025) for each in times._latest)  # the mutant
    plain = times.seconds(1, 25, products)[0]
    assert plain is not None
    assert plain > 1.1 * 0.135


@pytest.mark.parametrize("busy", [1.0, 2.0, 3.5])
def test_a_busy_machine_shows_in_both(busy: float) -> None:
    """Passes wait for a processor, which their seconds of it do not say; the latest rounds alone count."""
    times = times_of(*[(4, 0.120, 9.9)] * 5, *[(4, 0.120, busy * 0.120)] * 5)
    plain, same = times.seconds(1, 5, PRODUCTS)
    assert (plain, same) == pytest.approx((busy * 0.135, busy * 0.110))


def test_where_products_say_nothing_passes_are_made_beside_the_rounds() -> None:
    times = PassTimes()
    assert times.seconds(1, 9, NONE) == times.seconds(1, 9, PRODUCTS) == (None, None)
    made = []
    for index in range(3 * EVERY):
        if times.is_missing(1, NONE):
            times._beside[1].append(0.1)  # what `make` does
            times._rounds = 0
            made.append(index)
    assert made == [0, 1, EVERY + 1, 2 * EVERY + 1]
    assert WARM == 2
    assert times.seconds(1, 9, NONE) == (0.1, 0.1)
    times.record_pass(4, 0.2, 0.6, 1, NONE)
    assert times.seconds(1, 9, NONE) == pytest.approx((0.3, 0.3)), "by the clock, of a busy machine"
    assert not any(times.is_missing(1, PRODUCTS) for _ in range(2 * EVERY))


@pytest.mark.parametrize("seconds", [0.0, -1.0])
def test_clocks_that_stand_or_go_back(seconds: float) -> None:
    plain, same = times_of(*[(4, seconds, seconds)] * 5).seconds(1, 5, PRODUCTS)
    assert plain is not None
    assert same is not None
    assert 0.0 < same <= plain < float("inf")


# In texts. ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def target() -> CausalLM:
    return tiny("llama").bfloat16().float()


def said(target: CausalLM, assistant: Any, new_tokens: int = 40) -> Any:
    target.generate(prompt(), assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False)
    return assistant.stats


@needs_float16
def test_with_copies_a_plain_pass_takes_what_their_products_save(
    target: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_copies(monkeypatch)
    assistant, note = assistant_for(target, rule="fixed", num_tokens=2), PassTimes.record_pass
    background.wait()
    with_copies = assistant.setup().products(target).seconds(1)
    assert with_copies is not None
    monkeypatch.setattr(
        PassTimes,
        "record_pass",
        lambda self, tokens, _work, _clock, *others: note(self, tokens, 3 * with_copies, 3 * with_copies, *others),
    )
    stats = said(target, assistant)
    assert stats.same_pass_seconds == pytest.approx(3 * with_copies)
    assert stats.plain_pass_seconds == pytest.approx(4 * with_copies)
    assert stats.compared_passes == 0


def test_a_target_without_copies_makes_few_passes_of_its_own(target: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assistant = assistant_for(target, rule="fixed", num_tokens=2, cpu_products="off")
    passes: list[int] = []
    target.register_forward_pre_hook(unnoticed(lambda *_: passes.append(1)))
    for most in (WARM, 1):  # the latter `EVERY` rounds after the former
        monkeypatch.setattr(pass_times, "EVERY", pass_times_of(target)._rounds + 5 if most == 1 else 10**6)
        passes.clear()
        stats = said(target, assistant, 160)
        assert len(passes) - stats.target_passes == stats.compared_passes == most
        assert stats.plain_pass_seconds == stats.same_pass_seconds > 0.0


def test_forgetting(target: CausalLM) -> None:
    assistant = assistant_for(target, rule="fixed", num_tokens=2)
    said(target, assistant, 24)
    assert pass_times_of(target).seconds(1, 1, NONE) != (None, None)
    assistant.memory.measure_again()
    assert pass_times_of(target).seconds(1, 1, NONE) == (None, None)
