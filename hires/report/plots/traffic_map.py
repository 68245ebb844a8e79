"""Plots which rank sends how many bytes to which in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.units import MIB, size
from hires.report.load import traffic_matrix
from hires.report.plots import style
from hires.report.plots.base import Drawing, NotDrawnError, PlotData, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh


@plot(80, "traffic", "Traffic from rank to rank")
def between_ranks(data: PlotData) -> Drawing:
    """Draws a matrix of bytes for every run with several ranks."""
    matrices = [
        (drawn, traffic_matrix.matrix(drawn.plan))
        for drawn in data.runs
        if drawn.plan is not None and drawn.plan.world > 1
    ]
    matrices = [(drawn, sent) for drawn, sent in matrices if any(map(any, sent))]
    if not matrices:
        raise NotDrawnError("no run that is drawn has ranks that send each other anything")
    most = max(max(map(max, sent)) for _, sent in matrices) / MIB
    fig, axes = style.panels(len(matrices), 4 if len(matrices) == 4 else 3, 2.2)
    for axis, (drawn, sent) in zip(axes, matrices, strict=True):
        image = _draw(axis, sent, most)
        axis.set_title(style.short(drawn.label, 22), fontsize=8.5)
    bar = fig.colorbar(image, ax=axes, shrink=0.8, aspect=18, pad=0.02)
    bar.set_label("MiB/step")
    bar.outline.set_visible(False)
    totals = "; ".join(f"{drawn.label} {size(sum(map(sum, sent)))}" for drawn, sent in matrices)
    return Drawing(
        fig,
        f"Bytes of one step from the rank on the left to the rank below, as the plan has them; a "
        f"sum of gradients is drawn as if each rank sent the same to every other. "
        f"In all: {totals}.",
    )


def _draw(axis: Axes, sent: list[list[float]], most: float) -> QuadMesh:
    """Draws bytes by source and target rank, ``most`` MiB in the darkest colour."""
    import numpy as np

    values = np.array(sent) / MIB
    edges = np.arange(len(sent) + 1) - 0.5
    cells = np.ma.masked_equal(values, 0)
    image = axis.pcolormesh(edges, edges, cells, cmap="viridis_r", vmin=0, vmax=most)
    axis.invert_yaxis()
    axis.set_aspect("equal", anchor="W")
    axis.grid(False)
    ticks = range(0, len(sent), max(1, len(sent) // 8))
    axis.set(xticks=ticks, yticks=ticks, xlabel="to rank", ylabel="from rank")
    if len(sent) <= 4:
        for (row, column), value in np.ndenumerate(values):
            if value:
                dark = "white" if value > most / 2 else "black"
                text = f"{value:.1f}" if value >= 0.1 else f"{value:.2g}"
                axis.text(column, row, text, ha="center", va="center", fontsize=7, color=dark)
    return image
