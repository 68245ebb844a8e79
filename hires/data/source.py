"""Defines what a source of images is, and registers those that ``data=NAME`` chooses.

0     cols        W       A window is the part rows x cols of an image. Its numbers are bit for
+-----------------+       bit those of the same part of the whole image, whatever the window:
|     +----+      | rows  pixels go through elementwise operations that IEEE 754 rounds alike
|     |    |      |       everywhere (+ - * / on float32); sines and sums, whose rounding may
|     +----+      |       depend on the position in a vector, are taken over whole axes first.
+-----------------+ H

A data set is a module of :mod:`hires.data.sources` that registers a :class:`Source` by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.core.registry import Registry
from hires.core.units import listed
from hires.data.georeference import Georeference
from hires.data.image_fit import Place
from hires.data.image_format import Size, Span, Window

ERROR, WARNING, NOTE = "error", "warning", "note"


@dataclass
class DataFinding:
    """What stands out in some files."""

    severity: str
    text: str
    files: list[str] = field(default_factory=list)
    """The files, relative to the folder, with a reason behind a colon where each has its own."""
    key: str = "data.path"
    """Of the config, that decides it."""

    def __str__(self) -> str:
        return f"{self.text}: {listed(self.files)}" if self.files else self.text


SOURCES: Registry[type[Source]] = Registry("data")
"""``data.name`` -> its class."""


class Source:
    """Labelled images of one size, of which any window can be read alone."""

    num_classes = 0
    """Labels go from 0 to this, exclusive; of pairs the numbers of each pixel of a target."""
    class_names: tuple[str, ...] = ()
    """In the order of the labels."""
    rows: NDArray[np.float64] | None = None
    """Labels or numbers of all images, (images, classes), where no class is the target."""
    has_maps = False
    """Whether every pixel has a class of its own."""
    ignore: int | None = None
    """The value of pixels without a class."""
    reads_files = False
    """Whether it reads files below ``data.path``."""
    kept_bytes = 0
    """Memory of the images that it keeps."""

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns all images of the data, (``channels``, *``size``); reads no pixel.

        ``seed`` decides images that are made. ConfigError: ``data.path`` lacks what it needs.
        """
        raise NotImplementedError

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        return ()

    def __len__(self) -> int:
        raise NotImplementedError

    def label(self, i: int) -> int:
        """Returns the class of image ``i``; reads no pixel."""
        return 0

    def name(self, i: int) -> str:
        """Returns what names image ``i`` in results; no other image has it."""
        return str(i)

    def path(self, i: int) -> str:
        """Returns the file of image ``i``, if it has one of its own."""
        raise NotImplementedError

    def check(self, i: int, most_bytes: int) -> int:
        """Raises a RunError if image ``i`` cannot be read; returns how many bytes were decoded.

        All of it is decoded if it has at most ``most_bytes`` as floats, else it is only opened.
        """
        return 0

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a part of image ``i`` at the size of the config, from -2 (black) to 2 (white).

        ``place`` is that of its random crop (``data.fit=random_crop``); None: the middle.
        An image that cannot be read raises a RunError that names the file.
        """
        raise NotImplementedError

    def stored(self, i: int) -> tuple[Size, Georeference] | None:
        """Returns the size of image ``i`` before it is fitted, and where it lies.

        None: it was made at the size of the config.
        """
        return None

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns what the output is compared with: a class, or a part of a label map or image.

        It is an int, (h, w) of int64, (C, h, w) of float32, or labels or numbers, (C) of float64.
        """
        return self.label(i) if self.rows is None else self.rows[i]

    @property
    def units(self) -> Source:
        """What ``data.split`` divides: the images, or what they are cut from."""
        return self

    def keep(self, numbers: Sequence[int]) -> Source:
        """Returns the images of some units."""
        return PartSource(self, numbers)


LOOKED_AT = 64
"""Images whose headers say what a plan needs to know of all."""


def looked_at(source: Source) -> range:
    """Returns the numbers of some images of a source, at equal distances."""
    return range(0, len(source), max(1, -(-len(source) // LOOKED_AT)))


class WrappedSource(Source):
    """Images of another source, by other numbers."""

    def __init__(self, whole: Source) -> None:
        self.whole = whole
        self.num_classes, self.class_names = whole.num_classes, whole.class_names
        self.has_maps, self.ignore = whole.has_maps, whole.ignore

    def index(self, i: int) -> int:
        """Returns the number of image ``i`` in the whole source."""
        return i

    def __len__(self) -> int:
        return len(self.whole)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self.whole.label(self.index(i))

    def name(self, i: int) -> str:
        """Returns what names an image, the same as in the whole source."""
        return self.whole.name(self.index(i))

    def path(self, i: int) -> str:
        """Returns the file of an image."""
        return self.whole.path(self.index(i))

    def check(self, i: int, most_bytes: int) -> int:
        """Checks an image, as the whole source does."""
        return self.whole.check(self.index(i), most_bytes)

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image, (C, h, w)."""
        return self.whole.window(self.index(i), rows, cols, place)

    def stored(self, i: int) -> tuple[Size, Georeference] | None:
        """Returns what the whole source does."""
        return self.whole.stored(self.index(i))

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns the class of an image or of its pixels, or its labels or numbers."""
        return self.whole.target(self.index(i), rows, cols, place)


class PartSource(WrappedSource):
    """Some images of a source, in its order, perhaps with other numbers for its classes."""

    def __init__(
        self,
        whole: Source,
        numbers: Sequence[int] | None = None,
        labels: Sequence[int] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        """``labels`` are the new numbers of the classes, whose ``names`` are in their order."""
        super().__init__(whole)
        if labels is not None:
            self.num_classes, self.class_names = len(names), tuple(names)
        self._numbers = range(len(whole)) if numbers is None else numbers
        self._labels = None if labels is None else np.array(labels)

    def __len__(self) -> int:
        return len(self._numbers)

    def index(self, i: int) -> int:
        """Returns the number of image ``i`` in the whole source."""
        return self._numbers[i]

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        label = super().label(i)
        return label if self._labels is None else int(self._labels[label])

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Any:
        """Returns the class of an image or of its pixels, or its labels or numbers."""
        classes = self.whole.target(self._numbers[i], rows, cols, place)
        if self._labels is None:
            return classes
        if self.has_maps:
            counts = classes != self.ignore
            classes[counts] = self._labels[classes[counts]]
            return classes
        if isinstance(classes, int):
            return int(self._labels[classes])
        held, classes = classes, np.zeros(self.num_classes)
        classes[self._labels] = held
        return classes
