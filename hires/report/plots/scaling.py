"""Plots what more ranks bring: throughput beside the ideal line, and efficiency."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.report.frames import numeric, plain_rows
from hires.report.load.measured_points import SPREAD, WORK, distinction, group_key, weight
from hires.report.plots import style
from hires.report.plots.base import Drawing, NotDrawnError, PlotData, plot
from hires.report.plots.throughput import draw_line, lines, points

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


@plot(30, "throughput_by_ranks", "Throughput against ranks")
def by_ranks(data: PlotData) -> Drawing:
    """Draws throughput and efficiency against ranks, at the work with the most of them."""
    frame = points(data.frames)
    frame = frame[frame["ranks"].notna()]
    works = [part for _, part in frame.groupby(group_key(frame, ("campaign", *WORK)))]
    works = [part for part in works if part["ranks"].nunique() > 1]
    if not works:
        raise NotDrawnError(
            "no network, image, batch and precision was run on different numbers of ranks"
        )
    work = max(works, key=lambda part: (part["ranks"].nunique(), *weight(part)))
    fig, caption = _draw(work)
    row = plain_rows(work)[0]
    words = [str(row[key]) for key in ("model", "image", "precision", "task")]
    words += [f"batch {row['batch']}", *filter(None, [distinction(row, frame, ("settings",))])]
    if frame["campaign"].nunique() > 1:
        words.insert(0, f"campaign {row['campaign']}")
    if len(works) > 1:
        caption += f" The table of throughput has {len(works) - 1} more of such combinations."
    return Drawing(fig, f"{', '.join(words)}: {caption}")


def _draw(work: pd.DataFrame) -> tuple[Figure, str]:
    """Returns both panels and their caption."""
    fewest, ideal, layout_of_ideal = _ideal(work)
    fig, [[speed, share]] = style.figure(1, 2, 3.4)
    worlds = sorted({int(n) for n in work["ranks"]})
    dashed = {"color": style.MUTED, "ls": "--", "lw": 1.1, "zorder": 1}
    speed.plot(worlds, [ideal * n for n in worlds], label="ideal", **dashed)
    share.plot(worlds, [100.0] * len(worlds), **dashed)
    words = []
    for (layout, _), unordered in lines(work, by_ranks=False).items():
        line = unordered.sort_values("ranks")
        draw_line(speed, line, "ranks", layout, None)
        look = style.layout_style(layout)
        ranks = numeric(line, "ranks")
        percent = 100 * numeric(line, "img_per_s_median") / (ideal * ranks)
        share.plot(ranks, percent, color=look.colour, marker=look.marker, ls=look.line)
        words.append(f"{layout} {percent.iloc[-1]:.0f} % on {int(ranks.iloc[-1])}")
    for axis in (speed, share):
        style.log_axis(axis, "x", 2)
        axis.set_xticks(worlds, [str(n) for n in worlds])
        axis.set_xlabel("ranks")
        axis.set_xlim(worlds[0] / 1.15, worlds[-1] * 1.15)
    style.log_axis(speed, "y", 2)
    share.set_ylim(bottom=0)
    speed.set(ylabel="images/s", title="throughput")
    share.set(ylabel="efficiency [%]", title="efficiency")
    style.legend(fig, [speed])
    return fig, (
        f"ideal is {ideal:.3g} images/s for each rank, that of {layout_of_ideal} on {fewest} "
        f"{'rank' if fewest == 1 else 'ranks'}. {SPREAD}. "
        f"Efficiency: {'; '.join(words[:8])} ranks."
    )


def _ideal(work: pd.DataFrame) -> tuple[int, float, str]:
    """Returns ranks, images per second of each and layout that efficiency is relative to.

    It is the single run; without one, the fastest layout on the fewest ranks.
    """
    single = work[work["layout"] == "single"]
    base = single if len(single) else work
    fewest = int(base["ranks"].min())
    base = base[base["ranks"] == fewest].sort_values("img_per_s_median")
    return fewest, float(base["img_per_s_median"].iloc[-1]) / fewest, base["layout"].iloc[-1]
