"""Plots what the messages of a step cost, by their size, and how much ranks send to each other."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.ticker import MaxNLocator

from hires.core.units import MIB
from hires.plan import traffic
from hires.report.logged_messages import MessageSums, message_sums, size_words
from hires.report.plots import style
from hires.report.plots.base import MAX_RUNS, Drawing, PlotData, plot

_LOOKS = {
    "halo": (style.GREEN, "xx"),
    "norm": (style.YELLOW, "++"),
    "stage": (style.PURPLE, "\\\\"),
    "join": (style.ORANGE, "--"),
    "gradient": (style.VERMILION, "||"),
    "barrier": (style.KINDS["bubble"][1], ""),
    "gather": (style.SKY, "//"),
}
"""Colour and hatch of kinds of messages; others share one."""
_OTHERS = (style.BLUE, "+")


@plot(85, "message_costs", "What messages cost, by size")
def by_size(data: PlotData) -> Drawing | str:
    """Draws the time of a step's messages by size, a panel for each run that logged them."""
    every = [(drawn, message_sums(drawn.run.record.comm)) for drawn in data.runs]
    runs = [(drawn, sums) for drawn, sums in every if sums is not None and sums.rows][:MAX_RUNS]
    if not runs:
        return "no run that is drawn logged messages: they have one rank, or comm.log=off"
    fig, axes = style.panels(len(runs), 2, 2.2)
    for axis, (drawn, sums) in zip(axes, runs, strict=True):
        style.title(axis, drawn.label)
        _draw(axis, sums)
    style.legend(fig, axes)
    return Drawing(fig, "Time of the mean rank in the calls and waits of a step.")


def _draw(axis: Axes, sums: MessageSums) -> None:
    rows = sums.by("kind", "size")
    sizes = sorted({row["size"] for row in rows})
    bottom = dict.fromkeys(sizes, 0.0)
    for row in sorted(rows, key=lambda row: [*_LOOKS, row["kind"]].index(row["kind"])):
        kind, size, cost_ms = row["kind"], row["size"], 1e3 * (row["issue_s"] + row["wait_s"])
        colour, hatch = _LOOKS.get(kind, _OTHERS)
        axis.bar(
            sizes.index(size), cost_ms, 0.8, bottom=bottom[size], color=colour, hatch=hatch,
            label=kind if kind in _LOOKS else "other kinds",
        )  # fmt: skip
        bottom[size] += cost_ms
    each = -(-len(sizes) // 5)
    axis.set_xticks(range(len(sizes))[::each], [size_words(size) for size in sizes[::each]])
    axis.tick_params(axis="x", labelsize=7)
    axis.set_ylabel("ms a step")
    axis.yaxis.set_major_locator(MaxNLocator(4))
    style.no_grid(axis, "x")


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
