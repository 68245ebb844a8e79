"""Changes training images at random, alike in every layout, and window by window.

What happens to an image follows from the seed, the epoch and its number alone. Numbers of images
count on through the epochs: image i of epoch e of n images is e * n + i.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.augmentations import Augmentation, ColourChange, PlaceChange, in_order
from hires.core.config.data_config import AugmentConfig
from hires.core.config.fields import changed_keys
from hires.data.image_fit import Place, ReadWindow
from hires.data.image_format import Size, Span, Window, check_window
from hires.data.source import Source

_STREAM = 0x617567
"""Sets these numbers apart from those that are drawn of the same seed elsewhere."""


class AugmentedSource(Source):
    """The images of a source as a training sees them, epoch after epoch."""

    def __init__(self, whole: Source, size: Size, augment: AugmentConfig, seed: int) -> None:
        self.num_classes, self.class_names = whole.num_classes, whole.class_names
        self.has_maps, self.ignore = whole.has_maps, whole.ignore
        self._whole, self._size, self._seed = whole, size, seed
        amounts = dict(changed_keys(augment))
        self._amounts = {
            name: (kind, amounts[name]) for name, kind in in_order().items() if name in amounts
        }

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
        read = functools.partial(self._whole.window, i % len(self), place=self._place(i))
        changes = self.changes(i)
        pixels = self._moved(changes, read, rows, cols, None)
        for change in changes:
            if isinstance(change, ColourChange) and (len(pixels) == 3 or not change.of_three):
                pixels = change.colours(pixels).clip(-2, 2)
        return np.ascontiguousarray(pixels, np.float32)

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns what an image has, or a window of its label map, which is changed alike."""
        if not self.has_maps:
            return self._whole.target(i % len(self), rows, cols)
        read = functools.partial(self._whole.target, i % len(self), place=self._place(i))
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
