"""Plots the layouts that ``parallel=auto`` chose from: step time against memory.

memory   x  x                 the Pareto front joins the layouts of which no other one is both
o--.   x           faster and smaller; a run's own measured step stands beside it
`--o
step time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hires.core.store.choice_file import read_choice
from hires.core.store.reading import text
from hires.core.units import MIB, seconds, size
from hires.report.plots import style
from hires.report.plots.base import Drawing, DrawnRun, PlotData, plot
from hires.report.read.plain_values import number

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
    words = []
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
            step_s, peak = measured
            axis.plot(
                step_s * 1e3, peak / MIB, ls="", marker="*", ms=12, color=style.INK,
                label="the run, measured",
            )  # fmt: skip
        style.title(axis, drawn.label)
        axis.set_xlabel("predicted step (ms)")
        axis.set_ylabel("fullest rank (MiB)")
        words.append(_words(drawn, layouts, front, measured))
    words.append("The memory of hollow marks is an estimate.")
    style.legend(fig, axes)
    return Drawing(fig, " ".join(words))


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
    record: Any = drawn.run.record
    throughput, memory = record.get("throughput"), record.get("memory")
    step = throughput.get("step_s") if isinstance(throughput, dict) else None
    step_s = number(step.get("median")) if isinstance(step, dict) else None
    ranks = memory if isinstance(memory, list) else []
    peaks = [number(one.get("peak_bytes")) for one in ranks if isinstance(one, dict)]
    measured = [peak for peak in peaks if peak]
    return (step_s, max(measured)) if step_s and measured else None


def _words(
    drawn: DrawnRun,
    layouts: Sequence[PlacedLayout],
    front: Sequence[PlacedLayout],
    measured: tuple[float, float] | None,
) -> str:
    chosen = layouts[0]
    words = (
        f"{drawn.label}: {len(layouts)} layouts, {len(front)} of them on the Pareto front; chosen "
        f"{chosen.overrides}, predicted {seconds(chosen.step_s)} and {size(chosen.peak_bytes)}"
    )
    return f"{words}, measured {seconds(measured[0])}." if measured else f"{words}."
