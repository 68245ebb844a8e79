"""Draws what ``hires bench comm`` measured: time by size, one figure for each operation.

``python -m hires.report.comm_curves FOLDER`` reads ``comm.json`` and writes ``comm-OPERATION.svg``
and ``.png`` beside it.
"""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from hires.core.store import reading
from hires.core.store.files import write_atomically
from hires.core.units import size
from hires.report.plots import style

NAME = "comm.json"
RAW = "raw:"
_COLOURS = {
    "gloo": style.BLUE,
    "shm": style.GREEN,
    "cma": style.PURPLE,
    "table": style.BLACK,
    **dict.fromkeys(("mpi", "mpi4py"), style.VERMILION),
    "c": style.ORANGE,
    "nccl": style.SKY,
    "nccl_direct": style.YELLOW,
}
"""Library -> its colour, with hires and without."""
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
_FEWEST = 3  # sizes of a curve

Row = dict[str, Any]


def main() -> int:
    """Draws the figures of the folder that the command line names."""
    folder = Path(sys.argv[1])
    draw(reading.read_json(folder / NAME, needed=True)["rows"], folder)
    return 0


def draw(rows: list[Row], folder: Path) -> list[str]:
    """Writes the figures; returns the operations drawn: those measured at three sizes or more."""
    by_operation: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        by_operation[row["operation"]].append(row)
    drawn = []
    for operation, own in by_operation.items():
        if len({row["bytes"] for row in own}) < _FEWEST:
            continue
        with style.styled():
            figure = curves(operation, own)
            for form in ("svg", "png"):
                data = io.BytesIO()
                figure.savefig(data, format=form, dpi=200)
                write_atomically(folder / f"comm-{operation}.{form}", data.getvalue())
        drawn.append(operation)
    return drawn


def curves(operation: str, rows: list[Row]) -> Figure:
    """Returns the medians of every way by size, a panel for each number of ranks and mode."""
    panels: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        mode = "" if row["blocking"] else ", issued and waited for"
        panels[f"{operation}, {row['ranks']} ranks{mode}, {row['dtype']}"].append(row)
    figure, axes = style.panels(len(panels), 2, 3.0)
    ways = [*dict.fromkeys(way for row in rows for way in row["ways"])]
    for axis, (name, own) in zip(axes, panels.items(), strict=True):
        style.title(axis, name)
        for way in ways:
            _draw_way(axis, way, ways, own)
        _size_axis(axis, sorted({row["bytes"] for row in own}))
        style.log_axis(axis, "y")
        axis.set_ylabel("us, median")
    style.legend(figure, axes, 4)
    return figure


def _draw_way(axis: Axes, way: str, ways: list[str], rows: list[Row]) -> None:
    points = sorted(
        (row["bytes"], row["ways"][way]["p50_s"] * 1e6)
        for row in rows
        if "p50_s" in row["ways"].get(way, {})
    )
    if not points:
        return
    colour = _COLOURS.get(way.removeprefix(RAW).partition(":")[0], style.MUTED)
    marker = _MARKERS[ways.index(way) % len(_MARKERS)]
    # Raw libraries are dashed, so that each is seen beside the curve of hires that lies on it;
    # algorithms are dotted, and differ from their backend and each other by their markers.
    line = "--" if way.startswith(RAW) else ":" if ":" in way else "-"
    axis.plot(*zip(*points, strict=True), color=colour, marker=marker, ls=line, ms=3.5, label=way)


def _size_axis(axis: Axes, sizes: list[int]) -> None:
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes[:: max(1, -(-len(sizes) // 5))])
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("size")


if __name__ == "__main__":
    sys.exit(main())
