"""Plots which classes were taken for which, and overviews of predicted maps.

Maps are shrunk without reading a whole one at once::

    12,000 x 9,000 pixels        every 15th of every 15th row
    +----+----+----+             +--+
    |    |    |    |    -->      |  |  800 x 600, and how many of them each class has
    +----+----+----+             +--+
"""

from __future__ import annotations

import heapq
import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from hires.core.programs import adding
from hires.core.store import file_names, reading
from hires.core.store.reading import Note, text
from hires.report.evaluations import EvaluationFile, evaluated, evaluation_in
from hires.report.plots import style
from hires.report.plots.base import MAX_PANELS, Drawing, PlotData, labelled, plot
from hires.report.record import RecordedMap
from hires.report.runs import Run

MAX_SIDE = 800
"""Pixels of an overview on its longer side."""
NOT_FINITE = -1
_DTYPES = ("uint8", "uint16", "float32")
_AXES = ("YX", "CYX", "YXS")
_MAX_NAME = 60


@dataclass
class Overview:
    """A predicted map, or image, as a page shows it."""

    name: str
    size: tuple[int, int]
    """Rows and columns of the whole map."""
    names: list[str]
    """Of the classes."""
    classes: NDArray[np.int32] | None = None
    """(h, w), the class of each shown pixel or ``NOT_FINITE``; None: it is an image."""
    shares: NDArray[np.float32] | None = None
    """(h, w), the probability of that class; None: it was not written."""
    image: NDArray[np.float32] | None = None
    """(h, w, 3) from black (0) to white (1)."""
    pixels: Counter[int] = field(default_factory=Counter)
    """How many of the shown pixels have a class."""


def has_maps(run: Run) -> bool:
    """Returns whether a run is a complete prediction of maps."""
    return run.end[0] == "done" and _map_of(run) is not None


def overviews(run: Run, most: int, notes: list[Note]) -> list[Overview]:
    """Returns the first maps of a prediction; what cannot be read is left out, with a note."""
    folder, kind = run.path / file_names.PREDICTIONS, _map_of(run)
    assert kind is not None
    made = []
    for path in heapq.nsmallest(most, file_names.entries_of(folder), key=_natural):
        try:
            made.append(_overview(path, kind))
        except (OSError, ValueError, KeyError) as error:
            notes.append(reading.note(path, f"is not drawn: {error}"[:200]))
    return made


def _map_of(run: Run) -> RecordedMap | None:
    """Returns what each map of a prediction is; None: there are none that can be read."""
    kind = None if run.record.prediction is None else run.record.prediction.map
    if kind is None or kind.dtype not in _DTYPES or kind.axes not in _AXES:
        return None
    return kind


def _natural(path: Path) -> str:
    # 2.tif stands before 10.tif.
    return re.sub(r"\d+", lambda digits: digits[0].zfill(9), path.name)


def _overview(path: Path, kind: RecordedMap) -> Overview:
    whole = _opened(path, kind)
    rows, columns = (whole.shape[kind.axes.index(axis)] for axis in "YX")
    each = slice(None, None, math.ceil(max(rows, columns) / MAX_SIDE))
    shown = whole[tuple(each if axis in "YX" else slice(None) for axis in kind.axes)]
    stem = text(path.name.partition(".")[0], _MAX_NAME) or "?"
    made = Overview(stem, (rows, columns), kind.classes)
    if kind.axes == "YXS":
        colours = np.nan_to_num(shown[..., : 3 if shown.shape[2] >= 3 else 1]).clip(0, 1)
        made.image = np.broadcast_to(colours, (*colours.shape[:2], 3)).astype(np.float32)
        return made
    if kind.axes == "CYX":
        made.shares = shown.max(0)
        made.classes = np.where(np.isfinite(made.shares), shown.argmax(0), NOT_FINITE)
    else:
        made.classes = shown.astype(np.int32)
        made.classes[shown == np.iinfo(shown.dtype).max] = NOT_FINITE
    labels, numbers = np.unique(made.classes, return_counts=True)
    made.pixels.update(dict(zip(labels.tolist(), numbers.tolist(), strict=True)))
    return made


