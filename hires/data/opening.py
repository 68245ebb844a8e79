"""Opens the images that a config names: as they are, changed at random, or as pairs.

What happens to a training image follows from the seed, the epoch and its number alone, alike in
every layout and window by window. Numbers of images count on through the epochs: image i of epoch e
of n images is e * n + i.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.augmentations import Augmentation, ColourChange, PlaceChange, in_order
from hires.core.config.data_config import AugmentConfig, DataConfig
from hires.core.config.fields import changed_keys
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.image_fit import Place, ReadWindow, resize
from hires.data.image_format import Pixels, Size, Span, Window, check_window
from hires.data.source import SOURCES, PartSource, Source, WrappedSource
from hires.data.splits import chosen

_STREAM = 0x617567
"""Sets these numbers apart from those that are drawn of the same seed elsewhere."""


class AugmentedSource(WrappedSource):
    """The images of a source as a training sees them, epoch after epoch."""

    def __init__(self, whole: Source, size: Size, augment: AugmentConfig, seed: int) -> None:
        super().__init__(whole)
        self._size, self._seed = size, seed
        amounts = dict(changed_keys(augment))
        self._amounts = {
            name: (kind, amounts[name]) for name, kind in in_order().items() if name in amounts
        }

    def index(self, i: int) -> int:
        """Returns the number of image ``i`` in its epoch."""
        return i % len(self)

    def changes(self, i: int) -> list[Augmentation]:
        """Returns what happens to an image, in this order."""
        return [
            kind(amount, self._size, self._random(i, name))
            for name, (kind, amount) in self._amounts.items()
        ]

    def _place(self, i: int) -> Place:
        """Returns where an image is cropped, if larger ones are cropped at random."""
        down, right = self._random(i, "random_crop").random(2).tolist()
        return down, right

    def _random(self, i: int, name: str) -> np.random.Generator:
        epoch, image = divmod(i, len(self))
        words = [self._seed, _STREAM, epoch, image, zlib.crc32(name.encode())]
        return np.random.Generator(np.random.PCG64(words))

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of a changed image, (C, h, w), from -2 (black) to 2 (white)."""
        read = functools.partial(self.whole.window, self.index(i), place=self._place(i))
        changes = self.changes(i)
        pixels = self._moved(changes, read, rows, cols, None)
        for change in changes:
            if isinstance(change, ColourChange) and (len(pixels) == 3 or not change.of_three):
                pixels = change.colours(pixels).clip(-2, 2)
        return np.ascontiguousarray(pixels, np.float32)

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns what an image has, or a window of its label map, which is changed alike."""
        if not self.has_maps:
            return self.whole.target(self.index(i), rows, cols)
        read = functools.partial(self.whole.target, self.index(i), place=self._place(i))
        fill = -1 if self.ignore is None else self.ignore
        labels = self._moved(self.changes(i), read, rows, cols, float(fill))
        return np.ascontiguousarray(labels, np.int64)

    def _moved(
        self,
        changes: list[Augmentation],
        read: ReadWindow,
        rows: Span,
        cols: Span,
        label_fill: float | None,
    ) -> NDArray[Any]:
        """Returns a window of an image after all changes of place, (..., h, w)."""
        check_window(rows, cols, self._size)
        for change in changes:  # each reads the one before it
            if isinstance(change, PlaceChange):
                read = functools.partial(change.window, read, label_fill=label_fill)
        return read(rows, cols)


class PairSource(WrappedSource):
    """Pairs of images for super-resolution: inputs of ``size`` (height, width), larger targets.

    The target is an image of ``large``, ``scale`` times as large. The input is the target shrunk by
    bicubic interpolation whose kernel widens with the scale, as the pairs of super-resolution are
    usually made, and kept between black and white. A window of it reads only a part of the target.
    """

    def __init__(self, large: Source, size: Size, scale: int, channels: int) -> None:
        super().__init__(large)
        self.num_classes, self.class_names = channels, ()
        self._size, self._scale = size, scale

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of the input of pair ``i``, (C, h, w), from -2 (black) to 2 (white)."""
        check_window(rows, cols, self._size)

        def read(rows: Span, cols: Span) -> Pixels:
            pixels: Pixels = self.whole.window(i, rows, cols).transpose(1, 2, 0)
            return pixels

        large = (self._scale * self._size[0], self._scale * self._size[1])
        small = resize(read, large, self._size, rows, cols, kernel="cubic")
        window: Window = np.ascontiguousarray(small.clip(-2, 2).transpose(2, 0, 1), np.float32)
        return window

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of the target of pair ``i``, (C, h, w), in pixels of the target."""
        return self.whole.window(i, rows, cols)


def open_data(config: RunConfig) -> Source:
    """Returns what a run learns from; errors are those of :func:`open_source`."""
    channels, size = config.model.channels, config.fitted_size
    source = open_source(config.data, size, channels, config.seed)
    if config.augments:
        source = AugmentedSource(source, size, config.augment, config.seed)
    if not config.has_pairs:
        return source
    return PairSource(source, (config.height, config.width), config.model.scale, channels)


def open_source(data: DataConfig, image: Sequence[int], channels: int, seed: int) -> Source:
    """Returns the images that the config names; reads no pixel.

    Every image is given the size ``image``, [height, width], and as many ``channels``; ``seed``
    decides the images that are made.

    Raises:
        ConfigError: ``data.name`` is unknown, or ``data.path`` does not hold what it needs.
    """
    if data.bands is not None and len(data.bands) != channels:
        raise ConfigError(
            f"data.bands={data.bands} are {len(data.bands)} where model.channels={channels}; name "
            f"as many, or set model.channels={len(data.bands)}"
        )
    whole = SOURCES[data.name].open(data, (image[0], image[1]), channels, seed)
    _name_classes(whole, data)
    # Images are divided by the data's own numbers, so that every run divides them alike.
    numbers = chosen(data, whole.units)
    source = whole if numbers is None else whole.keep(numbers)
    return source if data.order is None or not data.has_labels else _ordered(source, data)


def _ordered(source: Source, data: DataConfig) -> Source:
    """Returns a source whose labels are numbers in an order of names; ConfigError: one has none."""
    order = data.order or []
    if data.targets == "numbers" and {*order} != {*source.class_names}:
        raise ConfigError(
            f"data.order={','.join(order)} must name the numbers of the data, which are "
            f"{','.join(source.class_names)}: give data.labels these columns"
        )
    missing = [name for name in source.class_names if name not in order]
    if missing or len({*order}) < len(order):
        raise ConfigError(
            f"data.order={','.join(order)} must have each class of the data once, and has no "
            f"{', '.join(missing) or 'name for several'}; the data has "
            f"{','.join(source.class_names)}"
        )
    if source.has_maps and source.ignore is not None and 0 <= source.ignore < len(order):
        raise ConfigError(
            f"data.ignore={source.ignore} is also the number of the class {order[source.ignore]} "
            f"in data.order; give pixels without a label another value, as data.ignore=255"
        )
    return PartSource(
        source, labels=[order.index(name) for name in source.class_names], names=order
    )


def _name_classes(source: Source, data: DataConfig) -> None:
    """Gives the classes of a source the names of the config; ConfigError: they do not fit it."""
    if not data.has_labels:  # there is one class for all of them, which means nothing
        source.num_classes, source.class_names = 0, ()
    elif data.names is not None and len(data.names) != source.num_classes:
        raise ConfigError(
            f"data.names has {len(data.names)} names, and the data {source.num_classes} classes; "
            f"name them all, or leave data.names out"
        )
    if data.names is not None:
        source.num_classes, source.class_names = len(data.names), tuple(data.names)
