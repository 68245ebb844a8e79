"""Defines what a plot is, what it is drawn from, and the files and the part of a page it becomes.

To add a plot: one file in this folder with a function under ``@plot``, and its line in the
package's ``__init__``.
"""

from __future__ import annotations

import functools
import io
import logging
import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from matplotlib.figure import Figure

from hires.core.precisions import INT8
from hires.core.ranks.timeline import StepSpans, complete_steps
from hires.core.store.choice_file import has_choice
from hires.plan.plan import Plan
from hires.report.frames import Frames, numeric
from hires.report.plots import style
from hires.report.read.agreement import evaluated
from hires.report.read.confusions import Confusion, confusion_in
from hires.report.read.map_overviews import Overview, has_maps, num_maps, overviews
from hires.report.read.measured_points import quant_text
from hires.report.read.plain_values import discarded_steps
from hires.report.read.rows import precision_mates
from hires.report.read.runs import Run

FORMATS = ("svg", "pdf", "png")
DPI = 200  # of a PNG
MAX_RUNS = 6  # runs that are drawn rank by rank
MAX_PANELS = 6
"""Combinations of network and precision that fit into a figure; the others are in the tables."""
MAX_LABEL = 60  # characters of a run's label in captions
MAX_RANKS = 64  # ranks of a run that are drawn one by one; more would be thinner than a line
_SMALL_LETTERS = 17  # of the setting, on an inch
_SMALL_LINE = 0.12  # inches of one of its lines
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


class Drawing(NamedTuple):
    """What the function of a plot returns."""

    figure: Figure
    caption: str  # what it shows


@dataclass(frozen=True)
class Plot:
    """A registered plot, and once it is drawn its figure or the reason why it has none."""

    name: str  # file name without its ending
    title: str
    wide: bool  # whether it needs the width of a page
    draw: Callable[[PlotData], Drawing | str]
    """Returns why the runs do not hold what the plot shows if they do not."""
    figure: Figure | None = None
    caption: str = ""
    missing: str = ""  # why it is not drawn


@dataclass
class DrawnRun:
    """A run that is drawn rank by rank; its plan and time line are read on first use."""

    run: Run
    label: str  # short, and different from that of the other runs
    layout: str

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

    @functools.cached_property
    def counted(self) -> dict[int, list[StepSpans]]:
        """The steps that count: neither warm-up nor discarded for another reason."""
        discarded = discarded_steps(self.run.record)
        return {number: ranks for number, ranks in self.steps.items() if number not in discarded}


