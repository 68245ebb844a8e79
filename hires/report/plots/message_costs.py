"""Plots what the messages of a step cost, by their size."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hires.report.plots import style
from hires.report.plots.base import Drawing, PlotData, plot
from hires.report.read.message_rows import MessageSums, message_sums, size_words

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
_OTHERS = ("other kinds", (style.BLUE, "+"))
_NAME = 0.6  # inches of a size below a panel
_MAX_PANELS = 4


@plot(85, "message_costs", "What messages cost, by size")
def by_size(data: PlotData) -> Drawing | str:
    """Draws the time of a step's messages by size, a panel for each run that logged them."""
    every = [(drawn, message_sums(drawn.run.record)) for drawn in data.runs]
    runs = [(drawn, sums) for drawn, sums in every if sums is not None and sums.rows]
    if not runs:
        return "no run that is drawn logged messages: they have one rank, or comm.log=off"
    runs = runs[:_MAX_PANELS]
    fig, axes = style.panels(len(runs), 2, 2.2)
    for axis, (drawn, sums) in zip(axes, runs, strict=True):
        style.title(axis, drawn.label)
        _draw(axis, sums)
    style.legend(fig, axes)
    return Drawing(
        fig,
        "Time of the mean rank in the messages of a step, calls and waits together, by the power "
        "of two below their bytes. A wait also lasts as long as the other side is late.",
    )


def _draw(axis: Axes, sums: MessageSums) -> None:
    rows = sums.by("kind", "size")
    sizes = sorted({row["size"] for row in rows})
    places = {size: place for place, size in enumerate(sizes)}
    below = dict.fromkeys(sizes, 0.0)
    labels = {kind: (kind, look) for kind, look in _LOOKS.items()}
    for row in sorted(rows, key=lambda row: [*_LOOKS, row["kind"]].index(row["kind"])):
        label, (colour, hatch) = labels.get(row["kind"], _OTHERS)
        cost_ms = 1e3 * (row["issue_s"] + row["wait_s"])
        look: dict[str, Any] = {"color": colour, "hatch": hatch, "label": label}
        axis.bar(places[row["size"]], cost_ms, 0.8, bottom=below[row["size"]], **look)
        below[row["size"]] += cost_ms
    room = axis.get_position().width * style.WIDTH
    each = -(-len(sizes) // max(3, int(room / _NAME)))
    axis.set_xticks(range(len(sizes))[::each], [size_words(size) for size in sizes[::each]])
    axis.tick_params(axis="x", labelsize=7)
    axis.set_ylabel("ms a step")
    axis.yaxis.set_major_locator(MaxNLocator(4))
    style.no_grid(axis, "x")
