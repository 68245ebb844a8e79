"""Lists the images of a folder and reads windows of them, in the size and channels of the network.

Images may lie in sub-folders of the folder of their class, those of ``data=pairs`` anywhere. Names
are sorted character by character, so every rank and every machine numbers the images alike.
"""

from __future__ import annotations

import itertools
import logging
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError, RunError
from hires.core.units import listed
from hires.data.georeference import Georeference
from hires.data.image_fit import Place, fitted
from hires.data.image_format import (
    FORMATS,
    LUMINANCE,
    ImageError,
    ImageFile,
    Pixels,
    Size,
    Span,
    Window,
    check_window,
    normalised,
    open_image,
    suffix_of,
)
from hires.data.source import SOURCES, Source
from hires.data.splits import part_of

log = logging.getLogger(__name__)

MANIFEST = ".hires-data.json"
"""Lies in a folder that ``hires data make`` has finished."""

CONTENTS = {"folder": "one sub-folder per class", "pairs": "images", "images": "images"}
"""``data.name`` -> what its folder holds."""


@dataclass(frozen=True)
class FolderIndex:
    """The images of a folder."""

    class_names: tuple[str, ...]
    """Sub-folders in the order of their names; the place is the label."""
    paths: tuple[str, ...]
    """All images, class by class; plain strings, because there may be millions."""
    labels: tuple[int, ...]
    root: str = ""
    """Folder below which they lie."""


def scan(path: str | None, data: str = "folder") -> FolderIndex:
    """Returns the images of the folder ``data.path``; those of ``pairs`` are one class.

    Raises:
        ConfigError: the folder is missing, or has no classes or no images.
    """
    images, ignored = listing(path, data)
    check_classes(Path(path or "").expanduser(), data, images)
    paths = tuple(itertools.chain(*images.values()))
    if ignored:
        log.info("%s: %d files that are no images are ignored", path, len(ignored))
    labels = tuple(label for label, paths in enumerate(images.values()) for _ in paths)
    return FolderIndex(tuple(images), paths, labels, path or "")


def listing(path: str | None, data: str = "folder") -> tuple[dict[str, list[str]], list[str]]:
    """Returns the images of each class of a folder, which may be none, and all other files.

    Raises:
        ConfigError: the folder is missing or cannot be listed.
    """
    with listed_folder(path, data, CONTENTS[data]) as root:
        folders = {"images": root}
        if data == "folder":
            entries = sorted(filter(lambda entry: _visible(entry.name), root.iterdir()))
            folders = {entry.name: entry for entry in entries if entry.is_dir()}
        files = {name: visible_files(folder) for name, folder in folders.items()}
    images = {name: [*filter(_is_image, paths)] for name, paths in files.items()}
    others = [file for paths in files.values() for file in paths if not _is_image(file)]
    return images, others


@contextmanager
def listed_folder(path: str | None, data: str, contents: str) -> Iterator[Path]:
    """Yields the folder ``data.path``; ConfigError: it is none, or cannot be listed."""
    if not path:
        raise ConfigError(f"data={data} needs data.path=FOLDER, a folder with {contents}")
    root = Path(path).expanduser()
    try:
        if not root.exists():
            raise ConfigError(
                f"data.path={path} does not exist; give a folder with {contents}, or write one "
                f"with `hires data make {path}`"
            )
        if not root.is_dir():
            raise ConfigError(f"data.path={path} is a file; give the folder that holds {contents}")
        yield root
    except OSError as error:
        raise ConfigError(
            f"data.path={path}: {error.filename or path} cannot be listed ({error.strerror}); "
            f"make it readable"
        ) from error


def visible_files(folder: Path) -> list[str]:
    """Returns the visible files below a folder in order of name; OSError: it cannot be listed."""

    def refuse(error: OSError) -> None:  # os.walk would ignore it
        raise error

    found = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = sorted(filter(_visible, folders))  # os.walk visits them in this order
        found += [f"{parent}/{name}" for name in sorted(filter(_visible, files))]
    return found


def check_classes(root: Path, data: str, images: dict[str, list[str]]) -> None:
    """Raises a ConfigError if there are no classes, or a class has no images."""
    patterns = ", ".join(f"*{suffix}" for suffix in FORMATS)
    if not images:
        raise ConfigError(
            f"data.path={root} holds no sub-folders; put the images of each class into a "
            f"sub-folder named after the class"
        )
    empty = [name for name, paths in images.items() if not paths]
    if len(empty) == len(images):
        below = "" if data == "pairs" else f" below its {len(images)} sub-folders"
        raise ConfigError(
            f"data.path={root} holds no images{below}; images are files named {patterns}"
        )
    if empty:
        raise ConfigError(
            f"data.path={root}: the class {listed(list(map(repr, empty)), 1)} has no images; add "
            f"some ({patterns}) or remove the sub-folder"
        )


def _visible(name: str) -> bool:
    """Whether a name is not hidden; systems leave hidden files behind."""
    return not name.startswith(".")


def _is_image(path: str) -> bool:
    return suffix_of(path) in FORMATS


