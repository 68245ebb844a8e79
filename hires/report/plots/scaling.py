"""What do more ranks bring? Throughput beside the ideal line, and efficiency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import Material, Plot
from hires.report.plots.throughput import lines, points, spread

if TYPE_CHECKING:
    import pandas as pd

_EACH = ["model", "image", "precision", "task"]


def by_ranks(material: Material) -> Plot:
    """Returns throughput and efficiency against ranks, at the point with the most of them."""
    plot = Plot("throughput_by_ranks", "Throughput against ranks")
    frame = points(material.frames.attempts)
    frame = frame[frame["ranks"].notna()].fillna(dict.fromkeys(_EACH, "?"))
    worlds = frame.groupby(_EACH)["ranks"].nunique().sort_values()
    if not len(worlds) or worlds.iloc[-1] < 2:
        plot.missing = "no network, image and precision was run on different numbers of ranks"
        return plot
    key = worlds.index[-1]
    _draw(plot, frame.set_index(_EACH).sort_index().loc[[key]].reset_index())
    left = int((worlds > 1).sum()) - 1
    more = f" {left} more combinations are in the table of throughput." if left else ""
    plot.caption = f"{', '.join(map(str, key))}: {plot.caption}{more}"
    return plot


def _draw(plot: Plot, held: pd.DataFrame) -> None:
    """Draws both panels."""
    fewest = int(held["ranks"].min())
    first = held[held["ranks"] == fewest].groupby("layout").median(numeric_only=True)
    base = numeric(first, "img_per_s_median").max() / fewest
    made, axes = style.figure(1, 2, 3.4)
    speed, share = axes[0]
    worlds = sorted({int(n) for n in held["ranks"]})
    ideal = {"color": style.MUTED, "ls": "--", "lw": 1.1, "zorder": 1}
    speed.plot(worlds, [base * n for n in worlds], label="ideal", **ideal)
    share.plot(worlds, [100.0] * len(worlds), **ideal)
    said = []
    for (layout, _), line in lines(held, by_world=False).items():
        best = line.groupby("ranks", as_index=False).median(numeric_only=True)
        spread(speed, best, "ranks", layout, None)
        found = style.mark(layout)
        ranks = numeric(best, "ranks")
        percent = 100 * numeric(best, "img_per_s_median") / (base * ranks)
        share.plot(ranks, percent, color=found.colour, marker=found.marker, ls=found.line)
        said.append(f"{layout} {percent.iloc[-1]:.0f} % on {int(ranks.iloc[-1])}")
    for axis in (speed, share):
        style.log_axis(axis, "x", 2)
        axis.set_xticks(worlds, [str(n) for n in worlds])
        axis.set_xlabel("ranks")
        axis.set_xlim(worlds[0] / 1.15, worlds[-1] * 1.15)
    style.log_axis(speed, "y", 2)
    share.set_ylim(bottom=0)
    speed.set_ylabel("images/s")
    share.set_ylabel("efficiency [%]")
    speed.set_title("throughput")
    share.set_title("efficiency")
    style.legend(made, [speed])
    plot.figure = made
    ones = "rank" if fewest == 1 else "ranks"
    plot.caption = (
        f"ideal is {base:.3g} images/s for each rank, that of the fastest layout on {fewest} "
        f"{ones}. "
        f"Efficiency: {'; '.join(said[:8])} ranks."
    )
