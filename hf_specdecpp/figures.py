"""For reports: ratios with bootstrap intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

RESAMPLES = 2000
COVERED = 0.95


def median_of_ratios(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """The median of `ratios`, and both ends of its 95 % bootstrap interval. `ratios`: for each prompt, the speed of a
    contestant relative to plain generation on that prompt. A median is robust to disturbed runs."""
    values = np.asarray(ratios, dtype=float)
    return _interval(values[:, None], lambda rows: np.median(rows[..., 0], axis=-1), seed)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of two sums, such as tokens by seconds of all answers, and both ends of its 95 % bootstrap interval."""
    values = np.stack((np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)), axis=-1)
    return _interval(values, lambda rows: rows[..., 0].sum(-1) / rows[..., 1].sum(-1))


def _interval(values: Floats, statistic: Callable[[Floats], Any], seed: int = 0) -> tuple[float, float, float]:
    """`statistic(values)` for `values` `[n, fields]`, and its 2.5 % and 97.5 % quantiles over random resamples of the n
    rows. It is called once for all resamples, `[RESAMPLES, n, fields]`."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(values), size=(RESAMPLES, len(values)))
    tail = (1.0 - COVERED) / 2.0
    low, high = np.quantile(statistic(values[drawn]), (tail, 1.0 - tail))
    return float(statistic(values)), float(low), float(high)
