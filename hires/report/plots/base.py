"""Defines what a plot is, what it is drawn from, and the files and the part of a page it becomes.

To add a plot: one file in this folder with a function under ``@plot``.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import pkgutil
import re
import textwrap
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure

from hires.core.config.precision_config import INT8
from hires.core.ranks.timeline import StepSpans
from hires.plan.plan import Plan
from hires.report.plots import style
from hires.report.points import quant_text
from hires.report.run_tables import precision_mates
from hires.report.runs import Run
from hires.report.tables import Frames, setting
from hires.report.timelines import complete_steps

FORMATS = ("svg", "pdf", "png")
DPI = 200  # of a PNG
MAX_RUNS = 6  # runs that are drawn rank by rank
MAX_PANELS = 6
"""Combinations of network and precision that fit into a figure; the others are in the tables."""
MAX_LABEL = 60  # characters of a run's label in captions
MAX_RANKS = 64  # ranks of a run that are drawn one by one; more would be thinner than a line
_LABEL = ("campaign", "model", "image", "precision", "task")
_WORK = ("campaign", "model", "image", "batch", "task", "precision", "other_keys")
COLOURS = {
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


class Drawing(NamedTuple):
    """What the function of a plot returns."""

    figure: Figure
    caption: str  # what it shows


@dataclass(frozen=True)
class Plot:
    """A registered plot, and once it is drawn its figure or the reason why it has none."""

    name: str  # file name without its ending
    title: str
    draw: Callable[[PlotData], Drawing | str]
    """Returns why the runs do not hold what the plot shows if they do not."""
    wide: bool = False  # whether it needs the width of a page
    figure: Figure | None = None
    caption: str = ""
    missing: str = ""  # why it is not drawn


@dataclass
class DrawnRun:
    """A run that is drawn rank by rank; its plan and time line are read on first use."""

    run: Run
    label: str  # short, and different from that of the other runs

    @property
    def layout(self) -> str:
        """Its layout, ``?`` if that is not known."""
        return self.run.point["layout"] or "?"

    @functools.cached_property
    def plan(self) -> Plan | None:
        """Its plan, if it can be read and is small enough to be drawn."""
        plan = self.run.plan()
        return plan if plan is not None and plan.world <= MAX_RANKS else None

    @functools.cached_property
    def steps(self) -> dict[int, list[StepSpans]]:
        """Its measured steps by number; empty without a time line."""
        spans = self.run.timeline() if self.plan is not None else []
        return complete_steps(spans, self.plan.world) if spans and self.plan is not None else {}


@dataclass
class PlotData:
    """Everything that plots are drawn from."""

    frames: Frames

    @functools.cached_property
    def runs(self) -> list[DrawnRun]:
        """The runs drawn rank by rank: one of each layout, all of the same work if possible."""
        every = self.frames.run_list
        done = [run for run in every if run.end[0] == "done"] or every
        layouts = defaultdict(set)
        for run in done:
            layouts[_work(run)].add(run.point["layout"])

        def order(run: Run) -> tuple[float, ...]:
            # Runs side by side should differ in the layout alone, so fp32 wins where it is common.
            pixels = run.point.get("height", 0) * run.point.get("width", 0)
            plain, speed = run.point["precision"] == "fp32", run.record.img_per_s or 0.0
            return -len(layouts[_work(run)]), -plain, -pixels, -speed

        chosen: dict[str | None, Run] = {}
        for run in sorted(done, key=order):
            chosen.setdefault(run.point["layout"], run)
        return labelled([*chosen.values()][:MAX_RUNS])

    @functools.cached_property
    def runs_of_precisions(self) -> list[DrawnRun]:
        """These runs, each followed by one in every other precision that is like it in all else."""
        mates = {id(run): same for run, same in precision_mates(self.frames.run_list)}
        chosen: dict[int, Run] = {}
        for run in (drawn.run for drawn in self.runs):
            # Its own campaign first.
            like = sorted(mates.get(id(run), ()), key=lambda mate: mate.campaign != run.campaign)
            by_precision = {run.record.precision: run}
            for mate in like:
                by_precision.setdefault(mate.record.precision, mate)
            chosen |= {id(one): one for one in by_precision.values()}
        return labelled([*chosen.values()])

    @property
    def plans(self) -> list[tuple[DrawnRun, Plan]]:
        """Those of these runs whose plan can be drawn."""
        return [(drawn, drawn.plan) for drawn in self.runs if drawn.plan is not None]


def labelled(runs: Sequence[Run]) -> list[DrawnRun]:
    """Returns runs with their layout and what of the other columns differs between them.

    Labels that would be equal end with the hash of the run.
    """
    rows = [{**run.point, "quant": quant_text(run)} for run in runs]
    keys = [key for key in _LABEL if len({row.get(key) for row in rows}) > 1]
    if len({row["quant"] for row in rows if row["precision"] == INT8}) > 1:
        keys.append("quant")
    drawn = []
    for run, row in zip(runs, rows, strict=True):
        words = [str(row.get(key) or "?") for key in keys if key != "quant" or row["quant"]]
        label = " ".join([row["layout"] or "?", *words])
        drawn.append(DrawnRun(run, style.short(label, MAX_LABEL)))
    counts = Counter(one.label for one in drawn)
    for one in drawn:
        if counts[one.label] > 1:
            one.label = f"{style.short(one.label, MAX_LABEL - 9)} {one.run.short}"
    return drawn


PLOTS: dict[int, Plot] = {}
_Draw = Callable[[PlotData], Drawing | str]


def plot(place: int, name: str, title: str, *, wide: bool = False) -> Callable[[_Draw], _Draw]:
    """Returns a decorator that registers the function of a plot at a place on the page."""

    def register(draw: _Draw) -> _Draw:
        assert place not in PLOTS, f"two plots have place {place}"
        PLOTS[place] = Plot(name, title, draw, wide)
        return draw

    return register


def registered() -> dict[int, Plot]:
    """Returns all plots by their place on the page: those of every file in this folder."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        importlib.import_module(f"hires.report.plots.{module.name}")
    return dict(sorted(PLOTS.items()))


