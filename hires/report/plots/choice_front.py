"""Plots the layouts that ``parallel=auto`` chose from: step time against memory.

memory   x  x                 the Pareto front joins the layouts of which no other one is both
o--.   x           faster and smaller; a run's own measured step stands beside it
`--o
step time
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from hires.core.store.choice_file import read_choice
from hires.core.units import MIB
from hires.report.plots import style
from hires.report.plots.base import MAX_RUNS, Drawing, PlotData, labelled, plot
from hires.report.record import RunRecord, typed
from hires.report.runs import Run


@dataclass
class PlacedLayout:
    """A layout in the plane of the figure."""

    step_s: float
    peak_bytes: int
    layout: str
    overrides: str = ""
    memory_rehearsed: bool = True
    """Whether its memory is that of a run's plan, not an estimate."""


@dataclass
class LayoutChoice:
    """The layouts of a choice: those that fit, the chosen one first, and those that do not."""

    options: list[PlacedLayout] = field(default_factory=list)
    out: list[PlacedLayout] = field(default_factory=list)


@plot(118, "choice", "Layouts that were chosen from")
def choice_front(data: PlotData) -> Drawing | str:
    """Draws predicted step time and memory of all layouts of a choice, and their Pareto front."""
    every = [(run, choice_of(run)) for run in data.frames.run_list]
    choices = [(run, choice) for run, choice in every if choice.options][:MAX_RUNS]
    if not choices:
        return "no run had its layout chosen (parallel=auto)"
    fig, axes = style.panels(len(choices), 2, 2.8)
    runs = labelled([run for run, _ in choices])
    for axis, drawn, (run, choice) in zip(axes, runs, choices, strict=True):
        _draw(axis, choice, run.record)
        style.title(axis, drawn.label)
        axis.set(xlabel="predicted step (ms)", ylabel="highest peak of a rank (MiB)")
    style.legend(fig, axes)
    chosen = "; ".join(
        f"{drawn.label}: {choice.options[0].overrides}"
        for drawn, (_, choice) in zip(runs, choices, strict=True)
    )
    return Drawing(fig, f"Chosen: {chosen}. The memory of hollow marks is an estimate.")


def choice_of(run: Run) -> LayoutChoice:
    """Returns the choice of a run; an empty one if it has none, and a note if it is damaged."""
    try:
        choice: LayoutChoice = typed(LayoutChoice, read_choice(run.path) or {})
    except ValueError:
        return LayoutChoice()
    return choice


def pareto_front(layouts: Sequence[PlacedLayout]) -> list[PlacedLayout]:
    """Returns the layouts that no other one beats in time and memory at once, by time.

    >>> layouts = [PlacedLayout(*of, "") for of in ((2, 2), (1, 3), (3, 3), (3, 1), (1, 4))]
    >>> [(one.step_s, one.peak_bytes) for one in pareto_front(layouts)]
    [(1, 3), (2, 2), (3, 1)]
    """
    front: list[PlacedLayout] = []
    for one in sorted(layouts, key=lambda one: (one.step_s, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front


def _draw(axis: Axes, choice: LayoutChoice, record: RunRecord) -> None:
    for one in choice.options:
        look = style.layout_style(one.layout)
        axis.plot(
            one.step_s * 1e3, one.peak_bytes / MIB, ls="", marker=look.marker, color=look.colour,
            label=one.layout, alpha=0.8, fillstyle="full" if one.memory_rehearsed else "none",
        )  # fmt: skip
    for one in choice.out:
        axis.plot(
            one.step_s * 1e3, one.peak_bytes / MIB, ls="", marker="x", color=style.MUTED,
            label="does not fit",
        )  # fmt: skip
    front = pareto_front(choice.options)
    axis.plot(
        [one.step_s * 1e3 for one in front], [one.peak_bytes / MIB for one in front],
        color=style.MUTED, lw=1.0, zorder=0, label="Pareto front",
    )  # fmt: skip
    if record.throughput.step_s is not None and record.peak_bytes:
        axis.plot(
            record.throughput.step_s.median * 1e3, record.peak_bytes / MIB, ls="", marker="*",
            ms=12, color=style.INK, label="the run, measured",
        )  # fmt: skip
