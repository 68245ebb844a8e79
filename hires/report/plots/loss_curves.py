"""Plots the loss of each run over its steps, and what each precision costs in accuracy."""

from __future__ import annotations

import collections
import math

import numpy as np
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from hires.core.precisions import INT8
from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import Drawing, DrawnRun, PlotData, plot
from hires.report.read.plain_values import count, number

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
def curves(data: PlotData) -> Drawing | str:
    """Draws the loss of every step."""
    runs = [(run, losses) for run in data.runs_of_precisions if len(losses := losses_of(run)) > 1]
    if not runs:
        return "no run that is drawn recorded a loss for more than one step"
    fig, [[axis]] = style.figure(1, 1, 3.2)
    drawn: collections.Counter[str] = collections.Counter()
    for place, (run, losses) in enumerate(runs):
        steps, values = thinned(losses)
        # Markers of curves that lie on each other take turns.
        every = max(1, len(steps) // 12, min(len(runs), len(steps) - 1))
        look = style.layout_style(run.layout).of_further_line(drawn[run.layout])
        drawn[run.layout] += 1
        look |= {"markevery": (place * every // len(runs), every)}
        # Dashes lie on whole lines, so that both are seen.
        look |= {"zorder": 2.0 if look["ls"] == "-" else 2.1, "label": style.short(run.label)}
        axis.plot(steps, values, **look)
    axis.set(xlabel="step", ylabel="loss")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.legend(fig, [axis])
    return Drawing(fig, "Mean over the ranks that compute the loss.")


@plot(100, "precision_error", "Precision against error")
def error(data: PlotData) -> Drawing | str:
    """Draws the error of the loss in each precision and layout, relative to the most exact one."""
    frame = data.frames.precision
    rows = frame[frame[[*_ERRORS]].notna().any(axis=1)].copy()
    if not len(rows):
        return "no point was run in more than one precision with a loss"
    rows["layout"] = rows["layout"].fillna("?")
    rows["_name"] = rows["precision"].fillna("?")
    if rows.loc[rows["precision"] == INT8, "quant"].nunique(dropna=False) > 1:
        rows["_name"] = (rows["_name"] + " " + rows["quant"].fillna("")).str.strip()
    parts = {name: rows[rows["_name"] == name] for name in sorted(set(rows["_name"]))}
    panels = {key: words for key, words in _ERRORS.items() if rows[key].notna().any()}
    errors = {name: [numeric(part, key).median() for key in panels] for name, part in parts.items()}
    names = sorted(parts, key=lambda name: np.nanmin(errors[name]))
    fig, axes = style.panels(len(panels), 2, 2.7, sharey=True)
    layouts = sorted(set(rows["layout"]))
    for axis, (key, title) in zip(axes, panels.items(), strict=True):
        for place, layout in enumerate(layouts):
            own = rows[(rows["layout"] == layout) & rows[key].notna()]
            # The layouts of one precision stand side by side.
            shift = 0.6 * ((place + 0.5) / len(layouts) - 0.5)
            columns = [names.index(name) + shift for name in own["_name"]]
            look = style.layout_style(layout).of_line | {"ls": "", "label": style.short(layout)}
            axis.plot(columns, numeric(own, key).clip(lower=_FLOOR), **look)
        style.log_axis(axis, "y")
        axis.set_xticks(range(len(names)), [name.replace(" ", "\n") for name in names])
        axis.set(xlim=(-0.5, len(names) - 0.5), title=title)
        style.no_grid(axis, "x")
    axes[0].set_ylabel("relative error of the loss")
    style.legend(fig, axes)
    return Drawing(
        fig, "Relative difference of the loss from that in the most exact precision that was run."
    )


def losses_of(drawn: DrawnRun) -> Curve:
    """Returns the finite losses of a run by step, each the mean over its ranks."""
    by_step: dict[int, list[float]] = collections.defaultdict(list)
    for line in drawn.run.lines("step"):
        step, loss = count(line.get("step")), number(line.get("loss"))
        if step is not None and loss is not None:
            by_step[step].append(loss)
    return {step: math.fsum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}


def thinned(losses: Curve) -> NDArray[np.float64]:
    """Returns steps and losses, (2, at most ``MAX_POINTS``), each a mean of neighbours."""
    parts = np.array_split(list(losses.items()), min(len(losses), MAX_POINTS))
    means: NDArray[np.float64] = np.stack([part.mean(axis=0) for part in parts], axis=1)
    return means
