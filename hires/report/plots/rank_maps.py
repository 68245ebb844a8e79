"""Plots where the tiles of a layout lie, and how much its ranks send to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.patches import Rectangle

from hires.core.units import MIB
from hires.plan import traffic
from hires.plan.graph import INPUT
from hires.plan.plan import Plan
from hires.plan.tiling import own_rect
from hires.report.plots import style
from hires.report.plots.base import Drawing, PlotData, plot

_COLOURS = (style.SKY, style.ORANGE, style.GREEN, style.PURPLE, style.YELLOW, style.BLUE)


@plot(90, "tile_grid", "The tile grid over the image")
def grid(data: PlotData) -> Drawing | str:
    """Draws the image with the tiles of the first stage, for every tiled run."""
    runs = [(drawn, plan) for drawn, plan in data.plans if plan.stages[0].num_tiles > 1]
    if not runs:
        return "no run that is drawn cuts the image into tiles"
    fig, axes = style.panels(len(runs), 3, 2.4)
    for axis, (drawn, plan) in zip(axes, runs, strict=True):
        _draw_tiles(axis, plan)
        style.title(axis, drawn.label)
    return Drawing(
        fig,
        "Tiles of the first stage and their ranks; hatched is the halo that it borrows first.",
    )


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


def _draw_tiles(axis: Axes, plan: Plan) -> None:
    """Draws the tiles of one plan, and the halos of the image."""
    height, width = plan.graph.input_shape[2:]
    stage = plan.stages[0]
    for tile in range(stage.num_tiles):
        r0, r1, c0, c1 = own_rect([height, width], stage.tiles, tile)
        colour = _COLOURS[(tile // stage.tiles[1] + tile % stage.tiles[1]) % len(_COLOURS)]
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": style.PAPER, "lw": 1.5}
        axis.add_patch(Rectangle((c0, r0), c1 - c0, r1 - r0, **look))
        if stage.num_tiles <= 36:
            ranks = [plan.rank_of(0, d, 0, tile) for d in range(plan.num_directions)]
            names = [f"rank {rank}{way}" for rank, way in zip(ranks, ("", " up"), strict=False)]
            at: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8, "color": "black"}
            axis.text((c0 + c1) / 2, (r0 + r1) / 2, "\n".join(names), **at)
    for _, _, r0, r1, c0, c1 in _first_halo(plan):
        look = {"facecolor": "none", "edgecolor": "black", "hatch": "////", "lw": 0}
        axis.add_patch(Rectangle((c0, r0), c1 - c0, r1 - r0, **look))
    axis.set(xlim=(0, width), ylim=(height, 0), aspect="equal", xlabel="column", ylabel="row")
    axis.set(xticks=[0, width], yticks=[0, height])
    axis.grid(False)


def _first_halo(plan: Plan) -> list[Any]:
    # Messages (source, target, r0, r1, c0, c1) of the image that tiles borrow first.
    halos = [op for op in plan.stages[0].comm if op.kind == "halo" and op.value == INPUT]
    return list(halos[0].messages) if halos else []


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
