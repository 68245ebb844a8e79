"""Draws the images of ``data=synthetic`` in memory."""

from __future__ import annotations

from hires.data import pattern
from hires.data.image_window import Size, Span, Window, check_window, normalised


class SyntheticSource:
    """Images drawn from the seed and their number alone, a window at a time."""

    def __init__(self, num_classes: int, length: int, size: Size, channels: int, seed: int) -> None:
        self.num_classes = num_classes
        self.class_names = tuple(pattern.class_name(k, num_classes) for k in range(num_classes))
        self._length = length
        self._size = size
        self._channels = channels
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def label(self, i: int) -> int:
        """Returns the class of an image; the classes take turns."""
        return i % self.num_classes

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of an image, (C, h, w); no other pixel is computed."""
        check_window(rows, cols, self._size)
        drawn = pattern.draw(
            self.label(i), self._channels, self._size, rows, cols, seed=self._seed, index=i
        )
        return normalised(drawn.transpose(1, 2, 0), 1.0, self._channels)
