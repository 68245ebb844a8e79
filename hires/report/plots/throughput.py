"""How fast is each layout, and how does that change as images grow?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.report.frames import Frames, numeric, plain_rows
from hires.report.load import measured_points as known
from hires.report.load.measured_points import SPREAD, WORK
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

MAX_PANELS = 6
"""Combinations of network and precision that a figure has room for; the rest is in the tables."""
MAX_BARS = 20
_PANEL = tuple(key for key in ("campaign", *WORK) if key != "image")
"""What the points of one panel against image size share."""
_BESIDE = tuple(key for key in WORK if key != "precision")
"""What the bars beside each other share."""


def by_layout(material: Material) -> Plot:
    """Returns a bar for every layout and number of ranks, of the work most layouts were run at."""
    plot = Plot("throughput_by_layout", "Throughput of each layout")
    frame = points(material.frames)
    held = known.common(frame, _BESIDE) if len(frame) else frame
    if held["layout"].nunique() < 2:
        plot.missing = "no network and image was run to the end in two layouts"
        return plot
    held = held.assign(bar=[known.name_of(row, held) for row in plain_rows(held)])
    groups = sorted(held.groupby("precision", dropna=False), key=lambda g: str(g[0]))[:4]
    names = list(held.groupby("bar")["img_per_s_median"].max().sort_values().index)[-MAX_BARS:]
    made, axes = style.figure(1, len(groups), 1.2 + 0.3 * len(names), sharey=True)
    for axis, (precision, part) in zip(axes[0], groups, strict=True):
        _bars(axis, part, names)
        axis.set_title(str(precision))
        axis.set_xlabel("images/s")
    plot.figure = made
    first = plain_rows(held)[0]
    text = f"{first['model']}, {first['image']} pixels, {first['task']}, batch {first['batch']}"
    plot.caption = f"{text}. {SPREAD}. {_best_words(held)}"
    return plot


def by_image(material: Material) -> Plot:
    """Returns throughput against image size, one line a layout and number of ranks."""
    plot = Plot("throughput_by_image", "Throughput against image size")
    frame = points(material.frames)
    groups = [part for part in _groups(frame) if part["pixels"].nunique() > 1]
    if not groups:
        plot.missing = "no network and precision was run to the end with two image sizes"
        return plot
    made, axes = style.panels(len(groups), 2 if len(groups) > 1 else 1, 2.9)
    for axis, held in zip(axes, groups, strict=True):
        for (layout, ranks), line in lines(held).items():
            spread(axis, line.sort_values("pixels"), "pixels", layout, ranks)
        _image_axis(axis, held)
        axis.set_title(_title(held, frame))
        axis.set_ylabel("images/s")
        axis.set_ylim(bottom=0)
    style.legend(made, axes)
    plot.figure, plot.caption = made, _speed_caption(groups, frame)
    return plot


def points(frames: Frames) -> pd.DataFrame:
    """Returns the fastest point of each work, layout and number of ranks, with its pixels."""
    frame = known.fastest(frames.points)
    kept = frame[frame["height"].notna() & frame["width"].notna()].copy()
    kept["pixels"] = numeric(kept, "height") * numeric(kept, "width")
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
    """Draws one bar a layout and number of ranks, the fastest on top."""
    best = part.drop_duplicates("bar").set_index("bar")
    for row, name in enumerate(names):
        if name not in best.index:
            continue
        found = style.mark(str(best.loc[name, "layout"]))
        middle, low, high = (float(value.iloc[0]) for value in _around(best.loc[[name]]))
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


def _groups(frame: pd.DataFrame) -> list[pd.DataFrame]:
    """Returns the panels: those with the most image sizes, in order of their names."""
    found = list(frame.groupby(known.same(frame, _PANEL)))
    found.sort(key=lambda item: (-item[1]["pixels"].nunique(), -len(item[1])))
    return [part for _, part in sorted(found[:MAX_PANELS], key=lambda item: str(item[0]))]


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


def _title(held: pd.DataFrame, frame: pd.DataFrame) -> str:
    """Returns the title of a panel, its campaign in front if there are several."""
    row = plain_rows(held)[0]
    said = [f"{row['model']}", f"{row['precision']}", f"{row['task']}", f"batch {row['batch']}"]
    if frame["campaign"].nunique() > 1:
        said.insert(0, f"{row['campaign']}")
    more = known.told(row, frame, ("settings",))
    return style.short(", ".join([*said, more] if more else said), 48)


def _best_words(held: pd.DataFrame) -> str:
    """Returns the fastest and the slowest bar in words."""
    order = held.sort_values("img_per_s_median", kind="stable")
    words = [
        f"{row['bar']} {row['precision']}, {row['img_per_s_median']:.3g} images/s"
        for row in plain_rows(order)
    ]
    return f"Fastest: {words[-1]}; slowest: {words[0]}."


def _speed_caption(groups: list[pd.DataFrame], frame: pd.DataFrame) -> str:
    """Returns what each panel says, in words."""
    said = []
    for held in groups[:3]:
        small, large = (
            held[held["pixels"] == n] for n in (held["pixels"].min(), held["pixels"].max())
        )
        said.append(f"{_title(held, frame)}: {_winner(small)}, {_winner(large)}")
    return f"{SPREAD}. {'; '.join(said)}."


def _winner(held: pd.DataFrame) -> str:
    """Returns the fastest layout of one image size in words."""
    row = plain_rows(held.sort_values("img_per_s_median", ascending=False))[0]
    name = known.name_of(row, held)
    return f"at {row['image']} {name} is fastest with {row['img_per_s_median']:.3g}"
