"""Which matrix product is taken for which weight and number of rows: measured once, then kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hf_specdecpp import files
from hf_specdecpp.models import product_times
from hf_specdecpp.models.product_times import PRODUCTS, ROWS, Times, fastest, index_of, measure

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[int, int]]:
    """The shapes that were measured; the times are made up, and the caches begin empty."""
    shapes: list[tuple[int, int]] = []

    def made_up(out_features: int, in_features: int) -> Times:
        shapes.append((out_features, in_features))
        return {
            "own": [4.0, 9.0, 10.0, 10.0, 10.0, 10.0],
            "onednn": [5.0, 6.0, 9.5, 5.0, 5.0, 10.0],
            "packed": [4.0, 3.0, 8.0, 4.8, 4.0, 11.0],
        }

    monkeypatch.setattr(product_times, "measure", made_up)
    monkeypatch.setattr(product_times, "_known", {})
    monkeypatch.setattr(files, "cached_assets_path", lambda *names: tmp_path)
    return shapes


def test_the_fastest_is_taken_by_a_margin(measured: list[tuple[int, int]]) -> None:
    assert fastest(400, 400, may_pack=False) == ("own", "onednn", "own", "onednn", "onednn", "own")
    assert fastest(400, 400, may_pack=True) == ("own", "packed", "packed", "onednn", "packed", "own")


def test_small_weights_are_never_measured(measured: list[tuple[int, int]]) -> None:
    assert fastest(64, 64, may_pack=True) == ("own",) * len(ROWS)
    assert not measured


def test_a_shape_is_measured_once(measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    first = fastest(400, 400, may_pack=True)
    monkeypatch.setattr(product_times, "_known", {})  # another process
    assert fastest(400, 400, may_pack=True) == first
    fastest(400, 500, may_pack=True)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    fastest(400, 400, may_pack=True)
    assert measured == [(400, 400), (400, 500), (400, 400)]


@pytest.mark.parametrize("error", [OSError("read-only"), ValueError("Corrupted assets folder")])
def test_a_cache_that_cannot_be_made_is_no_error(
    error: Exception, measured: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: str) -> Path:
        raise error

    monkeypatch.setattr(files, "cached_assets_path", fail)
    fastest(400, 400, may_pack=True)
    fastest(400, 400, may_pack=True)
    assert measured == [(400, 400)], "kept for this process all the same"


def test_rows_find_their_measurement() -> None:
    found = [ROWS[index_of(rows)] for rows in (1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 64, 5000)]
    assert found == [1, 2, 2, 4, 4, 8, 8, 16, 16, 64, 64, 64]


def test_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_times, "SECONDS", 0.0)
    monkeypatch.setattr(product_times, "MOST_ELEMENTS", 2**15)
    times = measure(100_000, 64)  # cut down to a few of its rows
    assert tuple(times) == PRODUCTS
    for seconds in times.values():
        assert len(seconds) == len(ROWS)
        assert all(0.0 < each < 0.1 for each in seconds)
        assert seconds[-1] > seconds[0], "64 rows are more work than one"
