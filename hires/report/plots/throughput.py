"""Plots the throughput of each layout, and how it changes with the image size and the ranks."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from hires.report.columns import Row
from hires.report.plots import style
from hires.report.plots.base import MAX_PANELS, Drawing, PlotData, plot
from hires.report.points import WORK, common_work, differing_keys, fastest, parts_of, weight
from hires.report.tables import Frames, numeric, plain_rows

MAX_BARS = 20
SPREAD = "Medians over attempts; bars reach from p10 to p90 of all their steps."
_PANEL = tuple(key for key in ("campaign", *WORK) if key != "image")  # shared in a panel
_BARS = tuple(key for key in WORK if key != "precision")  # shared by all bars of a figure


@plot(10, "throughput_by_layout", "Throughput of each layout")
def by_layout(data: PlotData) -> Drawing | str:
    """Draws a bar for every layout and number of ranks, at the work most layouts were run with."""
    frame = _points(data.frames)
    bars = common_work(frame, _BARS) if len(frame) else frame
    # A precision in which one layout was run compares nothing.
    groups = [
        (str(name), _slowest_first(part))
        for name, part in bars.groupby("precision", dropna=False)
        if part["layout"].nunique() > 1
    ][:4]
    if not groups:
        return "no network, image and precision was run to the end in two layouts"
    tallest = max(len(part) for _, part in groups)
    fig, axes = style.panels(len(groups), 2, 1.1 + 0.3 * tallest)
    for axis, (precision, part) in zip(axes, groups, strict=True):
        median, low, high = _spread(part)
        looks = [style.layout_style(layout) for layout in part["layout"]]
        axis.barh(
            range(len(part)), median, 0.66, xerr=[low, high],
            color=[look.colour for look in looks], hatch=[look.hatch for look in looks],
            error_kw={"ecolor": style.INK, "elinewidth": 1.0, "capsize": 2.5},
        )  # fmt: skip
        style.named_rows(axis, [_point_name(row, bars) for row in plain_rows(part)])
        axis.set_ylim(-0.6, tallest - 0.4)  # bars are equally high everywhere
        axis.set(title=precision, xlabel="images/s")
    row = plain_rows(bars)[0]
    work = f"{row['model']}, {row['image']} pixels, {row['task']}, batch {row['batch']}"
    return Drawing(fig, f"{work}. {SPREAD}")


@plot(20, "throughput_by_image", "Throughput against image size")
def by_image(data: PlotData) -> Drawing | str:
    """Draws throughput against image size, one line for each layout and number of ranks."""
    frame = _points(data.frames)
    every = [
        part
        for part in parts_of(frame, _PANEL)  # in which a layout on as many ranks has two sizes
        if part.groupby(["layout", "ranks"], dropna=False)["pixels"].nunique().max() > 1
    ]
    # Those with the most image sizes, in their order.
    most = sorted(every, key=lambda part: (-part["pixels"].nunique(), -len(part)))[:MAX_PANELS]
    parts = [part for part in every if any(part is one for one in most)]
    if not parts:
        return "no network and precision was run to the end with two image sizes"
    fig, axes = style.panels(len(parts), 2, 2.9)
    rows = plain_rows(pd.concat(parts))
    for axis, part in zip(axes, parts, strict=True):
        style.title(axis, _work_name(plain_rows(part)[0], rows, ("model", "precision", "task")))
        # A layout on several numbers of ranks has a line for each.
        lines: dict[str, int] = {}
        for (layout, ranks), line in part.groupby(["layout", "ranks"], dropna=False):
            if line["pixels"].nunique() > 1:  # one point is no line
                label = _point_name({"layout": layout, "ranks": ranks, "campaign": ""})
                number = lines[layout] = lines.get(layout, -1) + 1
                _draw_line(axis, line.sort_values("pixels"), "pixels", layout, label, number)
        sizes = part.drop_duplicates("pixels").sort_values("pixels")
        axis.set_xscale("log")
        axis.set_xticks(list(sizes["pixels"]), list(sizes["image"]))
        axis.minorticks_off()
        axis.tick_params(axis="x", labelrotation=30 if len(sizes) > 4 else 0)
        axis.set_xlim(sizes["pixels"].min() / 1.25, sizes["pixels"].max() * 1.25)
        axis.set(xlabel="image [pixels]", ylabel="images/s")
        axis.set_ylim(bottom=0)
    style.legend(fig, axes)
    return Drawing(fig, SPREAD)


@plot(30, "throughput_by_ranks", "Throughput against ranks")
def by_ranks(data: PlotData) -> Drawing | str:
    """Draws throughput and efficiency against ranks, at the work with the most of them."""
    frame = _points(data.frames)
    frame = frame[frame["ranks"].notna()]
    works = parts_of(frame, ("campaign", *WORK))
    works = [part for part in works if part.groupby("layout")["ranks"].nunique().max() > 1]
    if not works:
        return (
            "no layout of one network, image, batch and precision was run on two numbers of ranks"
        )
    work = max(works, key=lambda part: (part["ranks"].nunique(), *weight(part)))
    fig, [speed, share] = style.panels(2, 2, 2.8)
    ideal = _draw_scaling(speed, share, work)
    style.legend(fig, [speed])
    names = ("model", "image", "precision", "task")
    heading = _work_name(plain_rows(work)[0], plain_rows(frame), names)
    return Drawing(fig, f"{heading}. {ideal} {SPREAD}")


def _draw_scaling(speed: Axes, share: Axes, work: pd.DataFrame) -> str:
    """Draws throughput beside the ideal line, and efficiency; returns what is ideal."""
    # Ideal is the single run; without one, the fastest layout on the fewest ranks.
    single = work[work["layout"] == "single"]
    base = single if len(single) else work
    fewest = int(base["ranks"].min())
    base = base[base["ranks"] == fewest].sort_values("img_per_s_median")
    ideal, layout_of_ideal = float(base["img_per_s_median"].iloc[-1]) / fewest, base["layout"]
    worlds = sorted({int(n) for n in work["ranks"]})
    dashed: dict[str, Any] = {"color": style.MUTED, "ls": "--", "lw": 1.1, "zorder": 1}
    speed.plot(worlds, [ideal * n for n in worlds], label="ideal", **dashed)
    share.plot(worlds, [100.0] * len(worlds), **dashed)
    for layout, line in work.sort_values("ranks").groupby("layout"):
        if line["ranks"].nunique() < 2:  # one point is no line
            continue
        _draw_line(speed, line, "ranks", layout, style.short(layout))
        ranks = numeric(line, "ranks")
        percent = 100 * numeric(line, "img_per_s_median") / (ideal * ranks)
        share.plot(ranks, percent, **style.layout_style(layout).of_line())
    for axis in (speed, share):
        style.log_axis(axis, "x", 2)
        axis.set_xticks(worlds, [str(n) for n in worlds])
        axis.set(xlabel="ranks", xlim=(worlds[0] / 1.15, worlds[-1] * 1.15))
    style.log_axis(speed, "y", 2)
    share.set_ylim(bottom=0)
    speed.set(ylabel="images/s", title="throughput")
    share.set(ylabel="efficiency [%]", title="efficiency")
    ranks = "1 rank" if fewest == 1 else f"{fewest} ranks"
    return f"Ideal is {layout_of_ideal.iloc[-1]} on {ranks}, times their number."


def _points(frames: Frames) -> pd.DataFrame:
    """Returns the fastest point of each work, layout and number of ranks, with its pixels."""
    frame = fastest(frames.points)
    kept = frame[frame["height"].notna() & frame["width"].notna()].copy()
    kept["pixels"] = numeric(kept, "height") * numeric(kept, "width")
    return kept


def _slowest_first(part: pd.DataFrame) -> pd.DataFrame:
    """Returns the fastest point of each layout and number of ranks, at most ``MAX_BARS``."""
    ordered = part.sort_values("img_per_s_median", kind="stable")
    return ordered.drop_duplicates(["campaign", "layout", "ranks"], keep="last").tail(MAX_BARS)


def _work_name(row: Row, rows: list[Row], columns: tuple[str, ...]) -> str:
    """Returns what the points of a panel share, its campaign in front if there are several."""
    keys = differing_keys([row, *rows], ("other_keys",))[0]
    words = [*(str(row[key]) for key in columns), f"batch {row['batch']}", *filter(None, [keys])]
    several = len({one["campaign"] for one in rows}) > 1
    return ", ".join([str(row["campaign"]), *words] if several else words)


def _point_name(row: Row, among: pd.DataFrame | None = None) -> str:
    """Returns layout and ranks of a point, its campaign in front if there are several."""
    name = str(row["layout"])
    if pd.notna(row["ranks"]) and row["ranks"] > 1:
        name += f" on {int(row['ranks'])}"
    several = among is not None and among["campaign"].nunique() > 1
    return f"{row['campaign']}: {name}" if several else name


def _draw_line(
    axis: Axes, line: pd.DataFrame, key: str, layout: str, label: str, number: int = 0
) -> None:
    """Draws medians over a column, with bars from p10 to p90; ``number`` is of a layout's lines."""
    median, low, high = _spread(line)
    axis.errorbar(
        numeric(line, key), median, yerr=[low, high], elinewidth=1.0, capsize=2.5, label=label,
        **style.layout_style(layout).of_line(number),
    )  # fmt: skip


def _spread(line: pd.DataFrame) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Returns medians, and how far p10 lies below and p90 above."""
    median = numeric(line, "img_per_s_median")
    low = (median - numeric(line, "img_per_s_p10")).clip(lower=0).fillna(0)
    high = (numeric(line, "img_per_s_p90") - median).clip(lower=0).fillna(0)
    return median, low, high
