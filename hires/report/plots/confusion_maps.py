"""Plots the confusion matrices of evaluations: which class was taken for which."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from hires.report.plots import style
from hires.report.plots.base import Drawing, PlotData, plot
from hires.report.read.confusions import Confusion

_NUMBERS = 8
"""Classes up to which each cell has its number."""
_TICKS = 20
"""Names that an axis has at most."""
_LETTERS = 14
"""Of a name at an axis."""


@plot(116, "confusion", "Confusion of classes")
def confusion(data: PlotData) -> Drawing | str:
    """Draws for each class how the images or pixels of it were predicted, in shares of its row."""
    if not data.confusions:
        return "no run evaluated classes (task=evaluate), of at most 64"
    columns = min(2, len(data.confusions))
    fig, axes = style.panels(len(data.confusions), columns, 3.6)
    for axis, (drawn, found) in zip(axes, data.confusions, strict=True):
        style.title(axis, drawn.label)
        _draw(axis, found)
    bar = fig.colorbar(axes[0].images[0], ax=axes, location="bottom", shrink=0.5, aspect=40)
    bar.set_label("share of the class")
    style.grow(fig, 0.6)
    return Drawing(fig, "Rows are classes, columns what was predicted.")


def _draw(axis: Axes, found: Confusion) -> None:
    shares = _shares(found)
    axis.imshow(shares, cmap="viridis", vmin=0, vmax=1, interpolation="none")
    axis.grid(False)
    places = np.arange(0, len(shares), -(-len(shares) // _TICKS))
    names = [style.short(found.names[n], _LETTERS) for n in places]
    axis.set_xticks(places, names, rotation=90, fontsize=7)
    axis.set_yticks(places, names, fontsize=7)
    axis.set(xlabel="predicted", ylabel="class")
    for row, column in np.ndindex(shares.shape) if len(shares) <= _NUMBERS else ():
        if np.isfinite(shares[row, column]):
            dark = shares[row, column] < 0.5
            look: dict[str, Any] = {"color": "#fefefd" if dark else "#010102", "fontsize": 7}
            number = f"{100 * shares[row, column]:.0f}"
            axis.text(column, row, number, ha="center", va="center", **look)


def _shares(found: Confusion) -> NDArray[np.float64]:
    """Returns each count as a share of its row; a class that does not occur has none."""
    counts = np.array(found.counts, dtype=np.float64)
    sums = counts.sum(axis=1, keepdims=True)
    shares = np.full_like(counts, np.nan)
    np.divide(counts, sums, out=shares, where=sums > 0)
    return shares