def _opened(path: Path, kind: RecordedMap) -> Any:
    """Returns a map of which parts can be read; OSError, ValueError: it is none."""
    if path.suffix == ".zarr":
        try:
            import zarr
        except ImportError:
            raise ValueError(f"it needs the package zarr; {adding('zarr')}") from None
        array = zarr.open_array(str(path), mode="r")
        sizes = dict(zip(kind.axes, array.shape, strict=True))
        if (array.shape, array.dtype.name) != (_shape(kind, sizes), kind.dtype):
            raise ValueError("it is no map of this prediction")
        return array
    if not path.is_file():
        raise ValueError("it is no file")
    import tifffile

    with tifffile.TiffFile(path) as file:
        page = file.pages.first
        sizes = {"Y": page.imagelength, "X": page.imagewidth}
    return tifffile.memmap(path, mode="r").reshape(_shape(kind, sizes))


def _shape(kind: RecordedMap, sizes: dict[str, int]) -> tuple[int, ...]:
    return tuple(sizes[axis] if axis in "YX" else kind.channels for axis in kind.axes)


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
    """Returns the colours of the first classes of all maps, by their names."""
    labels = ((one, n) for one in maps for n in sorted(one.pixels) if n != NOT_FINITE)
    return dict(zip(dict.fromkeys(_name(*label) for label in labels), _COLOURS, strict=False))


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
        entries.append(("\u00a0not predicted", _BROKEN))
    for label, colour in entries:
        look: dict[str, Any] = {"facecolor": colour, "edgecolor": style.MUTED, "lw": 0.5}
        axis.add_patch(Rectangle((0, 0), 0, 0, label=label, **look))


def _name(one: Overview, label: int) -> str:
    return one.names[label] if label < len(one.names) else str(label)


_NUMBERS = 8
"""Classes up to which each cell has its number."""
_TICKS = 20
"""Names that an axis has at most."""


@plot(116, "confusion", "Confusion of classes")
def confusion(data: PlotData) -> Drawing | str:
    """Draws for each class how the images or pixels of it were predicted, in shares of its row."""
    found = data.frames.found
    every = [
        (one, evaluation_in(one.shown.folder, found.notes)) for one in found.runs if evaluated(one)
    ]
    shown = [pair for pair in every if pair[1].confusion][:MAX_PANELS]
    if not shown:
        return "no run evaluated classes (task=evaluate), of at most 64"
    fig, axes = style.panels(len(shown), 2, 3.6)
    for axis, drawn, (_, held) in zip(
        axes, labelled([run for run, _ in shown]), shown, strict=True
    ):
        style.title(axis, drawn.label)
        _draw_matrix(axis, held)
    bar = fig.colorbar(axes[0].images[0], ax=axes, location="bottom", shrink=0.5, aspect=40)
    bar.set_label("share of the class")
    return Drawing(fig, "Rows are classes, columns what was predicted.")


def _draw_matrix(axis: Axes, held: EvaluationFile) -> None:
    counts = np.array(held.confusion, dtype=np.float64)
    sums = counts.sum(axis=1, keepdims=True)
    # A class that does not occur has no share.
    shares = np.divide(counts, sums, out=np.full_like(counts, np.nan), where=sums > 0)
    axis.imshow(shares, cmap="viridis", vmin=0, vmax=1, interpolation="none")
    axis.grid(False)
    places = np.arange(0, len(shares), -(-len(shares) // _TICKS))
    names = [style.short(held.names[n], 14) for n in places]
    axis.set_xticks(places, names, rotation=90, fontsize=7)
    axis.set_yticks(places, names, fontsize=7)
    axis.set(xlabel="predicted", ylabel="class")
    for row, column in np.argwhere(np.isfinite(shares)) if len(shares) <= _NUMBERS else ():
        colour = "#fefefd" if shares[row, column] < 0.5 else "#010102"
        look: dict[str, Any] = {"color": colour, "fontsize": 7, "ha": "center", "va": "center"}
        axis.text(column, row, f"{100 * shares[row, column]:.0f}", **look)
