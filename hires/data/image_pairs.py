"""Makes pairs for super-resolution from single images: a small input and its large target.

The target is an image at ``scale`` times the size of the input. The input is the target shrunk by
bicubic interpolation whose kernel widens with the scale, as the pairs of super-resolution are
usually made, and kept between black and white. A window of the input reads only the part of the
target that it depends on.
"""

from __future__ import annotations

import numpy as np

from hires.data.image_fit import resize
from hires.data.image_window import Pixels, Size, Source, Span, Window, check_window


class PairSource:
    """Pairs of images; a window is computed when it is used.

    Args:
        large: gives the targets.
        size: (height, width) of the inputs.
        scale: how many times larger the targets are.
        channels: of both.
    """

    def __init__(self, large: Source, size: Size, scale: int, channels: int) -> None:
        self.num_classes = channels
        """Numbers that the network returns for every pixel."""
        self._large = large
        self._size = size
        self._scale = scale

    def __len__(self) -> int:
        return len(self._large)

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of the input of pair ``i``, (C, h, w), from -2 (black) to 2 (white).

        Raises:
            RunError: the image cannot be read; the message names the file.
        """
        check_window(rows, cols, self._size)

        def read(rows: Span, cols: Span) -> Pixels:
            pixels: Pixels = self._large.window(i, rows, cols).transpose(1, 2, 0)
            return pixels

        large = (self._scale * self._size[0], self._scale * self._size[1])
        small = resize(read, large, self._size, rows, cols, kernel="cubic")
        made: Window = np.ascontiguousarray(small.clip(-2, 2).transpose(2, 0, 1), np.float32)
        return made

    def target(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of the target of pair ``i``, (C, h, w), in pixels of the target.

        Raises:
            RunError: the image cannot be read; the message names the file.
        """
        return self._large.window(i, rows, cols)
