"""Defines how figures look: each layout has the same colour, marker and hatch in all of them.

Colours are those of Okabe and Ito, which people with any colour vision can tell apart; a marker and
a hatch go with each, so that a figure reads the same in grey.

Source:
    Okabe and Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

import contextlib
import itertools
import math
import textwrap
import zlib
from collections.abc import Iterable, Iterator, Sequence
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

    def of_line(self, number: int = 0) -> dict[str, Any]:
        """Returns the options of ``Axes.plot`` for the lines of one layout; 0 is its first."""
        options = {"color": self.colour, "marker": self.marker, "ls": self.line}
        further = {"ls": (0, (1, 1 + number)), "markerfacecolor": PAPER, "markeredgewidth": 1.4}
        return options | further if number else options


_FAMILIES = (
    # Parts that the layout's name must hold; the first row that fits decides. Dashes are points of
    # line and gap, so that lines that lie on each other can be told apart.
    ({"sp", "gems"}, LayoutStyle(VERMILION, "D", "xx", (0, (7, 2)))),
    ({"sp", "pp"}, LayoutStyle(BLUE, "P", "++", (0, (4, 1.5, 1, 1.5)))),
    ({"sp", "lp"}, LayoutStyle(BLUE, "X", "+", (0, (2, 1.5)))),
    ({"sp"}, LayoutStyle(GREEN, "s", "//", (0, (5, 1.5)))),
    ({"gems"}, LayoutStyle(PURPLE, "d", "\\\\", (0, (6, 2, 1, 2)))),
    ({"pp"}, LayoutStyle(SKY, "^", "--", (0, (3, 1.5)))),
    ({"lp"}, LayoutStyle(YELLOW, "v", "||", (0, (3, 1.5, 1, 1.5, 1, 1.5)))),
    ({"local_dp"}, LayoutStyle(ORANGE, "<", "|", (0, (8, 2)))),
    ({"dp"}, LayoutStyle(ORANGE, "h", "x", (0, (4, 2)))),
    ({"single"}, LayoutStyle(BLACK, "o", "")),
)
_OTHERS = tuple(itertools.product((PURPLE, SKY, YELLOW, ORANGE), (">", "8", "H", "p")))
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

WIDTH = 7.6
"""Inches of a figure: the text column of a page on screen, or two columns of a paper."""
_PANEL = 2.3
"""Inches that a panel needs at least."""


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
    colour, marker = _OTHERS[zlib.crc32(layout.encode()) % len(_OTHERS)]
    return LayoutStyle(colour, marker, "-", "--")


@contextlib.contextmanager
def styled(width: float = WIDTH) -> Iterator[None]:
    """Gives matplotlib the defaults of reports; figures are ``width`` inches wide."""
    # The site's own settings hold where the file says nothing.
    of_reports = Path(__file__).with_name("report.mplstyle")
    with mpl.style.context([of_reports, {"figure.figsize": (width, width / 2)}]):
        yield


def width() -> float:
    """Returns the inches of a figure."""
    return float(mpl.rcParams["figure.figsize"][0])


def panels(
    count: int, columns: int = 2, height: float = 2.6, **more: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of ``count`` panels, at most ``columns`` side by side.

    Each row is ``height`` inches high.
    """
    columns = max(1, min(columns, count, int(width() // _PANEL)))
    rows = math.ceil(count / columns)
    fig = Figure(figsize=(width(), height * rows + 0.6), layout="constrained")
    axes = list(fig.subplots(rows, columns, squeeze=False, **more).flat)
    for axis in axes[count:]:
        axis.remove()
    return fig, axes[:count]


def legend(fig: Figure, axes: Iterable[Axes]) -> None:
    """Puts one legend for all axes above them, each label once, in as many columns as fit."""
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        letters = max(map(len, handles))
        columns = max(1, min(6, len(handles), int(width() / (0.072 * letters + 0.5))))
        rows = math.ceil(len(handles) / columns)
        fig.set_figheight(fig.get_figheight() + 0.18 * (rows - 1))
        fig.legend(
            list(handles.values()), list(handles), loc="outside upper left", ncols=columns,
            handlelength=2.6, columnspacing=1.2,
        )  # fmt: skip


def title(axis: Axes, text: str) -> None:
    """Puts a title above a panel, in at most three lines of its width."""
    place = axis.get_subplotspec()
    columns = 1 if place is None else place.get_gridspec().ncols
    letters = max(12, int(12 * (width() / columns - 0.6)))
    lines = textwrap.wrap(text, letters, max_lines=3, placeholder="...")
    axis.set_title("\n".join(lines), fontsize=8.5)


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
