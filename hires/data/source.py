"""Opens the images that a config names, alone or as pairs for super-resolution.

The target of a pair is an image at ``scale`` times the size of the input. The input is the target
shrunk by bicubic interpolation whose kernel widens with the scale, as the pairs of super-resolution
are usually made, and kept between black and white. A window of the input reads only the part of the
target that it depends on.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hires.core.config.run_config import DataConfig, RunConfig
from hires.core.errors import ConfigError
from hires.data.folder import FolderSource
from hires.data.image_fit import resize
from hires.data.image_index import CONTENTS, scan
from hires.data.image_window import Pixels, Size, Source, Span, Window, check_window
from hires.data.synthetic import SyntheticSource


def open_data(config: RunConfig) -> Source | PairSource:
    """Returns what a run learns from: images with classes, or pairs of images; reads no pixel.

    Raises:
        ConfigError: as for :func:`open_source`.
    """
    channels = config.model.channels
    if config.target_size is None:
        return open_source(config.data, config.image, channels, config.seed)
    large = open_source(config.data, config.target_size, channels, config.seed)
    return PairSource(large, (config.height, config.width), config.model.scale, channels)


def open_source(data: DataConfig, image: Sequence[int], channels: int, seed: int) -> Source:
    """Returns the images that the config names; reads no pixel.

    Args:
        data: the config group ``data``.
        image: [height, width] that every image is given.
        channels: channels that every image is given.
        seed: decides the images of ``data=synthetic``.

    Raises:
        ConfigError: ``data.name`` is unknown, or ``data.path`` is no folder with one sub-folder of
            images per class, or with images for ``data=pairs``.
    """
    size = (image[0], image[1])
    if data.name == "synthetic":
        return SyntheticSource(data.classes, data.length, size, channels, seed)
    if data.name in CONTENTS:
        return FolderSource(scan(data.path, data.name), size, channels, data.fit)
    raise ConfigError(f"data={data.name!r} is unknown; choose one of synthetic, folder, pairs")


class PairSource:
    """Pairs of images, the targets from ``large``, the inputs of ``size`` (height, width)."""

    def __init__(self, large: Source, size: Size, scale: int, channels: int) -> None:
        self.num_classes = channels
        """Numbers that the network returns for every pixel."""
        self._large = large
        self._size = size
        self._scale = scale

    def __len__(self) -> int:
        return len(self._large)

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of the input of pair ``i``, (C, h, w), from -2 (black) to 2 (white)."""
        check_window(rows, cols, self._size)

        def read(rows: Span, cols: Span) -> Pixels:
            pixels: Pixels = self._large.window(i, rows, cols).transpose(1, 2, 0)
            return pixels

        large = (self._scale * self._size[0], self._scale * self._size[1])
        small = resize(read, large, self._size, rows, cols, kernel="cubic")
        made: Window = np.ascontiguousarray(small.clip(-2, 2).transpose(2, 0, 1), np.float32)
        return made

    def target(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of the target of pair ``i``, (C, h, w), in pixels of the target."""
        return self._large.window(i, rows, cols)