@dataclass
class PlotData:
    """Everything that plots are drawn from."""

    frames: Frames

    @functools.cached_property
    def runs(self) -> list[DrawnRun]:
        """The runs drawn rank by rank: one of each layout, all of the same work if possible."""
        runs = self._rows
        done = runs[runs["state"] == "done"]
        chosen = done if len(done) else runs
        if not len(chosen):
            return []
        rows = chosen
        work = ["campaign", "model", "image", "batch", "task", "precision", "settings"]
        layouts = rows.groupby(work, dropna=False)["_layout"].nunique().rename("_layouts")
        rows = rows.join(layouts, on=work)
        # Runs side by side should differ in the layout alone, so fp32 wins where it is as common.
        rows["_plain"] = (rows["precision"] == "fp32").fillna(False).astype(int)
        rows["_pixels"] = numeric(rows, "height").fillna(0) * numeric(rows, "width").fillna(0)
        order = ["_layouts", "_plain", "_pixels", "img_per_s_median"]
        rows = rows.sort_values(order, ascending=False, na_position="last")
        rows = rows.drop_duplicates("_layout").head(MAX_RUNS)
        return self._labelled(rows)

    @functools.cached_property
    def runs_of_precisions(self) -> list[DrawnRun]:
        """These runs, each followed by one in every other precision that is like it in all else."""
        every = self.frames.run_list
        mates = {id(run): same for run, same in precision_mates(every)}
        places = {id(run): place for place, run in enumerate(every)}
        chosen: dict[int, None] = {}
        for drawn in self.runs:
            run = drawn.run
            # Its own campaign first.
            like = sorted(mates.get(id(run), ()), key=lambda mate: mate.campaign != run.campaign)
            by_precision = {run.record.get("precision"): run}
            for mate in like:
                by_precision.setdefault(mate.record.get("precision"), mate)
            chosen |= dict.fromkeys(places[id(mate)] for mate in by_precision.values())
        return self._labelled(self._rows.loc[list(chosen)])

    @functools.cached_property
    def evaluated_runs(self) -> list[DrawnRun]:
        """The first runs that were evaluated while they trained."""
        every = enumerate(self.frames.run_list)
        places = [n for n, run in every if isinstance(run.record.get("validation"), dict)]
        return self._labelled(self._rows.loc[places[:MAX_RUNS]])

    @functools.cached_property
    def chosen_runs(self) -> list[DrawnRun]:
        """The first runs whose layout was chosen among others."""
        places = [n for n, run in enumerate(self.frames.run_list) if has_choice(run.path)]
        return self._labelled(self._rows.loc[places[:MAX_RUNS]])

    @functools.cached_property
    def confusions(self) -> list[tuple[DrawnRun, Confusion]]:
        """The confusion matrices of the first complete evaluations that have one."""
        confusions: dict[int, Confusion] = {}
        for place, run in enumerate(self.frames.run_list):
            if evaluated(run) and len(confusions) < MAX_PANELS:
                held = confusion_in(run.shown.folder, self.frames.notes)
                confusions |= {} if held is None else {place: held}
        runs = self._labelled(self._rows.loc[[*confusions]])
        return [*zip(runs, confusions.values(), strict=True)]

    @functools.cached_property
    def map_overviews(self) -> tuple[list[tuple[DrawnRun, list[Overview]]], int]:
        """The first predicted maps of the first runs that have some, and how many are left."""
        every = [(n, run) for n, run in enumerate(self.frames.run_list) if has_maps(run)]
        each = max(1, MAX_PANELS // max(1, len(every)))
        drawn = self._labelled(self._rows.loc[[n for n, _ in every[:MAX_PANELS]]])
        shown = [(one, overviews(one.run, each, self.frames.notes)) for one in drawn]
        in_all = sum(num_maps(run) for _, run in every)
        return shown, in_all - sum(len(maps) for _, maps in shown)

    @functools.cached_property
    def _rows(self) -> pd.DataFrame:
        quants = [quant_text(run) for run in self.frames.run_list]
        runs = self.frames.runs
        return runs.assign(_layout=runs["layout"].fillna("?"), _quant=pd.array(quants, "string"))

    def _labelled(self, rows: pd.DataFrame) -> list[DrawnRun]:
        """Returns runs with their layout and what of the other columns differs between them.

        Labels that would be equal end with the hash of the run.
        """
        keys = ["campaign", "model", "image", "precision", "task"]
        differing = [key for key in keys if rows[key].nunique(dropna=False) > 1]
        if rows.loc[rows["precision"] == INT8, "_quant"].nunique(dropna=False) > 1:
            differing.append("_quant")
        drawn = []
        for place, row in rows.iterrows():
            words = [row[key] for key in differing if key != "_quant" or pd.notna(row[key])]
            label = " ".join([row["_layout"], *map(str, words)])
            run = self.frames.run_list[place]
            drawn.append(DrawnRun(run, style.short(label, MAX_LABEL), row["_layout"]))
        counts = Counter(one.label for one in drawn)
        for one in drawn:
            if counts[one.label] > 1:
                one.label = f"{style.short(one.label, MAX_LABEL - 9)} {one.run.short}"
        return drawn

    @property
    def plans(self) -> list[tuple[DrawnRun, Plan]]:
        """Those of these runs whose plan can be drawn."""
        return [(drawn, drawn.plan) for drawn in self.runs if drawn.plan is not None]


PLOTS: dict[int, Plot] = {}  # all plots by their place on the page
_Draw = Callable[[PlotData], Drawing | str]


def plot(place: int, name: str, title: str, *, wide: bool = False) -> Callable[[_Draw], _Draw]:
    """Returns a decorator that registers the function of a plot at a place on the page."""

    def register(draw: _Draw) -> _Draw:
        assert place not in PLOTS, f"two plots have place {place}"
        PLOTS[place] = Plot(name, title, wide, draw)
        return draw

    return register


def draw(data: PlotData) -> list[Plot]:
    """Returns all plots in the order of the page, each with its figure or why it has none."""
    plots = []
    for _, plot in sorted(PLOTS.items()):
        with style.styled():
            drawing = plot.draw(data)
            if isinstance(drawing, str):
                plots.append(replace(plot, missing=drawing))
                continue
            style.mark_log_axes(drawing.figure)
            add_setting(drawing.figure, data.frames.setting)
        plots.append(replace(plot, **drawing._asdict()))
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
    for ours, pages in _COLOURS.items():
        kept = kept.replace(ours, pages)
    return _ROOT.sub(r'<svg \1 aria-hidden="true">', kept, count=1)


def add_setting(figure: Figure, setting: str) -> None:
    """Writes below a figure where it was measured."""
    width = figure.get_size_inches()[0]
    lines = textwrap.wrap(setting, int(width * _SMALL_LETTERS)) or [""]
    style.grow(figure, _SMALL_LINE * (len(lines) - 1))  # figures have room for one line
    height = figure.get_size_inches()[1]
    below = (0.08 + _SMALL_LINE * len(lines)) / height
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, below, 1, 1 - below))
    look: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 7, "color": style.MUTED}
    figure.text(0.995, 0.04 / height, "\n".join(lines), **look)


def page_colour(layout: str) -> str:
    """Returns the colour of a layout as the page writes it."""
    colour = style.layout_style(layout).colour
    return _COLOURS.get(colour, colour)
