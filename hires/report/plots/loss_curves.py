"""Plots the loss of each run over its steps, its evaluations, and what each precision costs."""

from __future__ import annotations

import collections
import math
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hires.core.config.precision_config import INT8
from hires.core.evaluation_summary import LOSS, METRICS
from hires.core.store.step_lines import VALIDATED_LINE
from hires.report.plots import style
from hires.report.plots.base import MAX_RUNS, Drawing, DrawnRun, PlotData, labelled, plot
from hires.report.runs import Run
from hires.report.tables import numeric

Curve = dict[int, float]
"""A number by the steps that were done."""
MAX_POINTS = 500  # points of a curve; a longer one is drawn by the means of as many parts
_ERRORS = {
    "first_loss_error": "first step: same weights",
    "last_loss_error": "last step",
    "loss_error": "evaluation: same weights",
}
"""Columns of errors, and the title of their panel."""
_FLOOR = 1e-17  # where an error of exactly 0 is drawn on a logarithmic axis


@plot(110, "loss", "Loss curves")
def loss_curves(data: PlotData) -> Drawing | str:
    """Draws the loss of every step."""
    curves = [(drawn, curve_of(drawn.run, "step", "loss")) for drawn in data.runs_of_precisions]
    curves = [(drawn, losses) for drawn, losses in curves if len(losses) > 1]
    if not curves:
        return "no run that is drawn recorded a loss for more than one step"
    fig, [axis] = style.panels(1, 1, 2.6)
    looks = looks_of([drawn for drawn, _ in curves])
    for place, ((_, losses), look) in enumerate(zip(curves, looks, strict=True)):
        steps, values = thinned(losses)
        # Markers of curves that lie on each other take turns.
        every = max(1, len(steps) // 12, min(len(curves), len(steps) - 1))
        axis.plot(steps, values, markevery=(place * every // len(curves), every), **look)
    axis.set(xlabel="steps", ylabel="loss")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend(fig, [axis])
    return Drawing(fig, "Mean over the ranks that compute the loss.")


@plot(100, "precision_error", "Precision against error")
def precision_error(data: PlotData) -> Drawing | str:
    """Draws the error of the loss in each precision and layout, relative to the most exact one."""
    frame = data.frames.precision
    rows = frame[frame[[*_ERRORS]].notna().any(axis=1)].copy()
    if not len(rows):
        return "no point was run in more than one precision with a loss"
    rows["layout"] = rows["layout"].fillna("?")
    rows["_name"] = rows["precision"].fillna("?")
    if rows.loc[rows["precision"] == INT8, "quant"].nunique(dropna=False) > 1:
        rows["_name"] = (rows["_name"] + " " + rows["quant"].fillna("")).str.strip()
    panels = {key: words for key, words in _ERRORS.items() if rows[key].notna().any()}
    smallest = rows.groupby("_name")[[*panels]].median().min(axis=1)
    names, layouts = [*smallest.sort_values().index], sorted(set(rows["layout"]))
    fig, axes = style.panels(len(panels), 2, 2.7, sharey=True)
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for place, layout in enumerate(layouts):
            own = rows[(rows["layout"] == layout) & rows[key].notna()]
            # The layouts of one precision stand side by side.
            shift = 0.6 * ((place + 0.5) / len(layouts) - 0.5)
            columns = [names.index(name) + shift for name in own["_name"]]
            look = style.layout_style(layout).of_line() | {"ls": "", "label": style.short(layout)}
            axis.plot(columns, numeric(own, key).clip(lower=_FLOOR), **look)
        style.log_axis(axis, "y")
        axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
        axis.set(xlim=(-0.5, len(names) - 0.5), title=title, ylabel="relative error of the loss")
        style.no_grid(axis, "x")
    style.legend(fig, axes)
    return Drawing(fig, "The loss beside that in the most exact precision that was run.")


def curve_of(run: Run, kind: str, key: str) -> Curve:
    """Returns the finite numbers of lines of a kind by steps done: means over the ranks."""
    by_step: dict[int, list[float]] = collections.defaultdict(list)
    for line in run.lines(kind):
        step, value = line.get("step"), line.get(key)
        if type(step) is int and isinstance(value, (int, float)) and math.isfinite(value):
            by_step[step + 1].append(value)
    return {step: math.fsum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}


def thinned(curve: Curve) -> NDArray[np.float64]:
    """Returns steps and numbers, (2, at most ``MAX_POINTS``), each a mean of neighbours."""
    parts = np.array_split(list(curve.items()), min(len(curve), MAX_POINTS))
    means: NDArray[np.float64] = np.stack([part.mean(axis=0) for part in parts], axis=1)
    return means


def looks_of(runs: list[DrawnRun]) -> list[dict[str, Any]]:
    """Returns the options of ``Axes.plot`` for the curve of each run, its label among them."""
    drawn: collections.Counter[str] = collections.Counter()
    looks = []
    for run in runs:
        look = style.layout_style(run.layout).of_line(drawn[run.layout])
        looks.append(look | {"label": style.short(run.label)})
        drawn[run.layout] += 1
    return looks


_TITLES = {"lr": "learning rate", "grad_norm": "gradient norm"}


@plot(115, "learning", "Learning curves")
def learning(data: PlotData) -> Drawing | str:
    """Draws loss, evaluations, learning rate and gradient norm of runs that were evaluated."""
    every = [run for run in data.frames.run_list if run.record.validation is not None]
    runs = labelled([run for run in every if run.lines(VALIDATED_LINE)][:MAX_RUNS])
    if not runs:
        return "no run was evaluated while it trained (validate.every)"
    metrics = [_metric(drawn.run) for drawn in runs]
    named = sorted({name for name in metrics if name not in (None, "loss")})
    shown = [
        key
        for key in _TITLES
        if any(len({*curve_of(drawn.run, "step", key).values()}) > 1 for drawn in runs)
    ]
    fig, axes = style.panels(1 + len(named) + len(shown), 2, 2.4)
    panels = dict(zip(["loss", *named, *shown], axes, strict=True))
    for drawn, metric, look in zip(runs, metrics, looks_of(runs), strict=True):
        thin = {key: look[key] for key in ("color", "ls")} | {"lw": 0.9}
        _draw(panels["loss"], drawn.run, "step", "loss", thin | {"alpha": 0.6})
        _draw(panels["loss"], drawn.run, VALIDATED_LINE, "loss", look)
        if metric in named:
            _draw(panels[metric], drawn.run, VALIDATED_LINE, metric, look)
        for key in shown:
            _draw(panels[key], drawn.run, "step", key, thin)
    titles = {"loss": "loss: training (thin), evaluations", **_TITLES}
    for key, axis in panels.items():
        axis.set_title(titles.get(key, key), fontsize=8.5)
        axis.set_xlabel("steps")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    style.legend(fig, axes[:1])
    return Drawing(fig, "Evaluated on images that the runs did not learn from.")


def _metric(run: Run) -> str:
    """Returns the number that says which evaluation of a run is the best."""
    name = run.lines(VALIDATED_LINE)[-1].get("metric")
    return str(name) if name in METRICS else LOSS


def _draw(axis: Axes, run: Run, kind: str, key: str, look: dict[str, Any]) -> None:
    if curve := curve_of(run, kind, key):
        axis.plot(*thinned(curve), **look)
