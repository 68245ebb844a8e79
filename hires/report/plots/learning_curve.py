"""Plots how runs learned: loss and evaluations over the steps, learning rate and gradient norm."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hires.core.config.data_config import METRICS
from hires.core.store.step_lines import VALIDATED_LINE
from hires.report.plots import style
from hires.report.plots.base import MAX_RUNS, Drawing, PlotData, labelled, plot
from hires.report.plots.loss_curves import curve_of, looks_of, thinned
from hires.report.runs import Run

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
    return name if name in METRICS else "loss"


def _draw(axis: Axes, run: Run, kind: str, key: str, look: dict[str, Any]) -> None:
    if curve := curve_of(run, kind, key):
        axis.plot(*thinned(curve), **look)
