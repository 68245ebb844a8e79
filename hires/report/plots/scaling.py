"""What do more ranks bring? Throughput beside the ideal line, and efficiency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.report.frames import numeric, plain_rows
from hires.report.load import measured_points as known
from hires.report.load.measured_points import SPREAD, WORK
from hires.report.plots import style
from hires.report.plots.base import Material, Plot
from hires.report.plots.throughput import lines, points, spread

if TYPE_CHECKING:
    import pandas as pd

_EACH = ("campaign", *WORK)
"""What all points of the figure share."""


def by_ranks(material: Material) -> Plot:
    """Returns throughput and efficiency against ranks, at the point with the most of them."""
    plot = Plot("throughput_by_ranks", "Throughput against ranks")
    frame = points(material.frames)
    frame = frame[frame["ranks"].notna()]
    groups = [part for _, part in frame.groupby(known.same(frame, _EACH)) if _worlds(part) > 1]
    if not groups:
        plot.missing = "no network, image, batch and precision was run on different numbers of "
        plot.missing += "ranks"
        return plot
    held = max(groups, key=lambda part: (_worlds(part), *known.weight(part)))
    _draw(plot, held)
    row = plain_rows(held)[0]
    said = [str(row[key]) for key in ("model", "image", "precision", "task")]
    said = [*said, f"batch {row['batch']}", *filter(None, [known.told(row, frame, ("settings",))])]
    if frame["campaign"].nunique() > 1:
        said.insert(0, f"campaign {row['campaign']}")
    more = f" {len(groups) - 1} more combinations are in the table of throughput."
    plot.caption = f"{', '.join(said)}: {plot.caption}{more if len(groups) > 1 else ''}"
    return plot


def _worlds(part: pd.DataFrame) -> int:
    """Returns how many numbers of ranks there are."""
    return int(part["ranks"].nunique())


def _draw(plot: Plot, held: pd.DataFrame) -> None:
    """Draws both panels."""
    fewest, base, whose = _base(held)
    made, axes = style.figure(1, 2, 3.4)
    speed, share = axes[0]
    worlds = sorted({int(n) for n in held["ranks"]})
    ideal = {"color": style.MUTED, "ls": "--", "lw": 1.1, "zorder": 1}
    speed.plot(worlds, [base * n for n in worlds], label="ideal", **ideal)
    share.plot(worlds, [100.0] * len(worlds), **ideal)
    said = []
    for (layout, _), line in lines(held, by_world=False).items():
        best = line.sort_values("ranks")
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
        f"ideal is {base:.3g} images/s for each rank, that of {whose} on {fewest} {ones}. "
        f"{SPREAD}. Efficiency: {'; '.join(said[:8])} ranks."
    )


def _base(held: pd.DataFrame) -> tuple[int, float, str]:
    """Returns ranks, images per second of each and layout of what efficiency is taken from.

    It is the single run; without one, the fastest layout on the fewest ranks.
    """
    single = held[held["layout"] == "single"]
    fewest = int((single if len(single) else held)["ranks"].min())
    first = single if len(single) else held
    first = first[first["ranks"] == fewest].sort_values("img_per_s_median")
    return fewest, float(first["img_per_s_median"].iloc[-1]) / fewest, first["layout"].iloc[-1]
