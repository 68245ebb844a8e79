"""Plots the largest image that each layout was run with, and those that memory refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.units import size
from hires.report.frames import Frames, numeric, plain_rows
from hires.report.load.measured_points import group_key, point_name
from hires.report.plots import style
from hires.report.plots.base import Drawing, NotDrawnError, PlotData, plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


MAX_PANELS = 6
"""Combinations that fit into a figure; the others are in the tables."""
_PANEL = ("campaign", "model", "precision", "task", "batch", "limit")
"""Columns that the bars of one panel share."""
_COLUMNS = [*_PANEL, "layout", "ranks", "image", "height", "width", "peak_bytes_max"]


@plot(40, "largest_image", "The largest image each layout fits")
def largest_image(data: PlotData) -> Drawing:
    """Draws the image sizes of each layout: those that ran, and those that memory refused."""
    frame = _points(data.frames)
    refused = frame["refused"]
    if frame["pixels"].nunique() < 2 and not refused.any():
        raise NotDrawnError("all runs have one image size, and memory refused none")
    groups = [part for _, part in frame.groupby(group_key(frame, _PANEL))]
    groups.sort(key=lambda part: (-int(part["refused"].any()), -part["pixels"].nunique()))
    shown = groups[:MAX_PANELS]
    most = max(part["layout"].nunique() for part in shown)
    fig, axes = style.panels(len(shown), 2 if len(shown) > 1 else 1, 0.9 + 0.36 * most)
    caption = "Ticks are image sizes that ran to the end."
    for axis, part in zip(axes, shown, strict=True):
        heading = _heading(part, frame)
        axis.set_title(style.short(heading, 48), fontsize=8.5)
        caption += f" {heading}: {_draw(axis, part)}."
        axis.set_ylim(most - 0.5, -0.5)  # bars are equally high everywhere
    style.legend(fig, axes)
    if not refused.any():
        caption += " Memory refused none, so larger images may fit."
    if len(groups) > len(shown):
        caption += f" The tables have {len(groups) - len(shown)} more of such combinations."
    return Drawing(fig, caption)


def _heading(part: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Returns what the bars of a panel share."""
    row = plain_rows(part)[0]
    words = [str(row["campaign"])] if frame["campaign"].nunique() > 1 else []
    words += [str(row[key] or "?") for key in ("model", "precision", "task")]
    words.append(f"batch {row['batch'] or '?'}")
    words += [f"limit {row['limit']}"] if row["limit"] not in (None, "null") else []
    return ", ".join(words)


def _draw(axis: Axes, part: pd.DataFrame) -> str:
    """Draws the layouts of one panel, and returns them in words."""
    layouts = sorted(set(part["layout"]))
    largest, too_large = [], []
    for row, layout in enumerate(layouts):
        look = style.layout_style(layout)
        own = part[part["layout"] == layout]
        ran, refused = own[~own["refused"]], own[own["refused"]]
        edges = sorted(set(ran["edge"]))
        if edges:
            axis.barh(row, max(edges), 0.5, color=look.colour, hatch=look.hatch, alpha=0.85)
            axis.plot(edges, [row] * len(edges), ls="", marker="|", color=style.INK, ms=8)
            largest.append(_largest_words(ran))
        if len(refused):
            axis.plot(
                refused["edge"], [row] * len(refused), ls="", marker="X", ms=8,
                color=style.VERMILION, markeredgecolor=style.PAPER,
                label="needs more memory than there is",
            )  # fmt: skip
            too_large += [f"{layout} {image}" for image in dict.fromkeys(refused["image"])]
    axis.set_yticks(range(len(layouts)), [style.short(layout) for layout in layouts])
    axis.set_xlabel("edge of a square image with as many pixels [pixels]", fontsize=8)
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")
    text = f"largest {', '.join(largest[:10])}" if largest else "none ran to the end"
    return f"{text}; too large: {', '.join(too_large[:10])}" if too_large else text


def _largest_words(ran: pd.DataFrame) -> str:
    """Returns the largest image of a layout, with the fullest rank of that very run."""
    order = ran.sort_values(["edge", "peak_bytes_max"], ascending=False, na_position="last")
    row = plain_rows(order)[0]
    needs = f" ({size(int(row['peak_bytes_max']))} a rank)" if row["peak_bytes_max"] else ""
    return f"{point_name(row, ran)} {row['image']}{needs}"


def _points(frames: Frames) -> pd.DataFrame:
    """Returns the points that ran, and those that failed or were excluded for lack of memory."""
    import pandas as pd

    rows = [
        {**run, "limit": run["memory_limit"], "refused": run["state"] != "done"}
        for run in plain_rows(frames.runs)
        if run["state"] == "done" or run["reason"] == "oom"
    ]
    rows += [
        {**point["what"], "campaign": point["campaign"], "refused": True}
        for point in frames.planned_rows
        if point["state"] == "infeasible" and "[memory." in (point["reason"] or "")
    ]
    frame = pd.DataFrame(rows, columns=[*_COLUMNS, "refused"])
    frame = frame[frame["height"].notna() & frame["width"].notna()].copy()
    frame["layout"] = frame["layout"].fillna("?")
    frame["refused"] = frame["refused"].astype(bool)
    frame["pixels"] = numeric(frame, "height") * numeric(frame, "width")
    frame["edge"] = frame["pixels"] ** 0.5
    return frame
