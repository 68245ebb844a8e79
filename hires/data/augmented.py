"""Changes training images at random, alike in every layout, and window by window.

What happens to an image follows from the seed, the epoch and its number alone. A window of the
changed image is mapped back to the window of the source that it shows, and only that is read:

    source            part, enlarged    mirrored         turned            colours
    +---------+       +---------+       +---------+      +---------+
    |  +--+   |  -->  | a       |  -->  |       a |  --> |         |  --> pixel by pixel
    |  |a |   |       |         |       |         |      | a       |
    +--+--+---+       +---------+       +---------+      +---------+

Numbers of images count on through the epochs: image i of epoch e of n images is e * n + i.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import AugmentConfig
from hires.data.image_fit import Place, ReadWindow, crop, nearest_window, resize
from hires.data.image_format import LUMINANCE, Pixels, Size, Span, Window, check_window
from hires.data.source import Source

_STREAM = 0x617567
"""Sets these numbers apart from those that are drawn of the same seed elsewhere."""


class ImageChange(NamedTuple):
    """What happens to one image in one epoch."""

    part: tuple[Span, Span]
    """Rows and columns of the source that become the image; all of them, or fewer."""
    shift: tuple[int, int]
    """Rows and columns of the source that lie before the image."""
    flips: tuple[bool, bool]
    """Whether it is upside down, and whether left is right."""
    turns: int
    """By 90 degrees, counterclockwise."""
    brightness: float
    contrast: float
    saturation: float
    hue: float = 0.0
    """By how much of a circle hues are turned."""
    place: Place | None = None
    """Of the crop, where larger images are cropped at random."""


@lru_cache(maxsize=4096)
def drawn_change(
    keys: tuple[Any, ...], size: Size, seed: int, epoch: int, image: int
) -> ImageChange:
    """Returns what happens to an image of a size; ``keys`` are the values of ``augment``."""
    augment = AugmentConfig(*keys)
    numbers = np.random.Generator(np.random.PCG64([seed, _STREAM, epoch, image])).random(14)
    share, *corner = numbers[:3].tolist()
    side = (augment.crop + (1 - augment.crop) * share) ** 0.5
    part = []
    for length, place in zip(size, corner, strict=True):
        kept = max(1, round(side * length))
        first = min(int(place * (length - kept + 1)), length - kept)
        part.append((first, first + kept))
    moves = [int(x * (2 * augment.shift + 1)) - augment.shift for x in numbers[3:5].tolist()]
    up, across, turn, *colours, hue, down, right = numbers[5:].tolist()
    flips = (
        augment.flip in ("vertical", "both") and up < 0.5,
        augment.flip in ("horizontal", "both") and across < 0.5,
    )
    square = size[0] == size[1]
    turns = (int(4 * turn) if square else 2 * int(2 * turn)) if augment.rotate else 0
    amounts = augment.brightness, augment.contrast, augment.saturation
    factors = [1 + a * (2 * x - 1) for a, x in zip(amounts, colours, strict=True)]
    hue = augment.hue * (2 * hue - 1)
    brightness, contrast, saturation = factors
    return ImageChange(
        (part[0], part[1]), (moves[0], moves[1]), flips, turns,
        brightness, contrast, saturation, hue, (down, right),
    )  # fmt: skip


class AugmentedSource(Source):
    """The images of a source as a training sees them, epoch after epoch."""

    def __init__(self, whole: Source, size: Size, augment: AugmentConfig, seed: int) -> None:
        self.num_classes, self.class_names = whole.num_classes, whole.class_names
        self.has_maps, self.ignore = whole.has_maps, whole.ignore
        self._whole, self._size, self._augment, self._seed = whole, size, augment, seed

    def __len__(self) -> int:
        return len(self._whole)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self._whole.label(i % len(self))

    def name(self, i: int) -> str:
        """Returns what names an image."""
        return self._whole.name(i % len(self))

    def check(self, i: int, most_bytes: int) -> int:
        """Checks an image, as the whole source does."""
        return self._whole.check(i % len(self), most_bytes)

    def change(self, i: int) -> ImageChange:
        """Returns what happens to an image."""
        epoch, image = divmod(i, len(self))
        keys = tuple(vars(self._augment).values())
        return drawn_change(keys, self._size, self._seed, epoch, image)

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of a changed image, (C, h, w), from -2 (black) to 2 (white)."""
        change, image = self.change(i), i % len(self)

        def read(rows: Span, cols: Span) -> NDArray[Any]:
            return self._whole.window(image, rows, cols, change.place)

        pixels = seen_through(change, self._size, read, rows, cols)
        return np.ascontiguousarray(_coloured(pixels, change, self._augment), np.float32)

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns the class of an image, or a window of its label map, which is changed alike."""
        if not self.has_maps:
            return self.label(i)
        change, image = self.change(i), i % len(self)

        def read(rows: Span, cols: Span) -> NDArray[Any]:
            labels: NDArray[Any] = self._whole.target(image, rows, cols, change.place)
            return labels

        fill = -1 if self.ignore is None else self.ignore
        labels = seen_through(change, self._size, read, rows, cols, float(fill), nearest=True)
        labels = labels.reshape(rows[1] - rows[0], cols[1] - cols[0])
        return np.ascontiguousarray(labels, np.int64)


def seen_through(
    change: ImageChange,
    size: Size,
    read: ReadWindow,
    rows: Span,
    cols: Span,
    fill: float = 0.0,
    nearest: bool = False,
) -> NDArray[Any]:
    """Returns a window of an image after all changes of place, (..., h, w).

    ``nearest``: values are labels, which are copied and never mixed. ``fill`` comes in at the
    borders.
    """
    check_window(rows, cols, size)
    # Back from the last change to the first: where the window lies in what the source gives.
    height, width = size
    for _ in range(change.turns):
        # A turn brings the last column to the top: row r shows column height - 1 - r.
        rows, cols = cols, (height - rows[1], height - rows[0])
        height, width = width, height
    if change.flips[0]:
        rows = (size[0] - rows[1], size[0] - rows[0])
    if change.flips[1]:
        cols = (size[1] - cols[1], size[1] - cols[0])
    made = _moved(change, size, read, rows, cols, fill, nearest)
    for axis, flips in ((-2, change.flips[0]), (-1, change.flips[1])):
        made = np.flip(made, axis) if flips else made
    turned: NDArray[Any] = np.rot90(made, change.turns, (-2, -1))
    return turned


def _moved(
    change: ImageChange,
    size: Size,
    read: ReadWindow,
    rows: Span,
    cols: Span,
    fill: float,
    nearest: bool,
) -> NDArray[Any]:
    (top, bottom), (left, right) = change.part
    inner = bottom - top, right - left

    def of_part(rows: Span, cols: Span) -> NDArray[Any]:
        return read((rows[0] + top, rows[1] + top), (cols[0] + left, cols[1] + left))

    def enlarged(rows: Span, cols: Span) -> NDArray[Any]:
        if inner == size:
            return of_part(rows, cols)
        if nearest:
            return nearest_window(of_part, inner, size, rows, cols)
        return _last(resize(lambda r, c: _first(of_part(r, c)), inner, size, rows, cols))

    if change.shift == (0, 0):
        return enlarged(rows, cols)
    # A crop about the middle, of a source that lies ``shift`` pixels further down and right.
    dy, dx = change.shift
    moved = (rows[0] - dy, rows[1] - dy), (cols[0] - dx, cols[1] - dx)
    made = crop(lambda r, c: _first(enlarged(r, c)), size, size, *moved, fill=fill)
    return _last(made)


def _coloured(pixels: NDArray[Any], change: ImageChange, augment: AugmentConfig) -> NDArray[Any]:
    # Of values from -2 to 2, each by itself, so that any window of an image has the same ones.
    made = pixels
    if augment.brightness:
        made = (made + np.float32(2)) * np.float32(change.brightness) - np.float32(2)
    if augment.contrast:
        made = made * np.float32(change.contrast)
    if augment.saturation and len(made) == 3:
        grey = sum(np.float32(w) * made[c] for c, w in enumerate(LUMINANCE))
        made = grey + np.float32(change.saturation) * (made - grey)
    if augment.hue and len(made) == 3:
        made = turned_hues(np.clip(made, np.float32(-2), np.float32(2)), change.hue)
    if made is not pixels:
        made = np.clip(made, np.float32(-2), np.float32(2))
    return made


def turned_hues(pixels: NDArray[Any], turn: float) -> NDArray[Any]:
    """Returns colours, (3, h, w), whose hue is turned by a share of the circle of colours.

    The brightest and darkest channel of a pixel keep their values, as those of HSV do.

    Source:
        torchvision, ``adjust_hue``.
    """
    top, low = pixels.max(0), pixels.min(0)
    spread = top - low
    red, green, blue = (pixels - low) / np.where(spread > 0, spread, np.float32(1))
    # Sixths of the circle from red, of the channel that is the brightest.
    hue = np.where(red == 1, green - blue, np.where(green == 1, blue - red + 2, red - green + 4))
    hue = hue.astype(np.float32) + np.float32(6 * turn)
    made = []
    for shift in (5, 3, 1):  # of red, green and blue: one line that rises, stays and falls
        at = np.mod(hue + np.float32(shift), np.float32(6))
        share = np.clip(np.minimum(at, np.float32(4) - at), np.float32(0), np.float32(1))
        made.append(top - spread * share)
    return np.stack(made)


def _first(window: NDArray[Any]) -> Pixels:
    # (C, h, w) or (h, w) -> (h, w, samples)
    return window.transpose(1, 2, 0) if window.ndim == 3 else window[:, :, None]


def _last(pixels: Pixels) -> NDArray[Any]:
    made: NDArray[Any] = pixels.transpose(2, 0, 1)
    return made
