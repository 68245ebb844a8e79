"""Plots the throughput of each layout, and how it changes with the image size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.report.frames import Frames, numeric, plain_rows
from hires.report.load.measured_points import (
    SPREAD,
    WORK,
    common_work,
    distinction,
    fastest,
    group_key,
    point_name,
)
from hires.report.plots import style
from hires.report.plots.base import Drawing, NotDrawnError, PlotData, plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_PANELS = 6
"""Combinations of network and precision that fit into a figure; the others are in the tables."""
MAX_BARS = 20
_PANEL = tuple(key for key in ("campaign", *WORK) if key != "image")
"""Columns that the points of one panel against image size share."""
_BARS = tuple(key for key in WORK if key != "precision")
"""Columns that the bars of one figure share."""


@plot(10, "throughput_by_layout", "Throughput of each layout")
def by_layout(data: PlotData) -> Drawing:
    """Draws a bar for every layout and number of ranks, at the work most layouts were run with."""
    frame = points(data.frames)
    bars = common_work(frame, _BARS) if len(frame) else frame
    if bars["layout"].nunique() < 2:
        raise NotDrawnError("no network and image was run to the end in two layouts")
    bars = bars.assign(bar=[point_name(row, bars) for row in plain_rows(bars)])
    groups = sorted(bars.groupby("precision", dropna=False), key=lambda g: str(g[0]))[:4]
    names = list(bars.groupby("bar")["img_per_s_median"].max().sort_values().index)[-MAX_BARS:]
    fig, [axes] = style.figure(1, len(groups), 1.2 + 0.3 * len(names), sharey=True)
    for axis, (precision, part) in zip(axes, groups, strict=True):
        _draw_bars(axis, part, names)
        axis.set_title(str(precision))
        axis.set_xlabel("images/s")
    first = plain_rows(bars)[0]
    work = f"{first['model']}, {first['image']} pixels, {first['task']}, batch {first['batch']}"
    words = [
        f"{row['bar']} {row['precision']}, {row['img_per_s_median']:.3g} images/s"
        for row in plain_rows(bars.sort_values("img_per_s_median", kind="stable"))
    ]
    return Drawing(fig, f"{work}. {SPREAD}. Fastest: {words[-1]}; slowest: {words[0]}.")


@plot(20, "throughput_by_image", "Throughput against image size")
def by_image(data: PlotData) -> Drawing:
    """Draws throughput against image size, one line for each layout and number of ranks."""
    frame = points(data.frames)
    groups = [part for part in _panels(frame) if part["pixels"].nunique() > 1]
    if not groups:
        raise NotDrawnError("no network and precision was run to the end with two image sizes")
    fig, axes = style.panels(len(groups), 2 if len(groups) > 1 else 1, 2.9)
    for axis, part in zip(axes, groups, strict=True):
        for (layout, ranks), line in lines(part).items():
            draw_line(axis, line.sort_values("pixels"), "pixels", layout, ranks)
        _label_images(axis, part)
        axis.set_title(_title(part, frame))
        axis.set_ylabel("images/s")
        axis.set_ylim(bottom=0)
    style.legend(fig, axes)
    words = []
    for part in groups[:3]:
        ends = (part["pixels"].min(), part["pixels"].max())
        best = ", ".join(_fastest_words(part[part["pixels"] == pixels]) for pixels in ends)
        words.append(f"{_title(part, frame)}: {best}")
    return Drawing(fig, f"{SPREAD}. {'; '.join(words)}.")


def points(frames: Frames) -> pd.DataFrame:
    """Returns the fastest point of each work, layout and number of ranks, with its pixels."""
    frame = fastest(frames.points)
    kept = frame[frame["height"].notna() & frame["width"].notna()].copy()
    kept["pixels"] = numeric(kept, "height") * numeric(kept, "width")
    return kept


def lines(frame: pd.DataFrame, by_ranks: bool = True) -> dict[tuple[str, int | None], pd.DataFrame]:
    """Returns the points by layout, and by ranks where a layout has several."""
    several = frame.groupby("layout")["ranks"].nunique() > 1
    parts: dict[tuple[str, int | None], pd.DataFrame] = {}
    for layout, part in frame.groupby("layout", sort=True):
        if by_ranks and several[layout]:
            for ranks, own in part.groupby("ranks"):
                parts[str(layout), int(ranks)] = own
        else:
            parts[str(layout), None] = part
    return parts


def draw_line(axis: Axes, line: pd.DataFrame, key: str, layout: str, ranks: int | None) -> None:
    """Draws medians over a column, with bars from p10 to p90."""
    look = style.layout_style(layout)
    middle, low, high = _spread(line)
    axis.errorbar(
        numeric(line, key), middle, yerr=[low, high], color=look.colour, marker=look.marker,
        ls=look.line, elinewidth=1.0, capsize=2.5,
        label=style.short(layout) + (f" on {ranks}" if ranks else ""),
    )  # fmt: skip


def _draw_bars(axis: Axes, part: pd.DataFrame, names: list[str]) -> None:
    """Draws one bar for each layout and number of ranks, the fastest on top."""
    best = part.drop_duplicates("bar").set_index("bar")
    for row, name in enumerate(names):
        if name not in best.index:
            continue
        look = style.layout_style(str(best.loc[name, "layout"]))
        middle, low, high = (float(value.iloc[0]) for value in _spread(best.loc[[name]]))
        axis.barh(
            row, middle, 0.66, xerr=[[low], [high]], color=look.colour, hatch=look.hatch,
            error_kw={"ecolor": style.INK, "elinewidth": 1.0, "capsize": 2.5},
        )  # fmt: skip
    axis.set_yticks(range(len(names)), [style.short(name) for name in names])
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")


def _spread(line: pd.DataFrame) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Returns medians, and how far p10 lies below and p90 above."""
    middle = numeric(line, "img_per_s_median")
    low = (middle - numeric(line, "img_per_s_p10")).clip(lower=0).fillna(0)
    high = (numeric(line, "img_per_s_p90") - middle).clip(lower=0).fillna(0)
    return middle, low, high


