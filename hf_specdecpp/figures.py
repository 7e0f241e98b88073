"""Ratios with bootstrap intervals, and the style of pictures, for reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]

RESAMPLES = 2000
COVERED = 0.95
# Okabe and Ito's colours, distinguishable with every kind of colour vision; the markers also in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000", "#56B4E9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")


def median_of_ratios(ratios: Sequence[float], seed: int = 0) -> tuple[float, float, float]:
    """Median and the ends of its 95 % bootstrap interval. `ratios`: for each prompt, the speed of a contestant relative
    to plain generation on the same prompt. A median is robust to disturbed runs."""
    values = np.asarray(ratios, dtype=float)
    return _interval(values[:, None], lambda rows: np.median(rows[..., 0], axis=-1), seed)


def ratio_of_sums(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of two sums, such as tokens and seconds of all answers, and the ends of its 95 % bootstrap interval."""
    values = np.stack((np.asarray(numerators, dtype=float), np.asarray(denominators, dtype=float)), axis=-1)
    return _interval(values, lambda rows: rows[..., 0].sum(-1) / rows[..., 1].sum(-1))


def _interval(values: Floats, statistic: Callable[[Floats], Any], seed: int = 0) -> tuple[float, float, float]:
    """`statistic(values)` of `values` `[n, fields]`, and its 2.5 % and 97.5 % quantiles on resamples, of which it gets
    many at once, `[RESAMPLES, n, fields]`."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(len(values), size=(RESAMPLES, len(values)))
    tail = (1.0 - COVERED) / 2.0
    low, high = np.quantile(statistic(values[drawn]), (tail, 1.0 - tail))
    return float(statistic(values)), float(low), float(high)


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of this size in inches, with one pair of axes. Needs matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, depending on the suffix of `path`, completely or not at all."""
    from matplotlib import rc_context

    temporary, undated = path.with_name(path.name + ".tmp"), {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": path.stem}):  # makes the SVG reproducible
        figure.savefig(temporary, dpi=150, format=path.suffix[1:], metadata=undated)
    temporary.replace(path)
