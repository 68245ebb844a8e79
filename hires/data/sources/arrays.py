"""Reads data sets whose images lie in one array: digits, which ship with hires, and CIFAR-10.

    digits    1797 images of 8 x 8 pixels, 17 levels of grey, 10 classes
    cifar10   the binary files of its authors below data.path: records of 1 + 3 * 32 * 32 bytes,
              label, then red, green and blue, each row by row

Source:
    E. Alpaydin, C. Kaynak, "Optical Recognition of Handwritten Digits", UCI, 1998 (CC BY 4.0), as
    in scikit-learn (BSD): the 1797 images of ``load_digits()``, as bytes. A. Krizhevsky, "Learning
    multiple layers of features from tiny images", 2009, and its page, "Binary version".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data.georeference import Georeference
from hires.data.image_fit import Place, fitted
from hires.data.image_format import Size, Span, Window, check_window, normalised
from hires.data.source import SOURCES, Source
from hires.data.sources.folder import to_channels
from hires.data.splits import cifar10_files

DIGITS = Path(__file__).with_name("digits.npz")
CIFAR10_RECORD = 1 + 3 * 32 * 32
CIFAR10_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip
Images = NDArray[np.uint8]


class ArraySource(Source):
    """Images of one size in an array, perhaps a mapped file: (N, h, w, samples)."""

    def __init__(
        self,
        images: Images,
        labels: Images,
        names: tuple[str, ...],
        peak: float,
        fit: str,
        size: Size,
        channels: int,
    ) -> None:
        """``peak`` is the value of white; ``fit``, ``size`` and ``channels`` are the network's."""
        self.num_classes, self.class_names = len(names), names
        self._images, self._labels, self._peak = images, labels.tolist(), peak
        self._fit, self._size, self._channels = fit, size, channels
        if fit == "error" and images.shape[1:3] != size:
            raise ConfigError(
                f"data.fit=error and image={list(size)}, but the images of the data have "
                f"{images.shape[1]} x {images.shape[2]} pixels; use data.fit=resize"
            )

    def __len__(self) -> int:
        return len(self._images)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return int(self._labels[i])

    def stored(self, i: int) -> tuple[Size, Georeference]:
        """Returns the size of all images of the array."""
        height, width = self._images.shape[1:3]
        return (height, width), Georeference()

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image after ``data.fit``, (C, h, w)."""
        check_window(rows, cols, self._size)
        image = self._images[i]
        height, width, colours = image.shape

        def read(rows: Span, cols: Span) -> NDArray[Any]:
            return to_channels(image[slice(*rows), slice(*cols)], colours, self._channels)

        grey = self._peak / 2
        sizes = (height, width), self._size
        pixels = fitted(read, *sizes, self._fit, rows, cols, fill=grey, place=place)
        return normalised(pixels, self._peak, self._channels)


@SOURCES.register("digits")
class Digits(ArraySource):
    """The handwritten digits that ship with hires."""

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns all of them."""
        with np.load(DIGITS) as arrays:  # no pickle: numpy's default
            images, labels = arrays["images"], arrays["labels"]
        names = tuple(map(str, range(10)))
        return cls(images[..., None], labels, names, 16.0, data.fit, size, channels)


@SOURCES.register("cifar10")
class Cifar10(ArraySource):
    """The images of ``data.split`` in CIFAR-10's binary files."""

    reads_files = True

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns them; ConfigError: a file is missing, has half a record, or a label above 9."""
        parts = [records_in(path) for path in cifar10_files(data)]
        # One file is mapped; several are read: 180 MB of all six.
        records = parts[0] if len(parts) == 1 else np.concatenate(parts)
        images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        source = cls(images, records[:, 0], CIFAR10_CLASSES, 255.0, data.fit, size, channels)
        source.kept_bytes = 0 if len(parts) == 1 else records.nbytes
        return source

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        return [*map(str, cifar10_files(data))]


def records_in(path: Path) -> Images:
    """Returns the records of a file, (N, 3073); ConfigError: half a record, or a label above 9."""
    try:
        num_bytes = path.stat().st_size
        if not num_bytes or num_bytes % CIFAR10_RECORD:
            raise ConfigError(
                f"{path} has {num_bytes} bytes, and a record of CIFAR-10 has {CIFAR10_RECORD}: it "
                f"is truncated, or no file of the binary version; download it again"
            )
        records = np.memmap(
            path, np.uint8, "r", shape=(num_bytes // CIFAR10_RECORD, CIFAR10_RECORD)
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    wrong = np.flatnonzero(records[:, 0] >= len(CIFAR10_CLASSES))
    if len(wrong):
        raise ConfigError(
            f"{path}: record {wrong[0]} has the label {records[wrong[0], 0]}, and CIFAR-10 has the "
            f"classes 0 to 9; it is damaged, or of another data set"
        )
    return records
