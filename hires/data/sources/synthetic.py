"""Draws the images of ``data=synthetic``, ``textures`` and ``hard``, and ``hires data make``.

A class has a colour, and stripes or a weave of its own direction and width, which can be seen in
any window of any size; an image of the class varies their phase, direction, width and brightness
and adds noise. A window is computed alone, from functions of the row and of the column.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.data.image_fit import Place
from hires.data.image_format import Size, Span, Window, check_window, normalised
from hires.data.source import SOURCES, Source

GOLDEN = 0.6180339887498949
PERIODS = (6.0, 15.0, 9.0, 24.0)

# How far each ingredient moves a value away from 0.5; together exactly 0.5.
COLOUR, STRIPES, SHADE, BRIGHTNESS, NOISE = 0.20, 0.15, 0.05, 0.04, 0.06


@SOURCES.register("synthetic")
@SOURCES.register("textures")
class SyntheticSource(Source):
    """Images drawn from the seed and their number alone, a window at a time."""

    def __init__(
        self,
        num_classes: int,
        length: int,
        size: Size,
        channels: int,
        seed: int,
        targets: str = "class",
    ) -> None:
        self.num_classes = num_classes
        self.class_names = tuple(class_name(label, num_classes) for label in range(num_classes))
        self._length, self._size, self._channels, self._seed = length, size, channels, seed
        self._targets = targets

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns ``data.length`` images of ``data.classes`` classes."""
        return cls(data.num_classes, data.length, size, channels, seed, data.targets)

    def __len__(self) -> int:
        return self._length

    def label(self, i: int) -> int:
        """Returns the class of an image; the classes take turns."""
        return i % self.num_classes

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns the class of an image, or the labels or numbers that follow from it, (C)."""
        label, size = self.label(i), self.num_classes
        after = (np.arange(size) - label) % size
        if self._targets == "class":
            return label
        return (after <= label % 2).astype(float) if self._targets == "classes" else after / size

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image, (C, h, w); no other pixel is computed."""
        check_window(rows, cols, self._size)
        label, channels = self.label(i), self._channels
        drawn = draw(label, channels, self._size, rows, cols, seed=self._seed, index=i)
        return normalised(drawn.transpose(1, 2, 0), 1.0, channels)


@SOURCES.register("hard")
class OverlappingSource(SyntheticSource):
    """Images that no network classifies without errors.

    A class is a direction of stripes; an image of it turns them by up to ``OVERLAP`` of half the
    distance to the next class. Colour, width, brightness and strong noise say nothing of the class.

        class 0   |--------|
        class 1         |--------|        directions; in the overlap half of the answers are wrong
        class 2               |--------|

    The best answers are right for 1 / OVERLAP of the images: differences between precisions then
    show in the share of right answers, as they do not where every answer is right.
    """

    OVERLAP = 1.2
    STRIPES, BRIGHTNESS, NOISE = 0.16, 0.06, 0.24
    """How far each moves a value away from 0.5; together less than 0.5."""
    PERIODS = 5.0, 11.0

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image, (C, h, w); no other pixel is computed."""
        check_window(rows, cols, self._size)
        random = np.random.Generator(np.random.PCG64([self._seed, 1, i]))
        turn = 0.5 * self.OVERLAP * random.uniform(-1, 1)
        angle = np.pi * (self.label(i) + turn) / self.num_classes
        wave = random.uniform(*self.PERIODS), random.uniform(0, 2 * np.pi), self._size, rows, cols
        plane = np.float32(self.STRIPES) * waves(angle, *wave)
        plane += noise(random, self._size, rows, cols, self.NOISE)
        tints = self.BRIGHTNESS * random.uniform(-1, 1, self._channels)
        drawn = plane[..., None] + np.asarray(0.5 + tints, np.float32)
        return normalised(drawn, 1.0, self._channels)


def class_name(label: int, num_classes: int) -> str:
    """Returns the name of a class; names sort as labels do."""
    return f"texture{label:0{len(str(num_classes - 1))}d}"


def draw(
    label: int, channels: int, size: Size, rows: Span, cols: Span, *, seed: int, index: int
) -> Window:
    """Returns a window of image ``index``, (channels, h, w), values from 0 to 1."""
    random = np.random.Generator(np.random.PCG64([seed, index]))
    hue = label * GOLDEN % 1.0  # multiples of the golden ratio keep any number of classes apart
    plane = _plane(label, np.pi * hue, random, size, rows, cols)
    brightness = 0.5 + BRIGHTNESS * random.uniform(-1, 1)
    out = np.empty((channels, *plane.shape), np.float32)
    for c in range(channels):
        tint = COLOUR * np.cos(2 * np.pi * (hue + c / max(channels, 3)))
        np.add(plane, np.float32(brightness + tint), out=out[c])
    return out


def _plane(
    label: int, angle: float, random: np.random.Generator, size: Size, rows: Span, cols: Span
) -> NDArray[np.float32]:
    """Returns what all channels share, (h, w): stripes, shade and noise about 0."""
    angle += 0.1 * random.uniform(-1, 1)
    period = PERIODS[label % len(PERIODS)] * (1 + 0.1 * random.uniform(-1, 1))
    stripes = waves(angle, period, random.uniform(0, 2 * np.pi), size, rows, cols)
    if label % 3 == 2:  # a weave: stripes cross
        across = random.uniform(0, 2 * np.pi)
        stripes *= waves(angle + np.pi / 2, period, across, size, rows, cols)
    stripes *= np.float32(STRIPES)
    # Light changes slowly from the top to the bottom of the image.
    turns = random.uniform(0.5, 1.5) * np.arange(size[0]) / size[0] + random.uniform(0, 1)
    shade = (SHADE * np.cos(2 * np.pi * turns)).astype(np.float32)
    stripes += shade[rows[0] : rows[1], None]
    stripes += noise(random, size, rows, cols)
    return stripes


def waves(
    angle: float, period: float, phase: float, size: Size, rows: Span, cols: Span
) -> NDArray[np.float32]:
    """Returns sin(a r + b c + phase), (h, w), as sin cos + cos sin of whole axes."""
    along_rows = 2 * np.pi * np.sin(angle) / period * np.arange(size[0]) + phase
    along_cols = 2 * np.pi * np.cos(angle) / period * np.arange(size[1])
    sin_r, cos_r, sin_c, cos_c = (
        wave(along).astype(np.float32)[slice(*span)]
        for along, span in ((along_rows, rows), (along_cols, cols))
        for wave in (np.sin, np.cos)
    )
    waves: NDArray[np.float32] = sin_r[:, None] * cos_c
    waves += cos_r[:, None] * sin_c
    return waves


def noise(
    random: np.random.Generator, size: Size, rows: Span, cols: Span, most: float = NOISE
) -> NDArray[np.float32]:
    """Returns uniform noise, (h, w), from -most to most.

    It is a hash of a random number per row and one per column.
    """
    keys = random.integers(0, 2**32, size=sum(size), dtype=np.uint32)
    of_rows, of_cols = keys[: size[0]], keys[size[0] :]
    mixed = of_rows[slice(*rows), None] ^ of_cols[slice(*cols)]
    mixed *= np.uint32(0x85EBCA6B)
    mixed ^= mixed >> np.uint32(15)
    mixed *= np.uint32(0xC2B2AE35)
    mixed >>= np.uint32(8)  # 24 bits, which float32 holds exactly
    drawn = mixed.astype(np.float32)
    drawn *= np.float32(2 * most / 2**24)
    drawn -= np.float32(most)
    return drawn
