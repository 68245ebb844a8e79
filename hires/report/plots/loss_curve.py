"""How does the loss of each run fall?"""

from __future__ import annotations

import math
from collections import defaultdict

from hires.report.load.reading import count, number
from hires.report.plots import style
from hires.report.plots.base import Material, Plot, Shown

MAX_POINTS = 500
"""Points of a curve; a longer one is drawn by the mean of as many parts."""


def curves(material: Material) -> Plot:
    """Returns the loss of every step of the runs that are drawn."""
    plot = Plot("loss", "Loss curves")
    held = [(shown, losses) for shown in material.shown if len(losses := losses_of(shown)) > 1]
    if not held:
        plot.missing = "no run that is drawn recorded a loss for more than one step"
        return plot
    made, axes = style.figure(1, 1, 3.2)
    axis = axes[0][0]
    for shown, losses in held:
        found = style.mark(shown.layout)
        steps, values = thinned(losses)
        axis.plot(
            steps, values, color=found.colour, marker=found.marker, ls=found.line,
            markevery=max(1, len(steps) // 12), label=style.short(shown.label),
        )  # fmt: skip
    axis.set_xlabel("step")
    style.whole_steps(axis)
    axis.set_ylabel("loss")
    style.legend(made, [axis])
    plot.figure = made
    said = [
        f"{shown.label} {losses[min(losses)]:.4g} to {losses[max(losses)]:.4g}"
        for shown, losses in held
    ]
    plot.caption = f"Mean over the ranks that know the loss, first to last: {'; '.join(said)}."
    return plot


def losses_of(shown: Shown) -> dict[int, float]:
    """Returns the finite losses of a run by step."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for line in shown.run.metrics():
        step, loss = count(line.get("step")), number(line.get("loss"))
        if line.get("kind") == "step" and step is not None and loss is not None:
            by_step[step].append(loss)
    return {step: math.fsum(by_step[step]) / len(by_step[step]) for step in sorted(by_step)}


def thinned(losses: dict[int, float]) -> tuple[list[float], list[float]]:
    """Returns steps and losses, at most so many as a figure shows."""
    steps, values = list(losses), list(losses.values())
    width = math.ceil(len(steps) / MAX_POINTS)
    parts = range(0, len(steps), width)
    return (
        [math.fsum(steps[i : i + width]) / len(steps[i : i + width]) for i in parts],
        [math.fsum(values[i : i + width]) / len(values[i : i + width]) for i in parts],
    )