def draw(data: PlotData, width: float = style.WIDTH) -> list[Plot]:
    """Returns all plots in the order of the page, each with its figure or why it has none.

    ``width``: of a figure, in inches.
    """
    where = setting(data.frames.found)
    plots = []
    for plot in registered().values():
        with style.styled(width):
            drawing = plot.draw(data)
            if isinstance(drawing, str):
                plots.append(replace(plot, missing=drawing))
                continue
            _finish(drawing.figure, where)
        plots.append(replace(plot, figure=drawing.figure, caption=drawing.caption))
    return plots


def missing(plots: Sequence[Plot]) -> list[str]:
    """Returns a line for every plot that was not drawn."""
    return [f"{plot.title}: {plot.missing}" for plot in plots if plot.figure is None]


def encoded(plot: Plot, form: str) -> bytes | None:
    """Returns a figure as a file, without the time of day; None if it was not drawn."""
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
    """Returns the SVG of a drawn plot in the page's colours, its ids beginning with its name."""
    kept = _HEAD.sub("", (encoded(plot, "svg") or b"").decode())
    kept = _ID.sub(rf"\g<1>{plot.name}-", kept.replace("xlink:href", "href"))
    for ours, pages in COLOURS.items():
        kept = kept.replace(ours, pages)
    return _ROOT.sub(r'<svg \1 aria-hidden="true">', kept, count=1)


def _finish(figure: Figure, where: str) -> None:
    """Names the logarithmic axes of a figure, and writes below it where it was measured."""
    for axis in figure.axes:
        for scale, name in ((axis.xaxis, axis.get_xscale()), (axis.yaxis, axis.get_yscale())):
            if name == "log" and (label := scale.get_label_text()):
                scale.set_label_text(f"{label}, log scale")
    lines = "\n".join(textwrap.wrap(where, int(17 * style.width())))
    figure.supxlabel(lines, x=0.995, ha="right", fontsize=7, color=style.MUTED)


def _work(run: Run) -> tuple[Any, ...]:
    return tuple(run.point.get(key) for key in _WORK)
