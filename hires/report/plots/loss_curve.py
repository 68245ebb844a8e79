"""Plots the loss of each run over its steps."""

from __future__ import annotations

import math
from collections import defaultdict

from hires.report.load.plain_values import count, number
from hires.report.plots import style
from hires.report.plots.base import Drawing, DrawnRun, NotDrawnError, PlotData, plot

MAX_POINTS = 500
"""Points of a curve; a longer one is drawn by the means of as many parts."""


@plot(110, "loss", "Loss curves")
def curves(data: PlotData) -> Drawing:
    """Draws the loss of every step."""
    from matplotlib.ticker import MaxNLocator

    runs = [(run, losses) for run in data.runs if len(losses := losses_of(run)) > 1]
    if not runs:
        raise NotDrawnError("no run that is drawn recorded a loss for more than one step")
    fig, [[axis]] = style.figure(1, 1, 3.2)
    for run, losses in runs:
        look = style.layout_style(run.layout)
        steps, values = thinned(losses)
        axis.plot(
            steps, values, color=look.colour, marker=look.marker, ls=look.line,
            markevery=max(1, len(steps) // 12), label=style.short(run.label),
        )  # fmt: skip
    axis.set_xlabel("step")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("loss")
    style.legend(fig, [axis])
    words = "; ".join(
        f"{run.label} {losses[min(losses)]:.4g} to {losses[max(losses)]:.4g}"
        for run, losses in runs
    )
    return Drawing(fig, f"Mean over the ranks that compute the loss, first to last: {words}.")


def losses_of(drawn: DrawnRun) -> dict[int, float]:
    """Returns the finite losses of a run by step."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in drawn.run.metrics():
        step, loss = count(line.get("step")), number(line.get("loss"))
        if line.get("kind") == "step" and step is not None and loss is not None:
            by_step[step].append(loss)
    return {step: math.fsum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}


def thinned(losses: dict[int, float]) -> tuple[list[float], list[float]]:
    """Returns steps and losses as at most ``MAX_POINTS`` points."""
    width = math.ceil(len(losses) / MAX_POINTS)
    return _means(list(losses), width), _means(list(losses.values()), width)


def _means(values: list[float] | list[int], width: int) -> list[float]:
    parts = [values[i : i + width] for i in range(0, len(values), width)]
    return [math.fsum(part) / len(part) for part in parts]
