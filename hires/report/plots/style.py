"""Defines how figures look: each layout has the same colour, marker and hatch in all of them.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; a marker and
a hatch go with each, so that a figure reads the same in grey.

Source:
    Okabe and Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hires.core.ranks import timeline

INK, GRID, PAPER, MUTED = "#1b1b1a", "#dcdcdb", "#fffffe", "#6f6f6e"
"""Of text and axes, grids, background and secondary text, as in ``report.mplstyle``."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#4d4d4d", "#e69f00", "#56b4e9", "#009e73", "#d9c520", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
"""Okabe and Ito's, except black, invisible on a dark background, and yellow, too pale on a light
one."""


class LayoutStyle(NamedTuple):
    """How one layout is drawn."""

    colour: str
    marker: str
    hatch: str
    line: Any = "-"

    @property
    def of_line(self) -> dict[str, Any]:
        """The options of ``Axes.plot``."""
        return {"color": self.colour, "marker": self.marker, "ls": self.line}


_FAMILIES = (
    # Parts that the layout's name must hold; the first row that fits decides.
    ({"sp", "gems"}, LayoutStyle(VERMILION, "D", "xx")),
    ({"sp", "pp"}, LayoutStyle(BLUE, "P", "++")),
    ({"sp", "lp"}, LayoutStyle(BLUE, "X", "+")),
    ({"sp"}, LayoutStyle(GREEN, "s", "//")),
    ({"gems"}, LayoutStyle(PURPLE, "d", "\\\\")),
    ({"pp"}, LayoutStyle(SKY, "^", "--")),
    ({"lp"}, LayoutStyle(YELLOW, "v", "||")),
    ({"local_dp"}, LayoutStyle(ORANGE, "<", "|")),
    ({"dp"}, LayoutStyle(ORANGE, "h", "x")),
    ({"single"}, LayoutStyle(BLACK, "o", "")),
)
_OTHERS = (PURPLE, SKY, YELLOW, ORANGE)
_REPLICATED = {"local_dp": ("p", (0, (1, 1.5))), "dp": ("*", (0, (5, 2)))}  # marker, dashes

KINDS = {
    timeline.DATA: ("data", BLACK, ""),
    timeline.FORWARD: ("forward", BLUE, ""),
    timeline.BACKWARD: ("backward", SKY, "//"),
    timeline.HALO: ("halo", GREEN, "xx"),
    timeline.COLLECTIVE: ("batch statistics", YELLOW, "++"),
    timeline.WAIT: ("wait for a stage", PURPLE, "\\\\"),
    "pipeline": ("pipeline messages", PURPLE, "\\\\"),
    timeline.GRADIENTS: ("all-reduce", VERMILION, "||"),
    timeline.OPTIMISER: ("optimiser", ORANGE, "--"),
    "bubble": ("bubble", "#c9c9c8", ""),
    "other": ("between spans", "#9a9a99", ""),
}
"""Label, colour and hatch of each activity of a rank, in the order of a bar. Hatches are lines: an
SVG would write every single dot of a dotted one."""
PARTS = {
    "params_bytes": ("parameters", BLUE, ""),
    "optimizer_bytes": ("optimiser", ORANGE, "--"),
    "grads_bytes": ("gradients", SKY, "//"),
    "rest": ("activations and buffers", GREEN, "xx"),
}
"""Label, colour and hatch of each use of memory, from the bottom of a bar to its top."""

WIDTH = 7.6  # inches: the text column of a page on screen, or two columns of a paper


def layout_style(layout: str) -> LayoutStyle:
    """Returns how a layout is drawn, the same in every figure of every report.

    >>> layout_style("sp+gems").colour == layout_style("sp+gems+dp").colour
    True
    """
    parts = set(layout.split("+"))
    for wanted, family in _FAMILIES:
        if wanted <= parts:
            replicated = next((p for p in _REPLICATED if p in parts and p not in wanted), None)
            if replicated is None:
                return family
            marker, line = _REPLICATED[replicated]
            return LayoutStyle(family.colour, marker, family.hatch * 2, line)
    # An unknown name gets a colour by its letters: not unique, but always the same.
    return LayoutStyle(_OTHERS[zlib.crc32(layout.encode()) % len(_OTHERS)], ">", "-", "--")


def styled() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which matplotlib has the defaults of reports."""
    # The site's own settings hold where the file says nothing.
    return mpl.style.context(Path(__file__).with_name("report.mplstyle"))


def figure(rows: int = 1, columns: int = 1, height: float = 3.4, **more: Any) -> tuple[Figure, Any]:
    """Returns an empty figure, ``height`` in inches, and its (rows, columns) array of axes."""
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **more)


def panels(count: int, columns: int = 2, height: float = 2.6) -> tuple[Figure, list[Axes]]:
    """Returns a figure of ``count`` panels in rows of ``columns``, each row ``height`` inches."""
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    fig, axes = figure(rows, columns, height * rows + 0.6)
    for unused in axes.flat[count:]:
        unused.set_axis_off()
    return fig, list(axes.flat[:count])


def legend(fig: Figure, axes: Iterable[Axes], columns: int = 6) -> None:
    """Puts one legend for all axes above them, each label once."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        fig.legend(
            list(handles.values()), list(handles), loc="outside upper left",
            ncols=min(columns, len(handles)), handlelength=1.8, columnspacing=1.2,
        )  # fmt: skip


def no_grid(axis: Axes, which: str) -> None:
    """Removes grid lines and ticks of an axis of names: there is nothing between them."""
    axis.grid(False, axis=which)  # type: ignore[arg-type]
    axis.tick_params(axis=which, length=0)  # type: ignore[arg-type]


def named_rows(axis: Axes, names: Sequence[str]) -> None:
    """Labels the rows of a chart of bars, which begin at 0."""
    axis.set_yticks(range(len(names)), [short(name) for name in names])
    axis.set_xlim(left=0)
    no_grid(axis, "y")


def log_axis(axis: Axes, which: str, base: float = 10.0) -> None:
    """Makes an axis logarithmic, labelled 0.001 or 1e-06 instead of powers."""

    def plain(value: float, _: int) -> str:
        return f"{value:.7g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"

    (axis.set_xscale if which == "x" else axis.set_yscale)("log", base=base)
    scale = axis.xaxis if which == "x" else axis.yaxis
    scale.set_major_formatter(FuncFormatter(plain))
    scale.set_minor_formatter(NullFormatter())
    low, high = scale.get_view_interval()
    if base == 10 and 0 < low < high < 1000 * low:
        # Fewer than three powers of ten: values can only be read with labels between them.
        scale.set_major_locator(LogLocator(base, subs=(1.0, 2.0, 5.0)))


def short(name: str, length: int = 26) -> str:
    """Returns a name of at most ``length`` characters."""
    return name if len(name) <= length else f"{name[: length - 3]}..."
