"""The ways of products: which is taken for how many rows, and what is filled up."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from hf_specdecpp.models.products import MOST_ROWS, OWN, Ways, filled_up


def test_the_fastest_is_taken_by_a_margin() -> None:
    ways = Ways.fastest(
        {
            1: {"own": 40.0, "onednn": 39.0, "packed": 38.5},  # 4 % are not enough
            2: {"own": 60.0, "onednn": 50.0, "packed": 49.0},  # 2 % neither
            4: {"own": 60.0, "onednn": 60.0, "packed": 50.0},
            64: {"own": 100.0, "onednn": 110.0, "packed": 120.0},
        }
    )
    assert [ways.of(rows) for rows in (1, 2, 3, 4, 5, 16)] == [
        ("own", 0),
        ("onednn", 0),
        ("onednn", 0),  # as two rows go
        ("packed", 0),
        ("packed", 0),
        ("packed", 0),
    ]
    assert {ways.of(rows)[0] for rows in (17, 64, 1000)} == {"own"}


def test_passes_that_are_cheaper_when_filled_up_are_filled_up() -> None:
    """The example of `Ways.fastest`, and PyTorch's own product there."""
    own, onednn = {1: 37.0, 2: 54.0, 3: 66.0, 4: 51.0}, {1: 27.0, 2: 43.0, 4: 44.0}
    ways = Ways.fastest({rows: {"own": seconds} for rows, seconds in own.items()})
    assert [ways.of(rows) for rows in (1, 2, 3, 4, 5)] == [("own", 0), ("own", 2), ("own", 1), ("own", 0), ("own", 0)]
    ways = Ways.fastest({rows: {"own": own[rows], "onednn": seconds} for rows, seconds in onednn.items()})
    assert [ways.of(rows) for rows in (1, 2, 3, 4)] == [("onednn", 0)] * 4


def test_two_rows_may_be_filled_up_to_another_product() -> None:
    ways = Ways.fastest({1: {"own": 90.0}, 2: {"own": 70.0}, 8: {"own": 80.0, "packed": 50.0}})
    assert [ways.of(rows) for rows in (1, 2, 8)] == [("packed", 7), ("packed", 6), ("packed", 0)]


def test_a_number_of_rows_goes_back_to_its_own() -> None:
    ways = Ways.fastest({1: {"own": 9.0, "packed": 5.0}, 64: {"own": 20.0, "packed": 10.0}})
    changed = ways.with_own(1)
    assert changed.of(1) == ("own", 0)
    assert [changed.of(rows) for rows in (2, 64)] == [ways.of(rows) for rows in (2, 64)]
    assert ways.with_own(500).of(17) == ("own", 0)


def test_they_can_be_kept() -> None:
    ways = Ways.fastest({1: {"own": 9.0, "packed": 5.0}, 64: {"own": 20.0, "packed": 30.0}})
    assert Ways.from_list(json.loads(json.dumps(ways.to_list()))) == ways


@pytest.mark.parametrize(
    "kept",
    [None, 3, [], [["own"]], [["own"], [1]], [["quick"] * (MOST_ROWS + 1), [1] * (MOST_ROWS + 1)], [["own"] * 17, [1]]],
)
def test_what_is_damaged_is_refused(kept: Any) -> None:
    with pytest.raises(ValueError, match="does not say"):
        Ways.from_list(kept)


def test_any_number_of_rows_has_a_way() -> None:
    assert OWN.are_own
    assert not Ways(("own", "own"), (2, 2)).are_own
    assert not Ways.always("packed").are_own
    assert {OWN.of(rows) for rows in (1, 5, 10_000)} == {("own", 0)}


def test_rows_of_zeros_come_last() -> None:
    filled = filled_up(torch.ones(1, 2, 3), 2)
    assert filled.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
