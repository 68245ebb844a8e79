"""Plots the confusion matrices of evaluations: which class was taken for which."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes

from hires.report.evaluations import EvaluationFile, evaluated, evaluation_in
from hires.report.plots import style
from hires.report.plots.base import MAX_PANELS, Drawing, PlotData, labelled, plot

_NUMBERS = 8
"""Classes up to which each cell has its number."""
_TICKS = 20
"""Names that an axis has at most."""


@plot(116, "confusion", "Confusion of classes")
def confusion(data: PlotData) -> Drawing | str:
    """Draws for each class how the images or pixels of it were predicted, in shares of its row."""
    found = data.frames.found
    every = [
        (one, evaluation_in(one.shown.folder, found.notes)) for one in found.runs if evaluated(one)
    ]
    shown = [pair for pair in every if pair[1].confusion][:MAX_PANELS]
    if not shown:
        return "no run evaluated classes (task=evaluate), of at most 64"
    fig, axes = style.panels(len(shown), 2, 3.6)
    for axis, drawn, (_, held) in zip(
        axes, labelled([run for run, _ in shown]), shown, strict=True
    ):
        style.title(axis, drawn.label)
        _draw(axis, held)
    bar = fig.colorbar(axes[0].images[0], ax=axes, location="bottom", shrink=0.5, aspect=40)
    bar.set_label("share of the class")
    return Drawing(fig, "Rows are classes, columns what was predicted.")


def _draw(axis: Axes, held: EvaluationFile) -> None:
    counts = np.array(held.confusion, dtype=np.float64)
    sums = counts.sum(axis=1, keepdims=True)
    # A class that does not occur has no share.
    shares = np.divide(counts, sums, out=np.full_like(counts, np.nan), where=sums > 0)
    axis.imshow(shares, cmap="viridis", vmin=0, vmax=1, interpolation="none")
    axis.grid(False)
    places = np.arange(0, len(shares), -(-len(shares) // _TICKS))
    names = [style.short(held.names[n], 14) for n in places]
    axis.set_xticks(places, names, rotation=90, fontsize=7)
    axis.set_yticks(places, names, fontsize=7)
    axis.set(xlabel="predicted", ylabel="class")
    for row, column in np.argwhere(np.isfinite(shares)) if len(shares) <= _NUMBERS else ():
        colour = "#fefefd" if shares[row, column] < 0.5 else "#010102"
        look: dict[str, Any] = {"color": colour, "fontsize": 7, "ha": "center", "va": "center"}
        axis.text(column, row, f"{100 * shares[row, column]:.0f}", **look)
