"""Plots how much the ranks of a layout send to each other."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh

from hires.core.units import MIB
from hires.plan import traffic
from hires.report.plots import style
from hires.report.plots.base import Drawing, PlotData, plot


@plot(80, "traffic", "Traffic from rank to rank")
def between_ranks(data: PlotData) -> Drawing | str:
    """Draws a matrix of bytes for every run with several ranks."""
    every = [(drawn, traffic.matrix(plan)) for drawn, plan in data.plans]
    matrices = [(drawn, sent) for drawn, sent in every if any(map(any, sent))]
    if not matrices:
        return "no run that is drawn has ranks that send each other anything"
    most = max(max(map(max, sent)) for _, sent in matrices) / MIB
    fig, axes = style.panels(len(matrices), 3, 2.2)
    for axis, (drawn, sent) in zip(axes, matrices, strict=True):
        image = _draw_matrix(axis, sent, most)
        style.title(axis, drawn.label)
    bar = fig.colorbar(image, ax=axes, pad=0.02, shrink=0.8, aspect=18)
    bar.set_label("MiB/step")
    bar.outline.set_visible(False)
    return Drawing(
        fig,
        "Bytes of one step of the plan, from the rank on the left to the rank below. A sum of "
        "gradients is drawn as if each rank sent the same to every other.",
    )


def _draw_matrix(axis: Axes, sent: list[list[float]], most: float) -> QuadMesh:
    """Draws bytes by source and target rank, ``most`` MiB in the darkest colour."""
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
