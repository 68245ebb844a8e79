"""How does a figure look? The same colour, marker and hatch for the same layout, everywhere.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; a marker and a
hatch go with each, so that a figure says the same in grey.

Source:
    Okabe and Ito, "Color Universal Design", 2008, https://jfly.uni-koeln.de/color/
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hires.core.ranks.timeline import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    FORWARD,
    GRADIENTS,
    HALO,
    OPTIMISER,
    WAIT,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, GRID, PAPER, MUTED = "#1b1b1a", "#dcdcdb", "#fffffe", "#6f6f6e"
"""Of text and axes, of grids, of the ground and of what is said quietly. Nothing else has these
very values, so that the page can put its own in their place, light or dark."""

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, VERMILION, PURPLE = (
    "#4d4d4d", "#e69f00", "#56b4e9", "#009e73", "#d9c520", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
"""Okabe and Ito's, but for black, which a dark ground would hide, and a yellow that light shows."""


@dataclass(frozen=True)
class Mark:
    """How one layout is drawn."""

    colour: str
    marker: str
    hatch: str
    line: Any = "-"


_FAMILIES = (
    # Parts of the name that must be there; the first row that fits decides.
    ({"sp", "gems"}, Mark(VERMILION, "D", "xx")),
    ({"sp", "pp"}, Mark(BLUE, "P", "++")),
    ({"sp", "lp"}, Mark(BLUE, "X", "+")),
    ({"sp"}, Mark(GREEN, "s", "//")),
    ({"gems"}, Mark(PURPLE, "d", "\\\\")),
    ({"pp"}, Mark(SKY, "^", "--")),
    ({"lp"}, Mark(YELLOW, "v", "||")),
    ({"local_dp"}, Mark(ORANGE, "<", "|")),
    ({"dp"}, Mark(ORANGE, "h", "x")),
    ({"single"}, Mark(BLACK, "o", "")),
)
_OTHERS = (PURPLE, SKY, YELLOW, ORANGE)
_DASHES = {"dp": (0, (5, 2)), "local_dp": (0, (1, 1.5))}

KINDS = {
    FORWARD: (BLUE, ""),
    BACKWARD: (SKY, "//"),
    HALO: (GREEN, "xx"),
    COLLECTIVE: (YELLOW, "++"),
    "pipeline": (PURPLE, "\\\\"),
    GRADIENTS: (VERMILION, "||"),
    OPTIMISER: (ORANGE, "--"),
    DATA: (BLACK, ""),
    WAIT: (PURPLE, "\\\\"),
    "bubble": ("#c9c9c8", ""),
    "other": ("#9a9a99", ""),
}
"""Colour and hatch of what a rank does with its time. Hatches are lines: an SVG spells out every
dot of the others."""
PARTS = {
    "params_bytes": ("parameters", BLUE, ""),
    "grads_bytes": ("gradients", SKY, "//"),
    "optimizer_bytes": ("optimiser", ORANGE, "--"),
    "activations_bytes": ("activations", GREEN, "xx"),
    "buffers_bytes": ("buffers", PURPLE, "\\\\"),
    "rest": ("activations and buffers", GREEN, "xx"),
}
"""Name, colour and hatch of what memory is for."""

RC = {
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.titlesize": 9.5,
    "axes.titleweight": "semibold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.7,
    "lines.markersize": 6.0,
    "hatch.linewidth": 0.6,
    "hatch.color": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    "axes.formatter.useoffset": False,
}
WIDTH = 7.6
"""Inches of a figure: a text column of a page on screen, or two of a paper."""


def mark(layout: str) -> Mark:
    """Returns how a layout is drawn, the same in every figure of every report.

    >>> mark("sp+gems").colour == mark("sp+gems+dp").colour
    True
    """
    parts = set(layout.split("+"))
    for wanted, found in _FAMILIES:
        if wanted <= parts:
            more = next((p for p in ("local_dp", "dp") if p in parts and p not in wanted), None)
            return (
                found
                if more is None
                else Mark(
                    found.colour, "*" if more == "dp" else "p", found.hatch * 2, _DASHES[more]
                )
            )
    # A name that nobody knows has a colour by its letters: not one of its own, but always the same.
    return Mark(_OTHERS[zlib.crc32(layout.encode()) % len(_OTHERS)], ">", "-", "--")


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """Sets matplotlib's defaults to ours inside, and back behind."""
    import matplotlib as mpl

    with mpl.rc_context(RC):  # type: ignore[arg-type]
        yield


def figure(rows: int = 1, columns: int = 1, height: float = 3.4, **more: Any) -> tuple[Figure, Any]:
    """Returns an empty figure of our width and its axes, as an array of rows and columns.

    Args:
        rows: of axes.
        columns: of axes.
        height: of the figure in inches.
        more: options of ``Figure.subplots``.
    """
    from matplotlib.figure import Figure

    made = Figure(figsize=(WIDTH, height), layout="constrained")
    return made, made.subplots(rows, columns, squeeze=False, **more)


def panels(
    count: int, columns: int = 2, height: float = 2.6, **more: Any
) -> tuple[Figure, list[Axes]]:
    """Returns a figure of some panels, row by row; places that are left over are empty.

    Args:
        count: of panels.
        columns: most panels beside each other.
        height: of one row in inches.
        more: options of ``Figure.subplots``.
    """
    columns = min(count, columns)
    rows = math.ceil(count / columns)
    made, axes = figure(rows, columns, height * rows + 0.6, **more)
    every = list(axes.flat)
    for left in every[count:]:
        left.set_axis_off()
    return made, every[:count]


def legend(made: Figure, axes: Iterable[Axes], columns: int = 6) -> None:
    """Puts one legend for all axes above them, each label once."""
    known: dict[str, Any] = {}
    for one in axes:
        handles, labels = one.get_legend_handles_labels()
        known |= {label: h for h, label in zip(handles, labels, strict=True) if label not in known}
    if known:
        made.legend(
            list(known.values()),
            list(known),
            loc="outside upper left",
            ncols=min(columns, len(known)),
            handlelength=1.8,
            columnspacing=1.2,
        )


def no_grid(axis: Axes, which: str) -> None:
    """Takes away the lines across an axis of names: there is nothing between them."""
    axis.grid(False, axis=which)  # type: ignore[arg-type]
    axis.tick_params(axis=which, length=0)  # type: ignore[arg-type]


def log_axis(axis: Axes, which: str, base: float = 10.0) -> None:
    """Makes an axis logarithmic, its numbers in plain letters: 0.001, or 1e-06."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    (axis.set_xscale if which == "x" else axis.set_yscale)("log", base=base)
    held = axis.xaxis if which == "x" else axis.yaxis
    held.set_major_formatter(FuncFormatter(lambda value, _: _plain(value)))
    held.set_minor_formatter(NullFormatter())
    low, high = held.get_view_interval()
    if base == 10 and 0 < low < high < 1000 * low:
        # Fewer than three powers of ten: numbers between them are needed to read any value.
        held.set_major_locator(LogLocator(base, subs=(1.0, 2.0, 5.0)))


def whole_steps(axis: Axes) -> None:
    """Numbers the horizontal axis by whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.xaxis.set_major_locator(MaxNLocator(integer=True))


def _plain(value: float) -> str:
    """Returns a number in plain letters from 0.001 to a million, or as 1e-06."""
    return f"{value:.7g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"


def short(name: str, length: int = 26) -> str:
    """Returns a name that fits into a figure."""
    return name if len(name) <= length else f"{name[: length - 3]}..."


def listed(words: Sequence[str]) -> str:
    """Returns words as people list them: ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
