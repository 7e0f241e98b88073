"""The colours, markers and files of pictures."""

from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, distinguishable with every kind of colour vision; the markers also in grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#000000", "#56B4E9", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "x", "P", "*")


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches, and its only axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix of `path`. An earlier file is only replaced by a complete one."""
    temporary, undated = path.with_name(path.name + ".tmp"), {"Date": None} if path.suffix == ".svg" else None
    with rc_context({"svg.hashsalt": path.stem}):  # makes the SVG reproducible
        figure.savefig(temporary, dpi=150, format=path.suffix[1:], metadata=undated)
    temporary.replace(path)
