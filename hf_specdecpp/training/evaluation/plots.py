"""The two pictures of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from hf_specdecpp.estimation.metrics import reliability
from hf_specdecpp.plotting import COLOURS, MARKERS, new_figure, save
from hf_specdecpp.training.metrics import Outcome


def plot_curves(curves: Mapping[str, Sequence[Outcome]], path: Path, title: str) -> None:
    """Discard rate over verification rate, a line a rule. Down and left is better."""
    figure, axes = new_figure(7, 5)
    for (name, points), colour, marker in zip(curves.items(), COLOURS, MARKERS, strict=False):
        x, y = [point.verification_rate for point in points], [point.discard_rate for point in points]
        width = 2.2 if name == "head" else 1.2
        axes.plot(x, y, color=colour, marker=marker, markersize=4, linewidth=width, label=name)
    axes.set(xlabel="verification rate: target passes per generated token", title=title, ylim=(0, None))
    axes.set_ylabel("discard rate: discarded candidates per generated token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, title="stopping rule (down and left is better)")
    save(figure, path)


def plot_reliability(estimates: Mapping[str, Tensor], label: Tensor, path: Path, title: str) -> None:
    """Mean acceptance over mean estimate in ten bins, an estimator a line. On the diagonal is calibrated."""
    figure, axes = new_figure(5.5, 5.5)
    axes.plot([0, 1], [0, 1], color="#999999", linestyle="--", linewidth=1, label="calibrated")
    for (name, estimate), colour, marker in zip(estimates.items(), COLOURS, MARKERS, strict=False):
        _, predicted, observed, _ = reliability(estimate, label, bins=10)
        axes.plot(predicted, observed, color=colour, marker=marker, markersize=5, label=name)
    axes.set(xlabel="estimated chance of acceptance", ylabel="true chance of acceptance", title=title)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    save(figure, path)
