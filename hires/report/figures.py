"""Which plots can be drawn from some runs, and how do they become files?"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.core.store.files import cannot_write
from hires.report.load.reading import Note
from hires.report.plots import (
    backends,
    largest_image,
    loss_curve,
    memory_bars,
    precision,
    scaling,
    steps,
    style,
    throughput,
    tiles,
    traffic_map,
)
from hires.report.plots.base import Material, Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("svg", "pdf", "png")
DPI = 200
"""Of a PNG."""
OPTION = "--out DIR"
_PLOTS: tuple[Callable[[Material], Plot], ...] = (
    throughput.by_layout,
    throughput.by_image,
    scaling.by_ranks,
    largest_image.largest_image,
    memory_bars.per_rank,
    steps.split_step,
    steps.timeline,
    traffic_map.between_ranks,
    tiles.grid,
    precision.error,
    loss_curve.curves,
    backends.links,
)
_COLOURS = {
    style.INK: "currentColor",
    style.MUTED: "var(--muted)",
    style.GRID: "var(--grid)",
    style.PAPER: "var(--figure)",
    style.BLACK: "var(--neutral)",
}
"""What the page draws in colours of its own, light or dark."""
_ID = re.compile(r'(\bid="|href="#|url\(#)')
_HEAD = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
_ROOT = re.compile(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>')


def draw(material: Material) -> list[Plot]:
    """Returns all plots, each with its figure or with why there is none.

    A plot that a damaged run breaks is left out with a note, and the others are drawn.
    """
    return [_drawn(make, material) for make in _PLOTS]


def text_of(plot: Plot) -> str:
    """Returns a figure as SVG, the same text for the same numbers."""
    assert plot.figure is not None
    data = io.StringIO()
    _save(plot.figure, data, "svg", plot.name)
    return data.getvalue()


def write_plot(folder: Path, plot: Plot, form: str) -> Path:
    """Writes a figure and returns the file.

    Raises:
        RunError: the file cannot be written.
    """
    assert plot.figure is not None
    path, data = folder / f"{plot.name}.{form}", io.BytesIO()
    _save(plot.figure, data, form, plot.name)
    try:
        path.write_bytes(data.getvalue())
    except OSError as error:
        raise cannot_write(path, error, OPTION) from error
    return path


def inline(svg: str, name: str) -> str:
    """Returns an SVG for a page: no preamble, ids of its own, colours of the page.

    Args:
        svg: what :func:`text_of` returned.
        name: of the plot; it goes before every id.
    """
    kept = _HEAD.sub("", svg)
    kept = _ID.sub(rf"\g<1>{name}-", kept.replace("xlink:href", "href"))
    for ours, pages in _COLOURS.items():
        kept = kept.replace(ours, pages)
    return _ROOT.sub(r'<svg \1 aria-hidden="true">', kept, count=1)


def page_colour(layout: str) -> str:
    """Returns the colour of a layout as the page writes it."""
    colour = style.mark(layout).colour
    return _COLOURS.get(colour, colour)


def _drawn(make: Callable[[Material], Plot], material: Material) -> Plot:
    """Returns one plot, with where it was measured written below."""
    try:
        with style.styled():
            plot = make(material)
            if plot.figure is not None:
                _mark(plot.figure, plot.setting or material.setting)
    except Exception as error:  # anybody may have written what is drawn
        name = f"{make.__module__.rpartition('.')[2]} {make.__name__}"
        material.frames.notes.append(
            Note(f"plot of {name}", f"{type(error).__name__}: {error}"[:300])
        )
        return Plot(make.__name__, f"Plot of {name}", missing="the runs hold values that break it")
    return plot


def _mark(figure: Figure, setting: str) -> None:
    """Writes below a figure where it was measured."""
    height = figure.get_size_inches()[1]
    below = 0.2 / height
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, below, 1, 1 - below))
    figure.text(
        0.995, 0.04 / height, setting, ha="right", va="bottom", fontsize=7, color=style.MUTED
    )


def _save(figure: Figure, data: io.IOBase, form: str, name: str) -> None:
    """Writes a figure without the time of day, so that equal numbers make equal files."""
    import logging
    import warnings

    when: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with style.styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that the font lacks
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        import matplotlib as mpl

        mpl.rcParams["svg.hashsalt"] = name
        figure.savefig(data, format=form, dpi=DPI, metadata=when.get(form))  # type: ignore[arg-type]


def missing(plots: Sequence[Plot]) -> list[str]:
    """Returns a line for every plot that there is not."""
    return [f"{plot.title}: {plot.missing}" for plot in plots if plot.figure is None]
