"""What does the memory of each rank hold, measured and predicted?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hires.core.units import MIB
from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import MAX_RANKS, Material, Plot, Shown

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_LETTERS = 13
"""Letters of a title on an inch."""
_KNOWN = ("params_bytes", "optimizer_bytes", "grads_bytes")


def per_rank(material: Material) -> Plot:
    """Returns a stacked bar for every rank of the runs that are drawn, and its prediction."""
    plot = Plot("memory_per_rank", "Memory per rank")
    found = [(shown, _rows(material, shown)) for shown in material.shown]
    held = [(shown, rows) for shown, rows in found if 0 < len(rows) <= MAX_RANKS]
    if not held:
        plot.missing = "no run recorded the memory of its ranks"
        return plot
    widths = [max(2, len(rows)) + 1 for _, rows in held]
    made, axes = style.figure(1, len(held), 3.4, sharey=True, gridspec_kw={"width_ratios": widths})
    for axis, width, (shown, rows) in zip(axes[0], widths, held, strict=True):
        _stack(axis, rows)
        axis.set_title(style.short(shown.label, _room(width, sum(widths))), fontsize=8.5)
        axis.set_xlabel("rank" if len(held) < 4 or len(rows) > 2 else "")
    axes[0][0].set_ylabel("MiB")
    style.legend(made, axes[0])
    plot.figure = made
    plot.caption = _caption(material, held)
    return plot


def _room(width: int, whole: int) -> int:
    """Returns how many letters of a title an axis has room for, by its share of the figure."""
    return max(8, int(style.WIDTH * _LETTERS * width / whole))


def _stack(axis: Axes, rows: pd.DataFrame) -> None:
    """Draws the ranks of one run."""
    ranks = [int(n) for n in rows["rank"]]
    peak = numeric(rows, "peak_bytes") / MIB
    bottom = peak * 0
    for key in _KNOWN:
        # What the peak does not hold was not there at that moment.
        part = (numeric(rows, key).fillna(0) / MIB).clip(upper=(peak - bottom).clip(lower=0))
        if (part > 0).any():
            _bar(axis, ranks, part, bottom, key)
        bottom = bottom + part.fillna(0)
    _bar(axis, ranks, (peak - bottom).clip(lower=0), bottom, "rest")
    predicted = numeric(rows, "predicted_bytes") / MIB
    axis.plot(
        ranks, predicted, ls="", marker="_", ms=14, mew=2.2, color=style.INK, label="predicted"
    )
    axis.set_xticks(ranks if len(ranks) <= 16 else ranks[:: len(ranks) // 8])
    axis.set_xlim(min(ranks) - 0.7, max(ranks) + 0.7)
    style.no_grid(axis, "x")


def _bar(axis: Axes, ranks: list[int], part: Any, bottom: Any, key: str) -> None:
    """Draws one part of the bars."""
    label, colour, hatch = style.PARTS[key]
    axis.bar(ranks, part, 0.72, bottom=bottom, color=colour, hatch=hatch, label=label)


def _rows(material: Material, shown: Shown) -> pd.DataFrame:
    """Returns the ranks of a run that measured or predicted anything."""
    memory = material.frames.memory
    own = (memory["campaign"] == shown.run.campaign) & (memory["run"] == shown.run.name)
    known = memory["peak_bytes"].notna() | memory["predicted_bytes"].notna()
    return memory[own & known & memory["rank"].notna()]


def _caption(material: Material, held: list[tuple[Shown, pd.DataFrame]]) -> str:
    """Returns the fullest rank of each run in words, and how good predictions are."""
    said = []
    for shown, rows in held:
        peak = numeric(rows, "peak_bytes").max()
        said.append(f"{shown.label} {peak / MIB:.1f}" if peak == peak else f"{shown.label} unknown")
    errors = numeric(material.frames.memory, "error_percent").dropna()
    text = f"Measured peak; a dash is the prediction. Fullest rank in MiB: {'; '.join(said)}."
    if len(errors):
        text += (
            f" Over all {len(errors)} ranks the prediction lies between {errors.min():+.1f} and "
            f"{errors.max():+.1f} % of the measurement."
        )
    return text
