"""How the pictures of training and benchmarks look, and how they are written. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")  # no display; before pyplot is imported

from matplotlib import pyplot as plt

# Okabe and Ito's colours, told apart with every kind of colour vision; the markers tell them apart in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000", "#56B4E9", "#999999")
UNDATED = {"Date": None}
MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")


def new_figure(width: float, height: float) -> tuple[plt.Figure, plt.Axes]:
    """A figure of that many inches with one pair of axes."""
    return plt.subplots(figsize=(width, height), layout="constrained")


def save(figure: plt.Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the file's ending, whole or not at all, and close it."""
    temporary = path.with_name(path.name + ".tmp")
    with mpl.rc_context({"svg.hashsalt": path.stem}):  # the same figure, the same file
        figure.savefig(temporary, dpi=150, format=path.suffix[1:], metadata=UNDATED if path.suffix == ".svg" else None)
    plt.close(figure)
    temporary.replace(path)
