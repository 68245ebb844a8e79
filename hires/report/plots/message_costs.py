"""Plots what the messages of a step cost, by their size."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

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
