"""Plots how runs learned: loss and evaluations over the steps, learning rate and gradient norm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from hires.core.config.data_config import METRICS
from hires.core.store.step_lines import VALIDATED_LINE
from hires.report.plots import style
from hires.report.plots.base import Drawing, DrawnRun, PlotData, plot
from hires.report.plots.loss_curves import Curve, losses_of, thinned
from hires.report.read.plain_values import count, number

_TITLES = {"lr": "learning rate", "grad_norm": "gradient norm"}


@plot(115, "learning", "Learning curves")
def learning(data: PlotData) -> Drawing | str:
    """Draws loss, evaluations, learning rate and gradient norm of runs that were evaluated."""
    runs = [drawn for drawn in data.evaluated_runs if drawn.run.lines(VALIDATED_LINE)]
    if not runs:
        return "no run was evaluated while it trained (validate.every)"
    metrics = [metric_of(drawn) for drawn in runs]
    named = sorted({name for name in metrics if name not in (None, "loss")})
    rates = {key: [curve_of(drawn, "step", key) for drawn in runs] for key in _TITLES}
    shown = [key for key, curves in rates.items() if any(map(_changes, curves))]
    fig, axes = style.panels(1 + len(named) + len(shown), 2, 2.4)
    looks = _looks(runs)
    for drawn, metric, look in zip(runs, metrics, looks, strict=True):
        training = {step + 1: loss for step, loss in losses_of(drawn).items()}
        if training:
            axes[0].plot(*thinned(training), color=look["color"], ls=look["ls"], lw=0.8, alpha=0.6)
        _draw(axes[0], evaluations_of(drawn, "loss"), look)
        for axis, name in zip(axes[1:], named, strict=False):
            if name == metric:
                _draw(axis, evaluations_of(drawn, name), look)
    for axis, key in zip(axes[1 + len(named) :], shown, strict=True):
        for curve, look in zip(rates[key], looks, strict=True):
            if curve:
                axis.plot(*thinned(curve), color=look["color"], ls=look["ls"], lw=1.0)
    titles = ["loss: training (thin), evaluations", *named, *(_TITLES[key] for key in shown)]
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title, fontsize=8.5)
        axis.set_xlabel("steps")
        axis.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    style.legend(fig, axes[:1])
    return Drawing(fig, "Evaluated on images that the runs did not learn from.")


def evaluations_of(drawn: DrawnRun, key: str) -> Curve:
    """Returns a number of all evaluations of a run by the steps that were done before."""
    return curve_of(drawn, VALIDATED_LINE, key)


def curve_of(drawn: DrawnRun, kind: str, key: str) -> Curve:
    """Returns a number of the lines of a kind, of the first rank that has it, by steps done."""
    curve: Curve = {}
    for line in drawn.run.lines(kind):
        step, value = count(line.get("step")), number(line.get(key))
        if step is not None and value is not None:
            curve.setdefault(step + 1, value)
    return dict(sorted(curve.items()))


def metric_of(drawn: DrawnRun) -> str | None:
    """Returns the number that says which evaluation of a run is the best."""
    lines = drawn.run.lines(VALIDATED_LINE)
    name = lines[-1].get("metric") if lines else None
    return name if name in METRICS else None


def _looks(runs: Sequence[DrawnRun]) -> list[dict[str, Any]]:
    drawn: Counter[str] = Counter()
    looks = []
    for run in runs:
        look = style.layout_style(run.layout).of_further_line(drawn[run.layout])
        looks.append(look | {"label": style.short(run.label)})
        drawn[run.layout] += 1
    return looks


def _draw(axis: Axes, curve: Curve, look: dict[str, Any]) -> None:
    if curve:
        axis.plot(*thinned(curve), **look)


def _changes(curve: Curve) -> bool:
    return len(set(curve.values())) > 1
