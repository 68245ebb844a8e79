"""Opens the images that a config names, alone or as pairs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.augmented import AugmentedSource
from hires.data.georeference import Georeference
from hires.data.image_fit import Place, resize
from hires.data.image_format import Pixels, Size, Span, Window, check_window
from hires.data.source import SOURCES, PartSource, Source
from hires.data.splits import chosen


class PairSource(Source):
    """Pairs of images for super-resolution: inputs of ``size`` (height, width), larger targets.

    The target is an image of ``large``, ``scale`` times as large. The input is the target shrunk by
    bicubic interpolation whose kernel widens with the scale, as the pairs of super-resolution are
    usually made, and kept between black and white. A window of it reads only a part of the target.
    """

    def __init__(self, large: Source, size: Size, scale: int, channels: int) -> None:
        self.num_classes = channels
        self._large, self._size, self._scale = large, size, scale

    def __len__(self) -> int:
        return len(self._large)

    def name(self, i: int) -> str:
        """Returns the name of the target of pair ``i``."""
        return self._large.name(i)

    def check(self, i: int, most_bytes: int) -> int:
        """Checks the target of pair ``i``."""
        return self._large.check(i, most_bytes)

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of the input of pair ``i``, (C, h, w), from -2 (black) to 2 (white)."""
        check_window(rows, cols, self._size)

        def read(rows: Span, cols: Span) -> Pixels:
            pixels: Pixels = self._large.window(i, rows, cols).transpose(1, 2, 0)
            return pixels

        large = (self._scale * self._size[0], self._scale * self._size[1])
        small = resize(read, large, self._size, rows, cols, kernel="cubic")
        window: Window = np.ascontiguousarray(small.clip(-2, 2).transpose(2, 0, 1), np.float32)
        return window

    def stored(self, i: int) -> tuple[Size, Georeference] | None:
        """Returns what is known of the target of pair ``i``."""
        return self._large.stored(i)

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of the target of pair ``i``, (C, h, w), in pixels of the target."""
        return self._large.window(i, rows, cols)


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
    numbers = chosen(data, whole.units)
    source = whole if numbers is None else whole.keep(numbers)
    # Images are divided by the data's own numbers, so that every run divides them alike.
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
