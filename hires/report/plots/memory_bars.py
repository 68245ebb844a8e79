"""Plots the memory of each rank, the largest image that fits, and layouts by memory and time."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from hires.core.store.file_names import CHOICE
from hires.core.store.reading import read_json
from hires.core.units import MIB
from hires.report.plots import style
from hires.report.plots.base import (
    MAX_PANELS,
    MAX_RANKS,
    MAX_RUNS,
    Drawing,
    PlotData,
    labelled,
    plot,
)
from hires.report.points import parts_of
from hires.report.record import RecordedRank, RunRecord
from hires.report.run_tables import planned_rows, run_row
from hires.report.tables import numeric, plain_rows
from hires.report.typed_values import typed

_PANEL = ("campaign", "model", "precision", "task", "batch", "limit")  # shared in a panel of images
_PARTS = {
    "params_bytes": ("parameters", style.BLUE, ""),
    "optimizer_bytes": ("optimiser", style.ORANGE, "--"),
    "grads_bytes": ("gradients", style.SKY, "//"),
}
"""Label, colour and hatch of each use of memory, from the bottom of a bar to its top."""
_REST = ("activations and buffers", style.GREEN, "xx")


@plot(50, "memory_per_rank", "Memory per rank")
def per_rank(data: PlotData) -> Drawing | str:
    """Draws a stacked bar for every rank, and a dash for its prediction."""
    every = [
        (drawn, [one for one in drawn.run.record.memory if one.peak_bytes or one.predicted_bytes])
        for drawn in data.runs
    ]
    runs = [(drawn, ranks) for drawn, ranks in every if 0 < len(ranks) <= MAX_RANKS]
    if not runs:
        return "no run recorded the memory of its ranks"
    fig, axes = style.panels(len(runs), 3, 2.8, sharey=True)
    for axis, (drawn, ranks) in zip(axes, runs, strict=True):
        _stack(axis, ranks)
        style.title(axis, drawn.label)
        axis.set(xlabel="rank", ylabel="MiB")
    style.legend(fig, axes)
    return Drawing(fig, "Measured peak of each rank; a dash is the prediction.")


@plot(40, "largest_image", "The largest image each layout fits")
def largest_image(data: PlotData) -> Drawing | str:
    """Draws the image sizes of each layout: those that ran, and those that memory refused."""
    frame = _images(data)
    groups = [part for part in parts_of(frame, _PANEL) if part["refused"].any()]
    if not groups:
        return "memory refused no image, so the largest one that fits is not known"
    shown = sorted(groups, key=lambda part: -part["edge"].nunique())[:MAX_PANELS]
    most = max(part["layout"].nunique() for part in shown)
    fig, axes = style.panels(len(shown), 2, 0.9 + 0.36 * most)
    for axis, part in zip(axes, shown, strict=True):
        row = plain_rows(part)[0]
        names = [key for key in _PANEL if key != "campaign" or frame["campaign"].nunique() > 1]
        words = [f"{key} {row[key]}" if key in ("batch", "limit") else row[key] for key in names]
        style.title(axis, ", ".join(str(word or "?") for word in words if word != "limit null"))
        _image_bars(axis, part)
        axis.set_ylim(most - 0.5, -0.5)  # bars are equally high everywhere
    style.legend(fig, axes)
    return Drawing(fig, "Ticks are image sizes that ran to the end.")


def _stack(axis: Axes, memory: list[RecordedRank]) -> None:
    ranks = [one.rank for one in memory]
    peaks = np.array([(one.peak_bytes or 0) / MIB for one in memory])
    bottom = np.zeros(len(memory))
    for key, (label, colour, hatch) in {**_PARTS, "": _REST}.items():
        part = peaks - bottom
        if key:  # what exceeds the peak was not allocated at that moment
            part = np.minimum(part, [(getattr(one, key) or 0) / MIB for one in memory])
        part = part.clip(min=0)
        if part.any():
            axis.bar(ranks, part, 0.72, bottom=bottom, color=colour, hatch=hatch, label=label)
        bottom += part
    predicted = {one.rank: one.predicted_bytes / MIB for one in memory if one.predicted_bytes}
    if predicted:
        axis.plot(
            [*predicted], [*predicted.values()], ls="", marker="_", ms=14, mew=2.2,
            color=style.INK, label="predicted",
        )  # fmt: skip
    axis.set_xticks(ranks if len(ranks) <= 16 else ranks[:: len(ranks) // 8])
    axis.set_xlim(min(ranks) - 0.7, max(ranks) + 0.7)
    style.no_grid(axis, "x")


def _images(data: PlotData) -> pd.DataFrame:
    """Returns the points that ran, and those that failed or were excluded for lack of memory."""
    found = data.frames.found
    rows = [
        {**row, "limit": row["memory_limit"], "refused": row["state"] != "done"}
        for row in map(run_row, found.runs)
        if row["state"] == "done" or row["reason"] == "oom"
    ]
    rows += [
        {**row["what"], "campaign": name, "refused": True}
        for name, campaign in found.campaigns.items()
        for row in planned_rows(name, campaign)
        if row["state"] == "infeasible" and "[memory." in (row["reason"] or "")
    ]
    columns = ["layout", "image", "height", "width", "refused"]
    frame = pd.DataFrame(rows, columns=[*_PANEL, *columns])
    frame = frame[frame["height"].notna() & frame["width"].notna()].copy()
    frame["layout"] = frame["layout"].fillna("?")
    frame["refused"] = frame["refused"].astype(bool)
    frame["edge"] = (numeric(frame, "height") * numeric(frame, "width")) ** 0.5
    frame["batch"] = numeric(frame, "batch").astype("Int64")  # None among them made it 8.0
    return frame


def _image_bars(axis: Axes, part: pd.DataFrame) -> None:
    layouts = sorted(set(part["layout"]))
    for place, layout in enumerate(layouts):
        own = part[part["layout"] == layout]
        ran, refused = own[~own["refused"]], own[own["refused"]]
        edges = sorted(set(ran["edge"]))
        if edges:
            colour, _, hatch, _ = style.layout_style(layout)
            axis.barh(place, max(edges), 0.5, color=colour, hatch=hatch, alpha=0.85)
            axis.plot(edges, [place] * len(edges), ls="", marker="|", color=style.INK, ms=8)
        if len(refused):
            axis.plot(
                refused["edge"], [place] * len(refused), ls="", marker="X", ms=8,
                color=style.VERMILION, markeredgecolor=style.PAPER,
                label="needs more memory than there is",
            )  # fmt: skip
    style.named_rows(axis, layouts)
    axis.set_xlabel("edge of a square of as many pixels", fontsize=8)


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
        _draw_choice(axis, choice, run.record)
        style.title(axis, drawn.label)
        axis.set(xlabel="predicted step (ms)", ylabel="highest peak of a rank (MiB)")
    style.legend(fig, axes)
    chosen = "; ".join(
        f"{drawn.label}: {choice.options[0].overrides}"
        for drawn, (_, choice) in zip(runs, choices, strict=True)
    )
    return Drawing(fig, f"Chosen: {chosen}. The memory of hollow marks is an estimate.")


def _draw_choice(axis: Axes, choice: LayoutChoice, record: RunRecord) -> None:
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
