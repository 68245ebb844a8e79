"""Plots the memory of each rank, and the largest image that each layout fits into memory."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes

from hires.core.units import MIB
from hires.report.frames import Frames, numeric, plain_rows
from hires.report.plots import style
from hires.report.plots.base import MAX_PANELS, MAX_RANKS, Drawing, PlotData, plot
from hires.report.read.measured_points import group_key, set_apart

_PANEL = ("campaign", "model", "precision", "task", "batch", "limit")  # shared in a panel of images


@plot(50, "memory_per_rank", "Memory per rank")
def per_rank(data: PlotData) -> Drawing | str:
    """Draws a stacked bar for every rank, and a dash for its prediction."""
    memory = data.frames.memory
    known = memory["peak_bytes"].notna() | memory["predicted_bytes"].notna()
    ranks = dict(list(memory[known & memory["rank"].notna()].groupby(["campaign", "run"])))
    runs_of = [(drawn, ranks.get((drawn.run.campaign, drawn.run.name), ())) for drawn in data.runs]
    runs = [(drawn, rows) for drawn, rows in runs_of if 0 < len(rows) <= MAX_RANKS]
    if not runs:
        return "no run recorded the memory of its ranks"
    fig, axes = style.panels(len(runs), 3, 2.8, sharey=True)
    for place, (axis, (drawn, rows)) in enumerate(zip(axes, runs, strict=True)):
        _stack(axis, rows)
        style.title(axis, drawn.label)
        axis.set(xlabel="rank", ylabel="" if place % 3 else "MiB")
    style.legend(fig, axes)
    return Drawing(fig, "Measured peak of each rank; a dash is the prediction.")


@plot(40, "largest_image", "The largest image each layout fits")
def largest_image(data: PlotData) -> Drawing | str:
    """Draws the image sizes of each layout: those that ran, and those that memory refused."""
    frame = _images(data.frames)
    if not frame["refused"].any():
        return "memory refused no image, so the largest one that fits is not known"
    groups = [part for _, part in frame.groupby(group_key(frame, _PANEL))]
    groups = [part for part in groups if part["refused"].any()]
    groups.sort(key=lambda part: -part["pixels"].nunique())
    shown = groups[:MAX_PANELS]
    most = max(part["layout"].nunique() for part in shown)
    fig, axes = style.panels(len(shown), 2 if len(shown) > 1 else 1, 0.9 + 0.36 * most)
    shared, headings = set_apart([_words_of(part, frame) for part in shown])
    caption = (f"{shared}. " if shared else "") + "Ticks are image sizes that ran to the end."
    for axis, part, heading in zip(axes, shown, headings, strict=True):
        style.title(axis, heading)
        _image_bars(axis, part)
        axis.set_ylim(most - 0.5, -0.5)  # bars are equally high everywhere
    style.legend(fig, axes)
    return Drawing(fig, caption)


def _words_of(part: pd.DataFrame, among: pd.DataFrame) -> list[str]:
    """Returns what the points of a panel of images share."""
    row = plain_rows(part)[0]
    words = [str(row["campaign"])] if among["campaign"].nunique() > 1 else []
    words += [str(row[key] or "?") for key in ("model", "precision", "task")]
    words.append(f"batch {row['batch'] or '?'}")
    return words + ([f"limit {row['limit']}"] if row["limit"] not in (None, "null") else [])


def _stack(axis: Axes, rows: pd.DataFrame) -> None:
    ranks = [int(n) for n in rows["rank"]]
    peak = numeric(rows, "peak_bytes") / MIB
    bottom = peak * 0
    for key, (label, colour, hatch) in style.PARTS.items():
        part = (peak - bottom).clip(lower=0)
        if key != "rest":
            # What exceeds the peak was not allocated at that moment.
            part = (numeric(rows, key).fillna(0) / MIB).clip(upper=part)
        if key == "rest" or (part > 0).any():
            axis.bar(ranks, part, 0.72, bottom=bottom, color=colour, hatch=hatch, label=label)
        bottom = bottom + part.fillna(0)
    if rows["predicted_bytes"].notna().any():
        axis.plot(
            ranks, numeric(rows, "predicted_bytes") / MIB, ls="", marker="_", ms=14, mew=2.2,
            color=style.INK, label="predicted",
        )  # fmt: skip
    axis.set_xticks(ranks if len(ranks) <= 16 else ranks[:: len(ranks) // 8])
    axis.set_xlim(min(ranks) - 0.7, max(ranks) + 0.7)
    style.no_grid(axis, "x")


def _images(frames: Frames) -> pd.DataFrame:
    """Returns the points that ran, and those that failed or were excluded for lack of memory."""
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
    columns = ["layout", "ranks", "image", "height", "width", "peak_bytes_max", "refused"]
    frame = pd.DataFrame(rows, columns=[*_PANEL, *columns])
    frame = frame[frame["height"].notna() & frame["width"].notna()].copy()
    frame["layout"] = frame["layout"].fillna("?")
    frame["refused"] = frame["refused"].astype(bool)
    frame["pixels"] = numeric(frame, "height") * numeric(frame, "width")
    frame["edge"] = frame["pixels"] ** 0.5
    frame["batch"] = numeric(frame, "batch").astype("Int64")  # None among them made it 8.0
    return frame


def _image_bars(axis: Axes, part: pd.DataFrame) -> None:
    layouts = sorted(set(part["layout"]))
    for place, layout in enumerate(layouts):
        own = part[part["layout"] == layout]
        ran, refused = own[~own["refused"]], own[own["refused"]]
        edges = sorted(set(ran["edge"]))
        if edges:
            colour, _, hatch, _ = style.layout_style(layout)
            axis.barh(place, max(edges), 0.5, color=colour, hatch=hatch, alpha=0.85)
            axis.plot(edges, [place] * len(edges), ls="", marker="|", color=style.INK, ms=8)
        if len(refused):
            axis.plot(
                refused["edge"], [place] * len(refused), ls="", marker="X", ms=8,
                color=style.VERMILION, markeredgecolor=style.PAPER,
                label="needs more memory than there is",
            )  # fmt: skip
    style.named_rows(axis, layouts)
    axis.set_xlabel("edge of a square of as many pixels", fontsize=8)
