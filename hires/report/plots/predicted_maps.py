"""Plots overviews of predicted maps: classes in colours, and how probable they are."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from hires.report.map_overviews import NOT_FINITE, Overview, has_maps, overviews
from hires.report.plots import style
from hires.report.plots.base import MAX_PANELS, Drawing, PlotData, labelled, plot

_COLOURS = (
    style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.YELLOW, style.VERMILION,
)  # fmt: skip
_REST, _BROKEN = "#868685", "#fefefd"
"""Of classes without a colour of their own, and of pixels whose output is not finite. Pictures keep
their colours in a dark page, so these are none that it replaces."""


@plot(117, "predicted_maps", "Predicted maps")
def predicted_maps(data: PlotData) -> Drawing | str:
    """Draws the first maps of predictions; beside those of probabilities, the largest of these."""
    found = data.frames.found
    runs = [run for run in found.runs if has_maps(run)]
    each = max(1, MAX_PANELS // max(1, len(runs)))
    drawn = labelled(runs[:MAX_PANELS])
    maps = [(one, held) for one in drawn for held in overviews(one.run, each, found.notes)]
    if not maps:
        return "no run is a complete prediction of maps (task=predict) whose files are there"
    panels = []
    for one, held in maps:
        panels.append((f"{one.label}: {held.name}", held, False))
        if held.shares is not None:
            panels.append((f"{one.label}: {held.name}, probability of that class", held, True))
    fig, axes = style.panels(len(panels), 2 if len(panels) in (2, 4) else 3, 2.2)
    every = [held for _, held in maps]
    colours = _colours(every)
    for axis, (title, held, is_share) in zip(axes, panels, strict=True):
        style.title(axis, title)
        _draw(axis, held, is_share, colours)
    _legend(axes[0], every, colours)
    style.legend(fig, axes[:1])
    scales = [axis for axis, (*_, is_share) in zip(axes, panels, strict=True) if is_share]
    if scales:
        bar = fig.colorbar(scales[0].images[0], ax=axes, location="bottom", shrink=0.5, aspect=40)
        bar.set_label("probability of the class")
    in_all = sum(run.record.prediction.images or 0 for run in runs if run.record.prediction)
    left = in_all - len(maps)
    more = f" {left} more {'is' if left == 1 else 'are'} not drawn." if left > 0 else ""
    return Drawing(fig, f"Each map is shrunk: pixels are left out.{more}")


def _colours(maps: list[Overview]) -> dict[str, str]:
    """Returns the colours of the most frequent classes of all maps, by their names."""
    sums: defaultdict[str, float] = defaultdict(float)
    order: dict[str, int] = {}
    for one in maps:
        in_all = sum(one.pixels.values()) or 1
        for label in sorted(one.pixels):
            if label != NOT_FINITE:
                sums[_name(one, label)] += one.pixels[label] / in_all
                order.setdefault(_name(one, label), label)
    most = sorted(sums, key=lambda name: -sums[name])[: len(_COLOURS)]
    return dict(zip(sorted(most, key=order.__getitem__), _COLOURS, strict=False))


def _draw(axis: Axes, held: Overview, is_share: bool, colours: dict[str, str]) -> None:
    look: dict[str, Any] = {"interpolation": "none", "extent": (0, held.size[1], held.size[0], 0)}
    if is_share and held.shares is not None:
        axis.imshow(np.ma.masked_invalid(held.shares), cmap="viridis", vmin=0, vmax=1, **look)
    elif held.image is not None:
        axis.imshow(held.image, **look)
    elif held.classes is not None:
        labels = sorted(held.pixels)
        table = [_BROKEN if n == NOT_FINITE else colours.get(_name(held, n), _REST) for n in labels]
        places = np.searchsorted(labels, held.classes)
        last = max(1, len(labels) - 1)
        axis.imshow(places, cmap=ListedColormap(table), vmin=0, vmax=last, **look)
    axis.grid(False)
    axis.set(xticks=[0, held.size[1]], yticks=[0, held.size[0]])


def _legend(axis: Axes, maps: list[Overview], colours: dict[str, str]) -> None:
    # A label may not begin with "_", so the square of a name is named with a no-break space before.
    entries = [(f"\u00a0{name}", colour) for name, colour in colours.items()]
    labels = {_name(one, n) for one in maps for n in one.pixels if n != NOT_FINITE}
    if len(labels) > len(colours):
        entries.append((f"\u00a0{len(labels) - len(colours)} more classes", _REST))
    if any(one.pixels[NOT_FINITE] for one in maps):
        entries.append(("\u00a0not finite", _BROKEN))
    for label, colour in entries:
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": style.MUTED, "lw": 0.5}
        axis.add_patch(Rectangle((0, 0), 0, 0, label=label, **look))


def _name(one: Overview, label: int) -> str:
    return one.names[label] if label < len(one.names) else str(label)
