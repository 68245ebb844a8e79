"""Plots overviews of predicted maps: classes in colours, and how probable they are."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle

from hires.report.plots import style
from hires.report.plots.base import Drawing, PlotData, plot
from hires.report.read.map_overviews import NOT_FINITE, Overview

_COLOURS = (
    style.BLUE, style.ORANGE, style.GREEN, style.PURPLE, style.SKY, style.YELLOW, style.VERMILION,
)  # fmt: skip
_REST, _BROKEN = "#868685", "#fefefd"
"""Of classes without a colour of their own, and of pixels whose output is not finite. Pictures keep
their colours in a dark page, so these are none that it replaces."""


class _Panel(NamedTuple):
    title: str
    overview: Overview
    is_share: bool  # the probability, not the class


@plot(117, "predicted_maps", "Predicted maps")
def predicted_maps(data: PlotData) -> Drawing | str:
    """Draws the first maps of predictions; beside those of probabilities, the largest of these."""
    shown, more = data.map_overviews
    maps = [(f"{drawn.label}: {one.name}", one) for drawn, found in shown for one in found]
    if not maps:
        return "no run is a complete prediction of maps (task=predict) whose files are there"
    panels = [
        _Panel(title, one, is_share)
        for title, one in maps
        for is_share in ((False, True) if one.shares is not None else (False,))
    ]
    columns = min(2 if len(panels) in (2, 4) else 3, len(panels))
    tall = max(one.size[0] / one.size[1] for _, one in maps)
    fig, axes = style.panels(
        len(panels), columns, min(4.5, max(1.4, (style.WIDTH / columns - 0.3) * tall + 0.4))
    )
    colours = _colours([one for _, one in maps])
    for axis, panel in zip(axes, panels, strict=True):
        of = ", probability of that class" if panel.is_share else ""
        style.title(axis, f"{panel.title}{of}")
        _draw(axis, panel, colours)
    _legend(axes[0], [one for _, one in maps], colours)
    style.legend(fig, axes[:1], 4)
    scales = [axis for axis, panel in zip(axes, panels, strict=True) if panel.is_share]
    if scales:
        bar = fig.colorbar(scales[0].images[0], ax=axes, location="bottom", shrink=0.5, aspect=40)
        bar.set_label("probability of the class")
        style.grow(fig, 0.6)
    left = f" {more} more {'is' if more == 1 else 'are'} not drawn." if more > 0 else ""
    return Drawing(fig, f"Each map is shrunk: pixels are left out.{left}")


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
    chosen = sorted(most, key=order.__getitem__)
    return dict(zip(chosen, _COLOURS, strict=False))


def _draw(axis: Axes, panel: _Panel, colours: dict[str, str]) -> None:
    one = panel.overview
    look: dict[str, Any] = {"interpolation": "none", "extent": (0, one.size[1], one.size[0], 0)}
    if panel.is_share and one.shares is not None:
        axis.imshow(np.ma.masked_invalid(one.shares), cmap="viridis", vmin=0, vmax=1, **look)
    elif one.image is not None:
        axis.imshow(one.image, **look)
    elif one.classes is not None:
        labels = sorted(one.pixels)
        table = [_BROKEN if n == NOT_FINITE else colours.get(_name(one, n), _REST) for n in labels]
        places = np.searchsorted(labels, one.classes)
        last = max(1, len(labels) - 1)
        axis.imshow(places, cmap=ListedColormap(table), vmin=0, vmax=last, **look)
    axis.grid(False)
    axis.set(xticks=[0, one.size[1]], yticks=[0, one.size[0]])


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
    if label == NOT_FINITE:
        return "not finite"
    return one.names[label] if label < len(one.names) else str(label)
