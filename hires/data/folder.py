"""Reads windows of the images in a folder, in the size and channels of the network's input."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from hires.core.errors import RunError
from hires.data.colour import to_channels
from hires.data.image_fit import crop, resize
from hires.data.image_index import TIFF_SUFFIXES, FolderIndex
from hires.data.image_window import ImageError, Pixels, Size, Span, Window, check_window, normalised
from hires.data.tiff import CodecError, TiffImage
from hires.data.whole import WholeImage, WholeImages

log = logging.getLogger(__name__)


class FolderSource:
    """Images of a folder; a window is read when it is used."""

    def __init__(self, index: FolderIndex, size: Size, channels: int, fit: str) -> None:
        self.class_names = index.class_names
        self.num_classes = len(index.class_names)
        self._index = index
        self._size = size
        self._channels = channels
        self._fit = fit
        self._whole = WholeImages()
        self._warned = False

    def __len__(self) -> int:
        return len(self._index.paths)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self._index.labels[i]

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of an image after ``data.fit``, (C, h, w).

        Raises:
            RunError: the file cannot be read or, with ``data.fit=error``, has another size.
        """
        check_window(rows, cols, self._size)
        path = Path(self._index.paths[i])
        with _naming(path), closing(self._open(path)) as image:
            pixels = self._fitted(image, rows, cols)
            return normalised(pixels, image.peak, self._channels)

    def _open(self, path: Path) -> TiffImage | WholeImage:
        """Opens a file with the reader that reads the least of it."""
        if path.stat().st_size == 0:
            raise ValueError("the file is empty")
        if not path.name.lower().endswith(TIFF_SUFFIXES):
            return self._whole.open(path)
        try:
            return TiffImage(path)
        except CodecError as unknown:  # Pillow may decode the file, but only as a whole
            reason = unknown
        try:
            image = self._whole.open(path)
        except Exception as error:
            raise reason from error
        if not self._warned:
            log.warning("%s is decoded as a whole, not only its window: %s", path, reason)
            self._warned = True
        return image

    def _fitted(self, image: TiffImage | WholeImage, rows: Span, cols: Span) -> Pixels:
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
