"""Plots what the memory of each rank holds, measured and predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hires.core.units import MIB
from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import (
    MAX_RANKS,
    Drawing,
    DrawnRun,
    NotDrawnError,
    PlotData,
    plot,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_LETTERS_PER_INCH = 13
"""Of a title."""


@plot(50, "memory_per_rank", "Memory per rank")
def per_rank(data: PlotData) -> Drawing:
    """Draws a stacked bar for every rank, and a dash for its prediction."""
    rows_of = [(drawn, _rows(data, drawn)) for drawn in data.runs]
    runs = [(drawn, rows) for drawn, rows in rows_of if 0 < len(rows) <= MAX_RANKS]
    if not runs:
        raise NotDrawnError("no run recorded the memory of its ranks")
    widths = [max(2, len(rows)) + 1 for _, rows in runs]
    fig, [axes] = style.figure(1, len(runs), 3.4, sharey=True, width_ratios=widths)
    for axis, width, (drawn, rows) in zip(axes, widths, runs, strict=True):
        _stack(axis, rows)
        room = max(8, int(style.WIDTH * _LETTERS_PER_INCH * width / sum(widths)))
        axis.set_title(style.short(drawn.label, room), fontsize=8.5)
        axis.set_xlabel("rank" if len(runs) < 4 or len(rows) > 2 else "")
    axes[0].set_ylabel("MiB")
    style.legend(fig, axes)
    return Drawing(fig, _caption(data, runs))


def _stack(axis: Axes, rows: pd.DataFrame) -> None:
    """Draws the ranks of one run."""
    ranks = [int(n) for n in rows["rank"]]
    peak = numeric(rows, "peak_bytes") / MIB
    bottom = peak * 0
    for key, (label, colour, hatch) in style.PARTS.items():
        part = (peak - bottom).clip(lower=0)
        if key != "rest":
            # What exceeds the peak was not allocated at that moment.
            part = (numeric(rows, key).fillna(0) / MIB).clip(upper=part)
        if key == "rest" or (part > 0).any():
            axis.bar(ranks, part, 0.72, bottom=bottom, color=colour, hatch=hatch, label=label)
        bottom = bottom + part.fillna(0)
    axis.plot(
        ranks, numeric(rows, "predicted_bytes") / MIB, ls="", marker="_", ms=14, mew=2.2,
        color=style.INK, label="predicted",
    )  # fmt: skip
    axis.set_xticks(ranks if len(ranks) <= 16 else ranks[:: len(ranks) // 8])
    axis.set_xlim(min(ranks) - 0.7, max(ranks) + 0.7)
    style.no_grid(axis, "x")


def _rows(data: PlotData, drawn: DrawnRun) -> pd.DataFrame:
    """Returns the ranks of a run with a measured or predicted peak."""
    memory = data.frames.memory
    own = (memory["campaign"] == drawn.run.campaign) & (memory["run"] == drawn.run.name)
    known = memory["peak_bytes"].notna() | memory["predicted_bytes"].notna()
    return memory[own & known & memory["rank"].notna()]


def _caption(data: PlotData, runs: list[tuple[DrawnRun, pd.DataFrame]]) -> str:
    words = []
    for drawn, rows in runs:
        peak = numeric(rows, "peak_bytes").max()
        words.append(f"{drawn.label} {'unknown' if peak != peak else f'{peak / MIB:.1f}'}")
    text = f"Measured peak; a dash is the prediction. Fullest rank in MiB: {'; '.join(words)}."
    errors = numeric(data.frames.memory, "error_percent").dropna()
    if len(errors):
        text += (
            f" Over all {len(errors)} ranks the prediction lies between {errors.min():+.1f} and "
            f"{errors.max():+.1f} % of the measurement."
        )
    return text