def _panels(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Returns the panels: those with the most image sizes, in order of their names."""
    groups = list(frame.groupby(group_key(frame, _PANEL)))
    groups.sort(key=lambda item: (-item[1]["pixels"].nunique(), -len(item[1])))
    return [part for _, part in sorted(groups[:MAX_PANELS], key=lambda item: str(item[0]))]


def _label_images(axis: Axes, part: pd.DataFrame) -> None:
    """Labels a logarithmic axis of pixels with image sizes."""
    sizes = part.drop_duplicates("pixels").sort_values("pixels")
    axis.set_xscale("log")
    axis.set_xticks(list(sizes["pixels"]), list(sizes["image"]))
    axis.minorticks_off()
    if len(sizes) > 4:
        axis.tick_params(axis="x", labelrotation=30)
    axis.set_xlim(sizes["pixels"].min() / 1.25, sizes["pixels"].max() * 1.25)
    axis.set_xlabel("image [pixels]")


def _title(part: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Returns the title of a panel, its campaign in front if there are several."""
    row = plain_rows(part)[0]
    words = [f"{row['model']}", f"{row['precision']}", f"{row['task']}", f"batch {row['batch']}"]
    if frame["campaign"].nunique() > 1:
        words.insert(0, f"{row['campaign']}")
    settings = distinction(row, frame, ("settings",))
    return style.short(", ".join([*words, settings] if settings else words), 48)


def _fastest_words(part: pd.DataFrame) -> str:
    row = plain_rows(part.sort_values("img_per_s_median", ascending=False))[0]
    name = point_name(row, part)
    return f"at {row['image']} {name} is fastest with {row['img_per_s_median']:.3g}"
