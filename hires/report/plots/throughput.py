"""How fast is each layout, and how does that change as images grow?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_PANELS = 6
"""Combinations of network and precision that a figure has room for; the rest is in the tables."""
MAX_BARS = 20
_EACH = ["model", "precision", "task", "batch"]
_POINT = ["model", "image", "task", "batch"]


def by_layout(material: Material) -> Plot:
    """Returns a bar for every layout, at the point that most layouts were run at."""
    plot = Plot("throughput_by_layout", "Throughput of each layout")
    frame = points(material.frames.attempts)
    counts = frame.groupby(_POINT, dropna=False)["layout"].nunique().sort_values()
    if not len(counts) or counts.iloc[-1] < 2:
        plot.missing = "no network and image was run to the end in two layouts"
        return plot
    key = counts.index[-1]
    held = frame.set_index(_POINT).sort_index().loc[[key]].reset_index()
    groups = sorted(held.groupby("precision", dropna=False), key=lambda g: str(g[0]))[:4]
    names = list(held.groupby("layout")["img_per_s_median"].max().sort_values().index)[-MAX_BARS:]
    made, axes = style.figure(1, len(groups), 1.2 + 0.3 * len(names), sharey=True)
    for axis, (precision, part) in zip(axes[0], groups, strict=True):
        _bars(axis, part, names)
        axis.set_title(str(precision))
        axis.set_xlabel("images/s")
    plot.figure = made
    text = f"{key[0]}, {key[1]} pixels, {key[2]}, batch {key[3]}"
    plot.caption = f"{text}: median images/s, bars from p10 to p90. {_best_words(held)}"
    return plot


def by_image(material: Material) -> Plot:
    """Returns throughput against image size, one line a layout and number of ranks."""
    plot = Plot("throughput_by_image", "Throughput against image size")
    frame = points(material.frames.attempts)
    groups = [item for item in _groups(frame) if item[1]["pixels"].nunique() > 1]
    if not groups:
        plot.missing = "no network and precision was run to the end with two image sizes"
        return plot
    made, axes = style.panels(len(groups), 2 if len(groups) > 1 else 1, 2.9)
    for axis, (key, held) in zip(axes, groups, strict=True):
        for (layout, ranks), line in lines(held).items():
            best = line.groupby("pixels", as_index=False).median(numeric_only=True)
            spread(axis, best, "pixels", layout, ranks)
        _image_axis(axis, held)
        axis.set_title(_title(key))
        axis.set_ylabel("images/s")
        axis.set_ylim(bottom=0)
    style.legend(made, axes)
    plot.figure, plot.caption = made, _speed_caption(groups)
    return plot


def points(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the attempts that have a throughput, with the pixels of their images."""
    kept = frame[frame["img_per_s_median"].notna() & frame["height"].notna()].copy()
    kept["pixels"] = numeric(kept, "height") * numeric(kept, "width")
    kept["layout"] = kept["layout"].fillna("?")
    return kept


def lines(frame: pd.DataFrame, by_world: bool = True) -> dict[tuple[str, int | None], pd.DataFrame]:
    """Returns the points by layout, and by ranks where a layout has several."""
    several = frame.groupby("layout")["ranks"].nunique() > 1
    found: dict[tuple[str, int | None], pd.DataFrame] = {}
    for layout, held in frame.groupby("layout", sort=True):
        if by_world and several[layout]:
            for ranks, part in held.groupby("ranks"):
                found[str(layout), int(ranks)] = part
        else:
            found[str(layout), None] = held
    return found


def spread(axis: Axes, line: pd.DataFrame, key: str, layout: str, ranks: int | None) -> None:
    """Draws medians over a column, with bars from p10 to p90."""
    found = style.mark(layout)
    middle, low, high = _around(line)
    axis.errorbar(
        numeric(line, key),
        middle,
        yerr=[low, high],
        color=found.colour,
        marker=found.marker,
        ls=found.line,
        elinewidth=1.0,
        capsize=2.5,
        label=style.short(layout) + (f" on {ranks}" if ranks else ""),
    )


def _bars(axis: Axes, part: pd.DataFrame, names: list[str]) -> None:
    """Draws one bar a layout, the fastest on top."""
    best = part.groupby("layout").median(numeric_only=True)
    for row, layout in enumerate(names):
        if layout not in best.index:
            continue
        found = style.mark(layout)
        middle, low, high = (float(value.iloc[0]) for value in _around(best.loc[[layout]]))
        axis.barh(
            row,
            middle,
            0.66,
            xerr=[[low], [high]],
            color=found.colour,
            hatch=found.hatch,
            error_kw={"ecolor": style.INK, "elinewidth": 1.0, "capsize": 2.5},
        )
    axis.set_yticks(range(len(names)), [style.short(name) for name in names])
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")


def _around(line: pd.DataFrame) -> tuple[pd.Series, pd.Series, pd.Series]:
    """Returns medians, and how far p10 lies below and p90 above."""
    middle = numeric(line, "img_per_s_median")
    low = (middle - numeric(line, "img_per_s_p10")).clip(lower=0).fillna(0)
    high = (numeric(line, "img_per_s_p90") - middle).clip(lower=0).fillna(0)
    return middle, low, high


def _groups(frame: pd.DataFrame) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Returns the panels: those with the most image sizes, in order of their names."""
    found = list(frame.groupby(_EACH, dropna=False))
    found.sort(key=lambda item: (-item[1]["pixels"].nunique(), -len(item[1])))
    return sorted(found[:MAX_PANELS], key=lambda item: tuple(map(str, item[0])))


def _image_axis(axis: Axes, held: pd.DataFrame) -> None:
    """Says sizes of images on an axis of pixels."""
    sizes = held.drop_duplicates("pixels").sort_values("pixels")
    axis.set_xscale("log")
    axis.set_xticks(list(sizes["pixels"]), list(sizes["image"]))
    axis.minorticks_off()
    if len(sizes) > 4:
        axis.tick_params(axis="x", labelrotation=30)
    lowest, highest = sizes["pixels"].min(), sizes["pixels"].max()
    axis.set_xlim(lowest / 1.25, highest * 1.25)
    axis.set_xlabel("image [pixels]")


def _title(key: tuple[Any, ...]) -> str:
    """Returns the title of a panel."""
    model, precision, task, batch = key
    return style.short(f"{model}, {precision}, {task}, batch {batch}", 44)


def _best_words(held: pd.DataFrame) -> str:
    """Returns the fastest and the slowest row in words."""
    order = held.groupby(["layout", "precision"])["img_per_s_median"].median().sort_values()
    words = [f"{' '.join(map(str, key))}, {value:.3g} images/s" for key, value in order.items()]
    return f"Fastest: {words[-1]}; slowest: {words[0]}."


def _speed_caption(groups: list[tuple[tuple[Any, ...], pd.DataFrame]]) -> str:
    """Returns what each panel says, in words."""
    said = []
    for key, held in groups[:3]:
        small, large = (
            held[held["pixels"] == n] for n in (held["pixels"].min(), held["pixels"].max())
        )
        said.append(f"{_title(key)}: {_winner(small)}, {_winner(large)}")
    return f"Median images/s; bars reach from p10 to p90. {'; '.join(said)}."


def _winner(held: pd.DataFrame) -> str:
    """Returns the fastest layout of one image size in words."""
    medians = held.groupby("layout")["img_per_s_median"].median().sort_values()
    return f"at {held['image'].iloc[0]} {medians.index[-1]} is fastest with {medians.iloc[-1]:.3g}"
