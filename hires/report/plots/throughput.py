"""Plots the throughput of each layout, and how it changes with the image size and the ranks."""

from __future__ import annotations

import collections
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from hires.report.frames import Frames, numeric, plain_rows
from hires.report.plots import style
from hires.report.plots.base import MAX_PANELS, Drawing, PlotData, plot
from hires.report.read import measured_points
from hires.report.read.measured_points import (
    SPREAD,
    WORK,
    group_key,
    point_name,
    set_apart,
    work_name,
)

MAX_BARS = 20
_PANEL = tuple(key for key in ("campaign", *WORK) if key != "image")  # shared in a panel
_BARS = tuple(key for key in WORK if key != "precision")  # shared by all bars of a figure


@plot(10, "throughput_by_layout", "Throughput of each layout")
def by_layout(data: PlotData) -> Drawing | str:
    """Draws a bar for every layout and number of ranks, at the work most layouts were run with."""
    frame = _points(data.frames)
    bars = measured_points.common_work(frame, _BARS) if len(frame) else frame
    if bars["layout"].nunique() < 2:
        return "no network and image was run to the end in two layouts"
    bars = bars.assign(bar=[point_name(row, bars) for row in plain_rows(bars)])
    groups = sorted(bars.groupby("precision", dropna=False), key=lambda g: str(g[0]))
    # A precision in which one layout was run compares nothing.
    groups = [(name, part) for name, part in groups if part["layout"].nunique() > 1][:4]
    if not groups:
        return "no network, image and precision was run to the end in two layouts"
    shown = {name: _slowest_first(part) for name, part in groups}
    tallest = max(map(len, shown.values()))
    fig, axes = style.panels(len(groups), 2, 1.1 + 0.3 * tallest)
    for axis, (precision, best) in zip(axes, shown.items(), strict=True):
        middle, low, high = _spread(best)
        looks = [style.layout_style(layout) for layout in best["layout"]]
        axis.barh(
            range(len(best)), middle, 0.66, xerr=[low, high],
            color=[look.colour for look in looks], hatch=[look.hatch for look in looks],
            error_kw={"ecolor": style.INK, "elinewidth": 1.0, "capsize": 2.5},
        )  # fmt: skip
        style.named_rows(axis, list(best["bar"]))
        axis.set_ylim(-0.6, tallest - 0.4)  # bars are equally high everywhere
        axis.set(title=str(precision), xlabel="images/s")
    first = plain_rows(bars)[0]
    work = f"{first['model']}, {first['image']} pixels, {first['task']}, batch {first['batch']}"
    return Drawing(fig, f"{work}. {SPREAD}.")


def _slowest_first(part: pd.DataFrame) -> pd.DataFrame:
    """Returns the fastest of the bars of one name each, at most ``MAX_BARS`` of them."""
    best = part.sort_values("img_per_s_median", kind="stable").drop_duplicates("bar", keep="last")
    return best.tail(MAX_BARS)


@plot(20, "throughput_by_image", "Throughput against image size")
def by_image(data: PlotData) -> Drawing | str:
    """Draws throughput against image size, one line for each layout and number of ranks."""
    frame = _points(data.frames)
    # Those with the most image sizes, in order of their names.
    panels = list(frame.groupby(group_key(frame, _PANEL)))
    panels.sort(key=lambda item: (-item[1]["pixels"].nunique(), -len(item[1])))
    parts = [part for _, part in sorted(panels[:MAX_PANELS], key=lambda item: str(item[0]))]
    parts = [part for part in parts if _most_points(part, "pixels") > 1]
    if not parts:
        return "no network and precision was run to the end with two image sizes"
    fig, axes = style.panels(len(parts), 2 if len(parts) > 1 else 1, 2.9)
    shown = pd.concat(parts)
    rows = [plain_rows(part)[0] for part in parts]
    names = [work_name(row, shown, ("model", "precision", "task")) for row in rows]
    shared, headings = set_apart(names)
    for axis, part, heading in zip(axes, parts, headings, strict=True):
        style.title(axis, heading)
        # A layout on several numbers of ranks has a line for each.
        several = part.groupby("layout")["ranks"].transform("nunique") > 1
        keys = ["layout", part["ranks"].where(several)]
        drawn: collections.Counter[str] = collections.Counter()
        for (layout, ranks), line in part.sort_values("pixels").groupby(keys, dropna=False):
            if line["pixels"].nunique() > 1:  # one point is no line
                label = style.short(layout) + (f" on {ranks}" if pd.notna(ranks) else "")
                _draw_line(axis, line, "pixels", layout, label, drawn[layout])
                drawn[layout] += 1
        _label_images(axis, part)
        axis.set_ylabel("images/s")
        axis.set_ylim(bottom=0)
    style.legend(fig, axes)
    work = f"{shared}. " if shared else ""
    return Drawing(fig, f"{work}{SPREAD}.")


