"""Medians, ratios and their intervals."""

import random

import pytest

from hf_specdecpp.figures import median_of_ratios, ratio_of_sums


def test_median_is_not_moved_by_one_disturbed_run() -> None:
    ratios = [1.5, 1.52, 1.48, 1.51, 1.49, 1.5, 0.2]
    middle, low, high = median_of_ratios(ratios)
    assert middle == 1.5
    assert low <= middle <= high
    assert high <= 1.52


def test_one_prompt_has_no_width() -> None:
    assert median_of_ratios([1.3]) == (1.3, 1.3, 1.3)
    assert ratio_of_sums([3.0], [2.0]) == (1.5, 1.5, 1.5)


def test_ratio_weighs_texts_by_their_length() -> None:
    middle, low, high = ratio_of_sums([100.0, 1.0], [50.0, 1.0])
    assert middle == pytest.approx(101 / 51)
    assert low == pytest.approx(1.0)
    assert high == pytest.approx(2.0)


@pytest.mark.parametrize("size", [20, 80])
def test_intervals_cover_what_they_say(size: int) -> None:
    """Of intervals from many samples of one distribution 95 % hold its median; bootstrap ones a little fewer."""
    draw = random.Random(size)
    held, widths = 0, 0.0
    for seed in range(100):
        _, low, high = median_of_ratios([draw.lognormvariate(0.3, 0.2) for _ in range(size)], seed)
        held += low <= 2.718281828**0.3 <= high
        widths += high - low
    assert 86 <= held < 100
    assert widths / 100 < 4.0 * 0.2 * 1.35 * 1.2533 / size**0.5 * 1.5
