"""Lists the images of a folder and reads windows of them, in the size and channels of the network.

``data=folder`` has one sub-folder per class; images may lie in sub-folders of these. The images of
``data=pairs`` may lie anywhere below the folder. Names are sorted character by character, so every
rank and every machine numbers the images alike.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hires.core.errors import ConfigError, RunError
from hires.data.image_fit import crop, resize
from hires.data.image_format import FORMATS, ImageFile, open_image, patterns, suffix_of
from hires.data.image_window import ImageError, Pixels, Size, Span, Window, check_window, normalised

log = logging.getLogger(__name__)

MANIFEST = ".hires-data.json"
"""Lies in a folder that ``hires data make`` has finished."""
UNFINISHED = ".hires-data.unfinished.json"
"""Lies in a folder while ``hires data make`` fills it."""

CONTENTS = {"folder": "one sub-folder per class", "pairs": "images"}
"""``data.name`` -> what its folder holds."""
LUMINANCE = (0.299, 0.587, 0.114)
"""Weights of red, green and blue (ITU-R BT.601), as Pillow uses them."""


@dataclass(frozen=True)
class FolderIndex:
    """The images of a folder."""

    class_names: tuple[str, ...]
    """Sub-folders in the order of their names; the place is the label."""
    paths: tuple[str, ...]
    """All images, class by class; plain strings, because there may be millions."""
    labels: tuple[int, ...]
    num_ignored: int
    """Files that are no images."""


def scan(path: str | None, data: str = "folder") -> FolderIndex:
    """Returns the images of the folder ``data.path``; those of ``pairs`` are one class.

    Raises:
        ConfigError: the folder is missing, unfinished, or has no classes or no images.
    """
    try:
        root = _root(path, data)
        if data == "pairs":
            names, listed = ["images"], [_images(root)]
        else:
            names = sorted(e.name for e in root.iterdir() if e.is_dir() and _visible(e.name))
            listed = [_images(root / name) for name in names]
    except OSError as error:
        raise ConfigError(
            f"data.path={path}: {error.filename or path} cannot be listed ({error.strerror}); "
            f"make it readable"
        ) from error
    _check_classes(root, data, names, [images for images, _ in listed])
    num_ignored = sum(ignored for _, ignored in listed)
    if num_ignored:
        log.info("%s: %d files that are no images are ignored", root, num_ignored)
    return FolderIndex(
        tuple(names),
        tuple(image for images, _ in listed for image in images),
        tuple(label for label, (images, _) in enumerate(listed) for _ in images),
        num_ignored,
    )


def _root(path: str | None, data: str) -> Path:
    contents = CONTENTS[data]
    if not path:
        raise ConfigError(f"data={data} needs data.path=FOLDER, a folder with {contents}")
    root = Path(path).expanduser()
    if not root.exists():
        raise ConfigError(
            f"data.path={path} does not exist; give a folder with {contents}, or write one with "
            f"`hires data make {path}`"
        )
    if not root.is_dir():
        raise ConfigError(f"data.path={path} is a file; give the folder that holds {contents}")
    if (root / UNFINISHED).exists():
        raise ConfigError(
            f"data.path={path} was not finished; repeat the `hires data make` that writes it, "
            f"which goes on where it stopped"
        )
    return root


def _images(folder: Path) -> tuple[list[str], int]:
    """Returns the images below a folder in order of name, and the number of other files."""

    def refuse(error: OSError) -> None:  # os.walk would ignore it
        raise error

    images, num_ignored = [], 0
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(filter(_visible, folders))  # os.walk visits them in this order
        for name in sorted(filter(_visible, files)):
            if suffix_of(name) in FORMATS:
                images.append(f"{parent}/{name}")
            else:
                num_ignored += 1
    return images, num_ignored


def _check_classes(root: Path, data: str, names: list[str], listed: list[list[str]]) -> None:
    if not names:
        loose = any(suffix_of(e.name) in FORMATS for e in root.iterdir())
        raise ConfigError(
            f"data.path={root} holds {'images but ' if loose else ''}no sub-folders; put the "
            f"images of each class into a sub-folder named after the class"
        )
    empty = [name for name, images in zip(names, listed, strict=True) if not images]
    if len(empty) == len(names):
        below = "" if data == "pairs" else f" below its {len(names)} sub-folders"
        raise ConfigError(
            f"data.path={root} holds no images{below}; images are files named {patterns()}"
        )
    if empty:
        more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
        raise ConfigError(
            f"data.path={root}: the class {empty[0]!r}{more} has no images; add some "
            f"({patterns()}) or remove the sub-folder"
        )


def _visible(name: str) -> bool:
    """Whether a name is not hidden; systems leave hidden files behind."""
    return not name.startswith(".")


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
