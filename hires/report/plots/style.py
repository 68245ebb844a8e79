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

    @property
    def of_line(self) -> dict[str, Any]:
        """The options of ``Axes.plot``."""
        return {"color": self.colour, "marker": self.marker, "ls": self.line}

    def of_further_line(self, number: int) -> dict[str, Any]:
        """The options of the next lines of one layout in a figure; 0 is its first line."""
        if not number:
            return self.of_line
        dashes = (0, (1, 1 + number))
        return self.of_line | {"ls": dashes, "markerfacecolor": PAPER, "markeredgewidth": 1.4}


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
PARTS = {
    "params_bytes": ("parameters", BLUE, ""),
    "optimizer_bytes": ("optimiser", ORANGE, "--"),
    "grads_bytes": ("gradients", SKY, "//"),
    "rest": ("activations and buffers", GREEN, "xx"),
}
"""Label, colour and hatch of each use of memory, from the bottom of a bar to its top."""

WIDTH = 7.6
"""Inches of a figure: the text column of a page on screen, or two columns of a paper."""
_LETTER = 0.072
"""Inches of a letter of a legend, about."""
_LINE = 0.18
"""Inches of a line of a legend."""
_TITLE_LETTERS = 12
"""Letters of a title in an inch, about."""
_TITLE_LINES = 3
"""Lines of a title at the most: the caption has the rest."""


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
def styled() -> Iterator[None]:
    """Gives matplotlib the defaults of reports."""
    # The site's own settings hold where the file says nothing.
    with mpl.style.context(Path(__file__).with_name("report.mplstyle")):
        yield


def figure(rows: int = 1, columns: int = 1, height: float = 3.4, **more: Any) -> tuple[Figure, Any]:
    """Returns an empty figure, ``height`` in inches, and its (rows, columns) array of axes."""
    fig = Figure(figsize=(WIDTH, height), layout="constrained")
    return fig, fig.subplots(rows, columns, squeeze=False, **more)


def panels(
    count: int, columns: int = 2, height: float = 2.6, **more: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of ``count`` panels, at most ``columns`` side by side.

    Each row is ``height`` inches high.
    """
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    fig, grid = figure(rows, columns, height * rows + 0.6, **more)
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.remove()
    return fig, axes[:count]


def legend(fig: Figure, axes: Iterable[Axes], columns: int = 6) -> None:
    """Puts one legend for all axes above them, each label once, in as many columns as fit.

    Figures have room for one line; the figure grows by those below it.
    """
    handles: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        each = _LETTER * max(map(len, handles)) + 0.5
        columns = max(1, min(columns, len(handles), int(WIDTH / each)))
        fig.legend(
            list(handles.values()), list(handles), loc="outside upper left", ncols=columns,
            handlelength=2.6, columnspacing=1.2,
        )  # fmt: skip
        grow(fig, _LINE * (math.ceil(len(handles) / columns) - 1))


def grow(fig: Figure, inches: float) -> None:
    """Makes a figure higher, so that what is added to it takes no room from its axes."""
    fig.set_figheight(fig.get_figheight() + inches)


def title(axis: Axes, text: str) -> None:
    """Puts a title above a panel, in as many lines as its width demands; the figure grows by them.

    Call it for panels of a new figure, before anything is drawn: their width is known then.
    """
    fig = axis.get_figure()
    assert isinstance(fig, Figure)
    letters = max(12, int(axis.get_position().width * fig.get_figwidth() * _TITLE_LETTERS))
    lines = textwrap.wrap(text, letters, max_lines=_TITLE_LINES, placeholder="...")
    axis.set_title("\n".join(lines), fontsize=8.5)
    grow(fig, 0.14 * max(0, len(lines) - 1))


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


def mark_log_axes(fig: Figure) -> None:
    """Says in the label of a logarithmic axis that it is one."""
    for axis in fig.axes:
        for scale, name in ((axis.xaxis, axis.get_xscale()), (axis.yaxis, axis.get_yscale())):
            if name == "log" and (label := scale.get_label_text()):
                scale.set_label_text(f"{label}, log scale")


def short(name: str, length: int = 26) -> str:
    """Returns a name of at most ``length`` characters."""
    return name if len(name) <= length else f"{name[: length - 3]}..."
