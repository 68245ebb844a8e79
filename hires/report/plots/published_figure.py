"""Draws a published figure anew: predicted, measured, and both beside the published numbers."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from hires.core.units import GIB, MIB
from hires.report.plots import style
from hires.report.published_figures import (
    MEASURED,
    MEMORY,
    PREDICTED,
    SPEED,
    Compared,
    FigurePoint,
    PublishedFigure,
    labels,
)

PRECISIONS = {
    "fp32": (style.BLACK, ""),
    "fp16": (style.SKY, "//"),
    "bf16": (style.ORANGE, "\\\\"),
    "int8": (style.GREEN, "xx"),
}
"""Colour and hatch of each precision; others have those of ``_OTHER``."""
_OTHER = (style.PURPLE, "++")
_MARKS = (
    ("published", "D", style.VERMILION),
    (PREDICTED, "o", style.BLUE),
    (MEASURED, "s", style.GREEN),
)
_GROUP = 0.84
"""Width of the bars of one label together."""


def draw(figure: PublishedFigure) -> Figure:
    """Returns a panel for each quantity predicted and measured, and one of the published numbers.

    Numbers that were not measured (yet) have no panel.
    """
    compared = figure.compared()
    shown = [
        (source, what)
        for source in (PREDICTED, MEASURED)
        for what in figure.spec.shows
        if any(_values(figure, point, what) for point in figure.points if point.source == source)
    ]
    count = len(shown) + bool(compared)
    fig, axes = style.panels(count, 2, 2.7)
    for axis, (source, what) in zip(axes, shown, strict=False):
        points = [point for point in figure.points if point.source == source]
        _bars(axis, figure, points, what)
        models = ", ".join(dict.fromkeys(point.model for point in points))
        style.title(axis, f"{source}: {models}")
    if compared:
        _numbers(axes[-1], compared)
        style.title(axes[-1], "what the text gives, and ours")
    style.legend(fig, axes)
    return fig


def _values(figure: PublishedFigure, point: FigurePoint, what: str) -> list[float]:
    """Returns what the bars of a point show: one, or one for each rank."""
    if what == SPEED:
        return [point.img_per_s] if point.img_per_s else []
    if figure.spec.by_rank:
        return list(map(float, point.rank_bytes))
    return [float(point.total_bytes)] if point.total_bytes else []


def _bars(axis: Axes, figure: PublishedFigure, points: Sequence[FigurePoint], what: str) -> None:
    precisions = list(dict.fromkeys(point.precision for point in points))
    by_rank = what == MEMORY and figure.spec.by_rank
    names = list(dict.fromkeys(labels(points)))
    if by_rank:
        names = [str(rank) for rank in range(max(point.ranks for point in points))]
    most = max(value for point in points for value in _values(figure, point, what) or [0.0])
    unit, factor = ("images/s", 1.0) if what == SPEED else ("GiB", GIB)
    if what == MEMORY and most < GIB:
        unit, factor = "MiB", MIB
    width = _GROUP / len(precisions)
    for number, precision in enumerate(precisions):
        own = [
            (label, point)
            for label, point in zip(labels(points), points, strict=True)
            if point.precision == precision
        ]
        heights = {
            name: value
            for label, point in own
            for name, value in zip(
                names if by_rank else [label], _values(figure, point, what), strict=False
            )
        }
        colour, hatch = PRECISIONS.get(precision, _OTHER)
        axis.bar(
            [names.index(name) - _GROUP / 2 + width * (number + 0.5) for name in heights],
            [value / factor for value in heights.values()],
            width * 0.94, color=colour, hatch=hatch, label=precision,
        )  # fmt: skip
    axis.set_xticks(range(len(names)), names)
    if max(map(len, names)) > 6 and len(names) > 3:
        axis.tick_params(axis="x", labelrotation=30, labelsize=7)
    axis.set_xlabel("rank" if by_rank else "")
    axis.set_ylabel(unit)
    style.no_grid(axis, "x")


def _numbers(axis: Axes, compared: Sequence[Compared]) -> None:
    for name, marker, colour in _MARKS:
        values = [
            one.number.value if name == "published" else getattr(one, name) for one in compared
        ]
        places = [place for place, value in enumerate(values) if value is not None]
        if places:
            axis.plot(
                [values[place] for place in places], places, ls="", marker=marker, ms=7,
                color=colour, label=name, alpha=0.85,
            )  # fmt: skip
    axis.set_yticks(range(len(compared)), [f"{one.ratio}\n{one.scope}" for one in compared])
    axis.set_xlim(left=0)
    style.no_grid(axis, "y")
    axis.set_ylim(len(compared) - 0.5, -0.5)
    axis.set_xlabel("GB" if compared[0].number.what == "GB" else "ratio")
