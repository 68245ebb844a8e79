"""Reads windows of the images in a folder, in the size and channels of the network's input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from hires.core.errors import RunError
from hires.data.image_fit import crop, resize
from hires.data.image_format import ImageFile, open_image
from hires.data.image_index import FolderIndex
from hires.data.image_window import ImageError, Pixels, Size, Span, Window, check_window, normalised

LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue (ITU-R BT.601), as Pillow uses them."""


class FolderSource:
    """Images of a folder; a window is read when it is used."""

    def __init__(self, index: FolderIndex, size: Size, channels: int, fit: str) -> None:
        self.class_names = index.class_names
        self.num_classes = len(index.class_names)
        self._index = index
        self._size = size
        self._channels = channels
        self._fit = fit

    def __len__(self) -> int:
        return len(self._index.paths)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self._index.labels[i]

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of an image after ``data.fit``, (C, h, w)."""
        check_window(rows, cols, self._size)
        path = Path(self._index.paths[i])
        with _naming(path), closing(open_image(path)) as image:
            pixels = self._fitted(image, rows, cols)
            return normalised(pixels, image.peak, self._channels)

    def _fitted(self, image: ImageFile, rows: Span, cols: Span) -> Pixels:
        """Returns a window of the image at the size of the config, (h, w, samples)."""

        def read(rows: Span, cols: Span) -> Pixels:
            return to_channels(image.read(rows, cols), image.colours, self._channels)

        if image.size == self._size:
            return read(rows, cols)
        if self._fit == "error":
            (H, W), (height, width) = image.size, self._size
            raise ImageError(
                f"it has {H} x {W} pixels where image asks for {height} x {width}; use "
                f"data.fit=resize or data.fit=crop, or take it out of the data folder"
            )
        if self._fit == "crop":
            return crop(read, image.size, self._size, rows, cols, fill=image.peak / 2)
        return resize(read, image.size, self._size, rows, cols)


def to_channels(pixels: Pixels, colours: int, channels: int) -> Pixels:
    """Returns the samples that the network sees, every pixel alone.

    An image with exactly ``channels`` samples is used as it is. Otherwise alpha and other extra
    samples are dropped, colour becomes luminance for a network of one channel, and grey stays one
    sample, which ``normalised`` gives to every channel.

    Args:
        pixels: (h, w, samples), colours first.
        colours: how many of the samples are colours: 1 or 3.
        channels: channels of the network's input.
    """
    samples = pixels.shape[2]
    if samples == channels:
        return pixels
    if colours == 1:
        return pixels[:, :, :1]
    if channels == 1:
        light = np.zeros((*pixels.shape[:2], 1), np.float32)
        for c, weight in enumerate(LUMINANCE):
            light += np.multiply(pixels[:, :, c : c + 1], np.float32(weight), dtype=np.float32)
        return light
    if colours == channels:
        return pixels[:, :, :channels]
    raise ImageError(
        f"it has {samples} samples per pixel where model.channels={channels}; convert it, or set "
        f"model.channels={samples}"
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns every error into one that names the file: decoders raise nearly anything."""
    try:
        yield
    except Exception as error:
        system = error.strerror if isinstance(error, OSError) else None
        reason = " ".join((system or str(error) or type(error).__name__).split())
        has_remedy = isinstance(error, ImageError)
        remedy = "" if has_remedy else "; replace the file or take it out of the data folder"
        raise RunError(f"cannot read the image {path}: {reason}{remedy}") from error
