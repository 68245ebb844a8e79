"""Plots what each precision costs in accuracy."""

from __future__ import annotations

from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import Drawing, NotDrawnError, PlotData, plot

_FLOOR = 1e-17
"""Where an error of exactly 0 is drawn on a logarithmic axis."""


@plot(100, "precision_error", "Precision against error")
def error(data: PlotData) -> Drawing:
    """Draws the error of the loss in each precision and layout, relative to the most exact one."""
    frame = data.frames.precision
    rows = frame[frame["first_loss_error"].notna() | frame["last_loss_error"].notna()].copy()
    if not len(rows):
        raise NotDrawnError("no point was run in more than one precision with a loss")
    rows["layout"] = rows["layout"].fillna("?")
    of_precision = {name: rows[rows["precision"] == name] for name in set(rows["precision"])}
    names = sorted(
        sorted(of_precision),
        key=lambda name: numeric(of_precision[name], "first_loss_error").median(),
    )
    fig, [axes] = style.figure(1, 2, 3.3, sharey=True)
    parts = (("first_loss_error", "first step: same weights"), ("last_loss_error", "last step"))
    layouts = sorted(set(rows["layout"]))
    for axis, (key, title) in zip(axes, parts, strict=True):
        for number, layout in enumerate(layouts):
            own = rows[(rows["layout"] == layout) & rows[key].notna()]
            shift = 0.6 * ((number + 0.5) / len(layouts) - 0.5)
            look = style.layout_style(layout)
            axis.plot(
                [names.index(name) + shift for name in own["precision"]],
                numeric(own, key).clip(lower=_FLOOR), ls="",
                marker=look.marker, color=look.colour, label=style.short(layout),
            )  # fmt: skip
        style.log_axis(axis, "y")
        axis.set_xticks(range(len(names)), names)
        axis.set_xlim(-0.5, len(names) - 0.5)
        axis.set_title(title)
        style.no_grid(axis, "x")
    axes[0].set_ylabel("relative error of the loss")
    style.legend(fig, axes)
    worst = "; ".join(
        f"{name} {numeric(of_precision[name], 'first_loss_error').max():.1e} beside "
        f"{style.listed(sorted(set(of_precision[name]['reference'].dropna())))}"
        for name in names
    )
    return Drawing(
        fig,
        f"Relative difference of the training loss from the same point in the most exact precision "
        f"that was run. Largest error of the first loss: {worst}; {len(rows)} runs.",
    )