@plot(30, "throughput_by_ranks", "Throughput against ranks")
def by_ranks(data: PlotData) -> Drawing | str:
    """Draws throughput and efficiency against ranks, at the work with the most of them."""
    frame = _points(data.frames)
    frame = frame[frame["ranks"].notna()]
    works = [part for _, part in frame.groupby(group_key(frame, ("campaign", *WORK)))]
    works = [part for part in works if _most_points(part, "ranks") > 1]
    if not works:
        return (
            "no layout of one network, image, batch and precision was run on two numbers of ranks"
        )
    work = max(works, key=lambda part: (part["ranks"].nunique(), *measured_points.weight(part)))
    fig, [speed, share] = style.panels(2, 2, 2.8)
    ideal = _draw_scaling(speed, share, work)
    style.legend(fig, [speed])
    row = plain_rows(work)[0]
    heading = ", ".join(work_name(row, frame, ("model", "image", "precision", "task")))
    return Drawing(fig, f"{heading}. {ideal} {SPREAD}.")


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
        share.plot(ranks, percent, **style.layout_style(layout).of_line)
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
    frame = measured_points.fastest(frames.points)
    kept = frame[frame["height"].notna() & frame["width"].notna()].copy()
    kept["pixels"] = numeric(kept, "height") * numeric(kept, "width")
    return kept


def _draw_line(
    axis: Axes, line: pd.DataFrame, key: str, layout: str, label: str, number: int = 0
) -> None:
    """Draws medians over a column, with bars from p10 to p90; ``number`` is of a layout's lines."""
    middle, low, high = _spread(line)
    look = style.layout_style(layout).of_further_line(number)
    axis.errorbar(
        numeric(line, key), middle, yerr=[low, high], **look,
        elinewidth=1.0, capsize=2.5, label=label,
    )  # fmt: skip


def _most_points(part: pd.DataFrame, key: str) -> int:
    """Returns on how many values of a column the line with most points has one."""
    ranks = part["ranks"] if key != "ranks" else part["layout"]
    return int(part.groupby([part["layout"], ranks], dropna=False)[key].nunique().max())


def _spread(line: pd.DataFrame) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Returns medians, and how far p10 lies below and p90 above."""
    middle = numeric(line, "img_per_s_median")
    low = (middle - numeric(line, "img_per_s_p10")).clip(lower=0).fillna(0)
    high = (numeric(line, "img_per_s_p90") - middle).clip(lower=0).fillna(0)
    return middle, low, high


def _label_images(axis: Axes, part: pd.DataFrame) -> None:
    sizes = part.drop_duplicates("pixels").sort_values("pixels")
    axis.set_xscale("log")
    axis.set_xticks(list(sizes["pixels"]), list(sizes["image"]))
    axis.minorticks_off()
    if len(sizes) > 4:
        axis.tick_params(axis="x", labelrotation=30)
    axis.set_xlim(sizes["pixels"].min() / 1.25, sizes["pixels"].max() * 1.25)
    axis.set_xlabel("image [pixels]")
