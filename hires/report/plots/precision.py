"""What does each precision cost in accuracy, and what does it gain in speed?"""

from __future__ import annotations

from hires.report.frames import numeric
from hires.report.plots import style
from hires.report.plots.base import Material, Plot

_FLOOR = 1e-17
"""Where an error of exactly 0 is drawn on a logarithmic axis."""


def error(material: Material) -> Plot:
    """Returns the error of the loss in each precision, by layout, beside the most exact one."""
    plot = Plot("precision_error", "Precision against error")
    frame = material.frames.precision
    held = frame[frame["first_loss_error"].notna() | frame["last_loss_error"].notna()].copy()
    if not len(held):
        plot.missing = "no point was run in more than one precision with a loss"
        return plot
    held["layout"] = held["layout"].fillna("?")
    names = sorted(
        set(held["precision"]),
        key=lambda name: numeric(held[held["precision"] == name], "first_loss_error").median(),
    )
    made, axes = style.figure(1, 2, 3.3, sharey=True)
    parts = (("first_loss_error", "first step: same weights"), ("last_loss_error", "last step"))
    layouts = sorted(set(held["layout"]))
    for axis, (key, title) in zip(axes[0], parts, strict=True):
        for number, layout in enumerate(layouts):
            rows = held[(held["layout"] == layout) & held[key].notna()]
            places = [names.index(name) for name in rows["precision"]]
            shift = 0.6 * ((number + 0.5) / len(layouts) - 0.5)
            found = style.mark(layout)
            axis.plot(
                [place + shift for place in places],
                numeric(rows, key).clip(lower=_FLOOR),
                ls="",
                marker=found.marker,
                color=found.colour,
                label=style.short(layout),
            )
        style.log_axis(axis, "y")
        axis.set_xticks(range(len(names)), names)
        axis.set_xlim(-0.5, len(names) - 0.5)
        axis.set_title(title)
        style.no_grid(axis, "x")
    axes[0][0].set_ylabel("relative error of the loss")
    style.legend(made, axes[0])
    plot.figure = made
    said = []
    for name in names:
        rows = held[held["precision"] == name]
        worst = numeric(rows, "first_loss_error").max()
        beside = style.listed(sorted(set(rows["reference"].dropna())))
        said.append(f"{name} {worst:.1e} beside {beside}")
    plot.caption = (
        f"Relative difference of the training loss from the same point in the most exact precision "
        f"that was run. Largest error of the first loss: {'; '.join(said)}; {len(held)} runs."
    )
    return plot
