"""Plots the layouts that ``parallel=auto`` chose from: step time against memory.

memory   x  x                 the Pareto front joins the layouts of which no other one is both
o--.   x           faster and smaller; a run's own measured step stands beside it
`--o
step time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hires.core.store.choice_file import read_choice
from hires.core.store.reading import text
from hires.core.units import MIB
from hires.report.plots import style
from hires.report.plots.base import Drawing, DrawnRun, PlotData, plot
from hires.report.read.plain_values import dicts, dig, number
from hires.report.read.rows import largest

_LONGEST_NAME = 40  # of a layout
_LONGEST = 120  # of the keys of a layout in a caption


class PlacedLayout(NamedTuple):
    """A layout in the plane of the figure."""

    step_s: float
    peak_bytes: float
    label: str
    overrides: str
    rehearsed: bool = True
    """Whether its memory is that of a run's plan, not an estimate."""


@plot(118, "choice", "Layouts that were chosen from")
def choice_front(data: PlotData) -> Drawing | str:
    """Draws predicted step time and memory of all layouts of a choice, and their Pareto front."""
    runs = [(drawn, layouts) for drawn in data.chosen_runs if (layouts := layouts_of(drawn))]
    if not runs:
        return "no run had its layout chosen (parallel=auto)"
    fig, axes = style.panels(len(runs), 2, 2.8)
    for axis, (drawn, layouts) in zip(axes, runs, strict=True):
        for one in layouts:
            look = style.layout_style(one.label)
            axis.plot(
                one.step_s * 1e3, one.peak_bytes / MIB, ls="", marker=look.marker,
                color=look.colour, label=one.label, alpha=0.8,
                fillstyle="full" if one.rehearsed else "none",
            )  # fmt: skip
        for one in layouts_of(drawn, "out"):
            axis.plot(
                one.step_s * 1e3, one.peak_bytes / MIB, ls="", marker="x", color=style.MUTED,
                label="does not fit",
            )  # fmt: skip
        front = pareto_front(layouts)
        axis.plot(
            [one.step_s * 1e3 for one in front],
            [one.peak_bytes / MIB for one in front],
            color=style.MUTED, lw=1.0, zorder=0, label="Pareto front",
        )  # fmt: skip
        measured = _measured(drawn)
        if measured is not None:
            axis.plot(
                measured[0] * 1e3, measured[1] / MIB, ls="", marker="*", ms=12, color=style.INK,
                label="the run, measured",
            )  # fmt: skip
        style.title(axis, drawn.label)
        axis.set_xlabel("predicted step (ms)")
        axis.set_ylabel("fullest rank (MiB)")
    style.legend(fig, axes)
    chosen = "; ".join(f"{drawn.label}: {layouts[0].overrides}" for drawn, layouts in runs)
    return Drawing(fig, f"Chosen: {chosen}. The memory of hollow marks is an estimate.")


def layouts_of(drawn: DrawnRun, which: str = "options") -> list[PlacedLayout]:
    """Returns the layouts of a run's choice, the chosen one first; none if it has no choice.

    ``which``: ``options`` are those that fit, ``out`` those that were planned and do not.
    """
    choice = read_choice(drawn.run.path) or {}
    options = choice.get(which, ())
    layouts = []
    for option in options if isinstance(options, list) else ():
        if not isinstance(option, dict):
            continue
        step_s, peak = number(option.get("step_s")), number(option.get("peak_bytes"))
        label = text(option.get("layout"), _LONGEST_NAME)
        overrides = text(option.get("overrides"), _LONGEST)
        if step_s and peak and label and overrides:
            rehearsed = option.get("memory_rehearsed") is not False
            layouts.append(PlacedLayout(step_s, peak, label, overrides, rehearsed))
    return layouts


def pareto_front(layouts: Sequence[PlacedLayout]) -> list[PlacedLayout]:
    """Returns the layouts that no other one beats in time and memory at once, by time.

    >>> of = lambda step_s, peak: PlacedLayout(step_s, peak, "", "")
    >>> [one[:2] for one in pareto_front([of(2, 2), of(1, 3), of(3, 3), of(3, 1), of(1, 4)])]
    [(1, 3), (2, 2), (3, 1)]
    """
    front: list[PlacedLayout] = []
    for one in sorted(layouts):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    return front


def _measured(drawn: DrawnRun) -> tuple[float, float] | None:
    """Returns the step and the fullest rank of a run that is done."""
    record = drawn.run.record
    step_s = number(dig(record, "throughput", "step_s", "median"))
    peak = largest(dicts(record.get("memory")), "peak_bytes")
    return (step_s, peak) if step_s and peak else None
