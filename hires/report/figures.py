"""Draws the plots of a report, and writes them as files or into the page."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl

from hires.core.store.reading import Note
from hires.report.plots import style
from hires.report.plots.base import PLOTS, NotDrawnError, Plot, PlotData

FORMATS = ("svg", "pdf", "png")
DPI = 200
"""Of a PNG."""
_COLOURS = {
    style.INK: "currentColor",
    style.MUTED: "var(--muted)",
    style.GRID: "var(--grid)",
    style.PAPER: "var(--figure)",
    style.BLACK: "var(--neutral)",
}
"""Colours that the page replaces by its own, light or dark."""
_ID = re.compile(r'(\bid="|href="#|url\(#)')
_HEAD = re.compile(r"^.*?(?=<svg)|<metadata>.*?</metadata>|<style.*?</style>", re.DOTALL)
_ROOT = re.compile(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>')


def draw(data: PlotData) -> list[Plot]:
    """Returns all plots in the order of the page, each with its figure or why it has none.

    A plot that fails on a damaged run is left out with a note; the others are drawn.
    """
    return [_drawn(PLOTS[place], data) for place in sorted(PLOTS)]


def missing(plots: Sequence[Plot]) -> list[str]:
    """Returns a line for every plot that was not drawn."""
    return [f"{plot.title}: {plot.missing}" for plot in plots if plot.figure is None]


def encoded(plot: Plot, form: str) -> bytes | None:
    """Returns a figure as a file, None if it was not drawn.

    Equal numbers make equal files: none holds the time of day.
    """
    if plot.figure is None:
        return None
    data = io.BytesIO()
    dates: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    with style.styled(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about letters that the font lacks
        logging.getLogger("matplotlib").setLevel(logging.ERROR)
        mpl.rcParams["svg.hashsalt"] = plot.name
        plot.figure.savefig(data, format=form, dpi=DPI, metadata=dates.get(form))
    return data.getvalue()


def inline(plot: Plot) -> str:
    """Returns the SVG of a drawn plot for the page.

    It has no preamble, the colours of the page, and ids that begin with the plot's name.
    """
    kept = _HEAD.sub("", (encoded(plot, "svg") or b"").decode())
    kept = _ID.sub(rf"\g<1>{plot.name}-", kept.replace("xlink:href", "href"))
    for ours, pages in _COLOURS.items():
        kept = kept.replace(ours, pages)
    return _ROOT.sub(r'<svg \1 aria-hidden="true">', kept, count=1)


def page_colour(layout: str) -> str:
    """Returns the colour of a layout as the page writes it."""
    colour = style.layout_style(layout).colour
    return _COLOURS.get(colour, colour)


def _drawn(plot: Plot, data: PlotData) -> Plot:
    try:
        with style.styled():
            figure, caption, setting = plot.draw(data)
            # The line below the figure states where it was measured.
            height = figure.get_size_inches()[1]
            below = 0.2 / height
            engine: Any = figure.get_layout_engine()
            engine.set(rect=(0, below, 1, 1 - below))
            figure.text(
                0.995, 0.04 / height, setting or data.frames.setting,
                ha="right", va="bottom", fontsize=7, color=style.MUTED,
            )  # fmt: skip
        return replace(plot, figure=figure, caption=caption, setting=setting)
    except NotDrawnError as reason:
        return replace(plot, missing=str(reason))
    except Exception as error:  # run folders may hold anything
        text = f"{type(error).__name__}: {error}"[:300]
        data.frames.notes.append(Note(f"plot {plot.name}", text))
        return replace(plot, missing="the runs hold values that break it")
