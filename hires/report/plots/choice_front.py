"""Plots the layouts that ``parallel=auto`` chose from: step time against memory.

memory   x  x                 the Pareto front joins the layouts of which no other one is both
o--.   x           faster and smaller; a run's own measured step stands beside it
`--o
step time
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

from matplotlib.axes import Axes

from hires.core.store.file_names import CHOICE
from hires.core.store.reading import read_json
from hires.core.units import MIB
from hires.report.plots import style
from hires.report.plots.base import MAX_RUNS, Drawing, PlotData, labelled, plot
from hires.report.record import RunRecord
from hires.report.typed_values import typed


@dataclass
class PlacedLayout:
    """A layout in the plane of the figure."""

    step_s: float
    peak_bytes: int
    layout: str
    overrides: str = ""
    rehearsed: bool = True
    """Whether its memory is that of a run's plan, not an estimate."""


@dataclass
class LayoutChoice:
    """The layouts of a choice: those that fit, the chosen one first, and those that do not."""

    options: list[PlacedLayout] = field(default_factory=list)
    out: list[PlacedLayout] = field(default_factory=list)


@plot(118, "choice", "Layouts that were chosen from")
def choice_front(data: PlotData) -> Drawing | str:
    """Draws predicted step time and memory of all layouts of a choice, and their Pareto front."""
    choices = []
    for run in data.frames.run_list:
        with contextlib.suppress(ValueError):  # it is damaged
            choice: LayoutChoice = typed(LayoutChoice, read_json(run.path / CHOICE, []))
            choices += [(run, choice)] if choice.options else []
    choices = choices[:MAX_RUNS]
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


def _draw(axis: Axes, choice: LayoutChoice, record: RunRecord) -> None:
    for one in choice.options:
        look = style.layout_style(one.layout)
        axis.plot(
            one.step_s * 1e3, one.peak_bytes / MIB, ls="", marker=look.marker, color=look.colour,
            label=one.layout, alpha=0.8, fillstyle="full" if one.rehearsed else "none",
        )  # fmt: skip
    for one in choice.out:
        axis.plot(
            one.step_s * 1e3, one.peak_bytes / MIB, ls="", marker="x", color=style.MUTED,
            label="does not fit",
        )  # fmt: skip
    front: list[PlacedLayout] = []
    for one in sorted(choice.options, key=lambda one: (one.step_s, one.peak_bytes)):
        if not front or one.peak_bytes < front[-1].peak_bytes:
            front.append(one)
    axis.plot(
        [one.step_s * 1e3 for one in front], [one.peak_bytes / MIB for one in front],
        color=style.MUTED, lw=1.0, zorder=0, label="Pareto front",
    )  # fmt: skip
    if record.throughput.step_s is not None and record.peak_bytes:
        axis.plot(
            record.throughput.step_s.median * 1e3, record.peak_bytes / MIB, ls="", marker="*",
            ms=12, color=style.INK, label="the run, measured",
        )  # fmt: skip