@SOURCES.register("folder")
@SOURCES.register("pairs")
class FolderSource(Source):
    """Images of a folder; a window is read when it is used."""

    reads_files = True

    def __init__(self, index: FolderIndex, data: DataConfig, size: Size, channels: int) -> None:
        self.num_classes, self.class_names = len(index.class_names), index.class_names
        self._index, self._data, self._size, self._channels = index, data, size, channels

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns the images of ``data.path``, or of its part."""
        return cls(scan(part_of(data), data.name), data, size, channels)

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        return scan(part_of(data), data.name).paths

    def __len__(self) -> int:
        return len(self._index.paths)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self._index.labels[i]

    def name(self, i: int) -> str:
        """Returns the path of an image in its folder."""
        return os.path.relpath(self._index.paths[i], Path(self._index.root).expanduser())

    def path(self, i: int) -> str:
        """Returns the file of an image."""
        return self._index.paths[i]

    def check(self, i: int, most_bytes: int) -> int:
        """Checks an image, as :meth:`Source.check`."""
        with self._opened(i) as image:
            self._check_size(image)
            image.check_complete()
            height, width = image.size
            num_bytes = 4 * self._channels * height * width
            if num_bytes > most_bytes:
                return 0
            pixels = image.read((0, height), (0, width))
            to_channels(pixels, image.colours, self._channels, self._data.bands)
            return num_bytes

    def stored(self, i: int) -> tuple[Size, Georeference]:
        """Returns what the header of an image says of its size and place."""
        with self._opened(i) as image:
            return image.size, image.facts.reference

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image after ``data.fit``, (C, h, w)."""
        check_window(rows, cols, self._size)
        with self._opened(i) as image:
            pixels = self._fitted(image, rows, cols, place)
            return normalised(pixels, image.peak, self._channels)

    @contextmanager
    def _opened(self, i: int) -> Iterator[ImageFile]:
        # Errors name the file.
        path = Path(self._index.paths[i])
        with naming(path, self._data), closing(open_image(path, self._data.max_pixels)) as image:
            yield image

    def _fitted(self, image: ImageFile, rows: Span, cols: Span, place: Place | None) -> Pixels:
        """Returns a window of the image at the size of the config, (h, w, samples)."""

        def read(rows: Span, cols: Span) -> Pixels:
            pixels = image.read(rows, cols)
            return to_channels(pixels, image.colours, self._channels, self._data.bands)

        self._check_size(image)
        fill = image.peak / 2
        spans = rows, cols
        return fitted(read, image.size, self._size, self._data.fit, *spans, fill=fill, place=place)

    def _check_size(self, image: ImageFile) -> None:
        if image.size != self._size and self._data.fit == "error":
            (H, W), (height, width) = image.size, self._size
            raise ImageError(
                f"it has {H} x {W} pixels where image asks for {height} x {width}; use "
                f"data.fit=resize or data.fit=crop, or take it out of the data folder"
            )


def to_channels(
    pixels: Pixels, colours: int, channels: int, bands: Sequence[int] | None = None
) -> Pixels:
    """Returns pixels with the samples that a network of so many input channels sees.

    They are the ``bands``, numbers from 1, where a config names them. An image with exactly
    ``channels`` samples is used as it is. Otherwise the samples after the ``colours`` are dropped,
    three colours become luminance for a network of one channel, and grey stays one sample, which
    ``normalised`` gives to every channel.
    """
    samples = pixels.shape[2]
    if bands is not None:
        if max(bands) > samples:
            raise ImageError(
                f"it has {samples} samples per pixel, and data.bands={[*bands]} names number "
                f"{max(bands)}; name those that it has"
            )
        return pixels[:, :, [band - 1 for band in bands]]
    if samples == channels:
        return pixels
    if colours == 1:
        return pixels[:, :, :1]
    if channels == 1 and colours == len(LUMINANCE):
        light = np.zeros((*pixels.shape[:2], 1), np.float32)
        for c, weight in enumerate(LUMINANCE):
            light += np.multiply(pixels[:, :, c : c + 1], np.float32(weight), dtype=np.float32)
        return light
    if colours == channels:
        return pixels[:, :, :channels]
    raise ImageError(
        f"it has {colours} samples per pixel where model.channels={channels}; name those to take, "
        f"as data.bands={[*range(1, min(channels, colours) + 1)]}, or set model.channels={colours}"
    )


@contextmanager
def naming(path: Path, data: DataConfig) -> Iterator[None]:
    """Turns every error into one that names the file: decoders raise nearly anything."""
    try:
        yield
    except Exception as error:
        reason = reason_of(error)
        if not isinstance(error, ImageError):
            reason += "; replace the file or take it out of the data folder"
        words = f"data={data.name} {shlex.quote(f'data.path={data.path}')}"
        reason += f" (`hires data check {words}` and the run's other keys list all such files)"
        raise RunError(f"cannot read the image {path}: {reason}") from error


def reason_of(error: Exception) -> str:
    """Returns on one line why a file cannot be read."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    system = error.strerror if isinstance(error, OSError) else None
    return " ".join((system or str(error) or type(error).__name__).split())
