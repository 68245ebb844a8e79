"""Which rank sends how much to which in a step?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.units import MIB, size
from hires.report.load import traffic_matrix
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh


def between_ranks(material: Material) -> Plot:
    """Returns a matrix of bytes for every run that is drawn and has several ranks."""
    plot = Plot("traffic", "Traffic from rank to rank")
    held = [
        (shown, traffic_matrix.matrix(shown.plan))
        for shown in material.shown
        if shown.plan is not None and shown.plan.world > 1
    ]
    held = [(shown, found) for shown, found in held if any(map(any, found))]
    if not held:
        plot.missing = "no run that is drawn has ranks that send each other anything"
        return plot
    most = max(max(map(max, found)) for _, found in held) / MIB
    made, axes = style.panels(len(held), 4 if len(held) == 4 else 3, 2.2)
    for axis, (shown, found) in zip(axes, held, strict=True):
        image = _draw(axis, found, most)
        axis.set_title(style.short(shown.label, 22), fontsize=8.5)
    bar = made.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.02)
    bar.set_label("MiB/step")
    bar.outline.set_visible(False)
    plot.figure = made
    said = [f"{shown.label} {size(sum(map(sum, found)))}" for shown, found in held]
    plot.caption = (
        f"Bytes of one step from the rank on the left to the rank below, as the plan has them; a "
        f"sum of gradients is drawn as if each rank sent the same to every other. "
        f"In all: {'; '.join(said)}."
    )
    return plot


def _draw(axis: Axes, found: list[list[float]], most: float) -> QuadMesh:
    """Draws one matrix, and returns what a scale of colours belongs to."""
    import numpy as np

    values = np.array(found) / MIB
    cells = np.ma.masked_equal(values, 0)
    edges = np.arange(len(found) + 1) - 0.5
    image = axis.pcolormesh(edges, edges, cells, cmap="viridis_r", vmin=0, vmax=most)
    axis.invert_yaxis()
    axis.set_aspect("equal", anchor="W")
    axis.grid(False)
    ranks = range(len(found))
    step = max(1, len(found) // 8)
    axis.set_xticks(ranks[::step])
    axis.set_yticks(ranks[::step])
    axis.set_xlabel("to rank")
    axis.set_ylabel("from rank")
    if len(found) <= 4:
        for row in ranks:
            for column in ranks:
                value = values[row, column]
                if value:
                    dark = "white" if value > most / 2 else "black"
                    text = f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"
                    axis.text(column, row, text, ha="center", va="center", fontsize=7, color=dark)
    return image
