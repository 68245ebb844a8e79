"""Reads images with label maps: beside each image a file with a class for each of its pixels.

    data.path/images/a/1.jpg     data.images=images/*      the star is a name, without its suffix
    data.path/masks/a/1.png      data.masks=masks/*        here a/1

A label map is a PNG or BMP (grey, or with a palette, whose numbers count), or a TIFF of one sample
a pixel, in a compression that keeps it. ``data.values`` are the values of the classes,
``data.ignore`` is that of pixels without a label.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.core.units import listed
from hires.data.image_fit import Place, ReadWindow, crop, nearest_window
from hires.data.image_format import (
    FORMATS,
    ImageError,
    Size,
    Span,
    check_window,
    open_image,
    suffix_of,
)
from hires.data.slide_file import TIFF
from hires.data.source import SOURCES, Source
from hires.data.sources.folder import (
    FolderIndex,
    FolderSource,
    listed_folder,
    naming,
    visible_files,
)
from hires.data.splits import own_parts, part_of

Labels = NDArray[np.int64]
"""(h, w): the class of each pixel, or ``data.ignore``."""
_MODES = ("1", "L", "P", "I", "I;16", "I;16B")
"""Of Pillow, with one number a pixel."""


def mask_pairs(data: DataConfig, path: str | None) -> tuple[FolderIndex, tuple[str, ...]]:
    """Returns the images of a folder, and the label map of each; ConfigError: one is missing."""
    contents = f"images in {data.images} and their label maps in {data.masks}"
    with listed_folder(path, "masks", contents) as root:
        files = [str(Path(file).relative_to(root)) for file in visible_files(root)]
    files = [file for file in files if suffix_of(Path(file).name) in FORMATS]
    images, masks = _by_name(data.images, files), _by_name(data.masks, files)
    if not images and data.split_file is None and (parts := own_parts(path)):
        names = " and ".join(part.name for part in parts.values())
        raise ConfigError(
            f"data.path={path} has its images in {names}; name those to use, as data.split=train"
        )
    if not images:
        raise ConfigError(
            f"data.path={path} holds no images named data.images={data.images}; the star stands "
            f"for a name without suffix, as in images/*"
        )
    alone = [name for name in images if name not in masks]
    if alone:
        raise ConfigError(
            f"data.path={path}: the image {listed([images[name] for name in alone], 1)} has no "
            f"label map {data.masks.replace('*', alone[0])}; add it, or set data.masks"
        )
    paths = tuple(str(root / images[name]) for name in images)
    index = FolderIndex(("images",), paths, (0,) * len(paths), str(root))
    return index, tuple(str(root / masks[name]) for name in images)


def _by_name(pattern: str, files: list[str]) -> dict[str, str]:
    # What the star of a pattern stands for -> the file.
    before, star, after = pattern.partition("*")
    if not star or "*" in after:
        raise ConfigError(f"{pattern!r} needs one star, for the names of files, as in images/*")
    found: dict[str, str] = {}
    for file in files:
        suffix = "" if suffix_of(after) in FORMATS else Path(file).suffix
        end = after + suffix
        inside = file[len(before) : len(file) - len(end)]
        if file.startswith(before) and file.endswith(end) and inside:
            found.setdefault(inside, file)
    return dict(sorted(found.items()))


@SOURCES.register("masks")
class MaskSource(FolderSource):
    """Images, and the classes of their pixels."""

    has_maps = True

    def __init__(self, data: DataConfig, path: str | None, size: Size, channels: int) -> None:
        index, self._masks = mask_pairs(data, path)
        super().__init__(index, data, size, channels)
        if data.classes is None and data.values is None:
            with naming(Path(self._masks[0]), data):
                size = mask_size(self._masks[0], data.max_pixels)
                stored = _stored(self._masks[0], data.max_pixels, (0, size[0]), (0, size[1]))
            raise ConfigError(
                f"data=masks needs data.classes=NUMBER, or data.values=[...] with the value of "
                f"each class; {self._masks[0]} alone has the values {_values_in(stored)}"
            )
        self.num_classes = data.num_classes
        self.class_names = tuple(map(str, range(data.num_classes)))
        self.ignore = data.ignore

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns the images of ``data.path``, or of its part, with their label maps."""
        return cls(data, part_of(data), size, channels)

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        index, masks = mask_pairs(data, part_of(data))
        return (*index.paths, *masks)

    def mask(self, i: int) -> str:
        """Returns the file of a label map."""
        return self._masks[i]

    def check(self, i: int, most_bytes: int) -> int:
        """Checks an image and its label map, as :meth:`Source.check`."""
        num_bytes = super().check(i, most_bytes)
        with self._label_map(i) as (mask, size):
            if num_bytes:
                labels_of(mask, size, self._data)
        return num_bytes

    def target(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Labels:
        """Returns a window of a label map after ``data.fit``, (h, w)."""
        check_window(rows, cols, self._size)
        with self._label_map(i) as (mask, size):

            def read(rows: Span, cols: Span) -> NDArray[Any]:
                return labels_of(mask, size, self._data, rows, cols)

            if size == self._size:
                labels = read(rows, cols)
            elif self._data.crops:
                labels = self._cropped(read, size, rows, cols, place)
            else:
                labels = nearest_window(read, size, self._size, rows, cols)
            return labels.astype(np.int64)

    @contextmanager
    def _label_map(self, i: int) -> Iterator[tuple[str, Size]]:
        # The path of a label map that fits its image, with its size; errors name it.
        mask, path = self._masks[i], Path(self._index.paths[i])
        with naming(Path(mask), self._data):
            size = mask_size(mask, self._data.max_pixels)
            with closing(open_image(path, self._data.max_pixels)) as image:
                expected = image.size
            if expected != size:
                raise ImageError(
                    f"a label map of {size[0]} x {size[1]} pixels, and its image {path.name} has "
                    f"{expected[0]} x {expected[1]}; make one for each pixel"
                )
            require_cover(size, self._size, self._data)
            yield mask, size

    def _cropped(
        self, read: ReadWindow, size: Size, rows: Span, cols: Span, place: Place | None
    ) -> NDArray[Any]:
        # At the place of the image.
        fill = -1 if self.ignore is None else self.ignore
        place = place if self._data.fit == "random_crop" else None
        spans = self._size, rows, cols
        labels = crop(lambda r, c: read(r, c)[:, :, None], size, *spans, fill=fill, place=place)
        return labels[:, :, 0]


def require_cover(size: Size, wanted: Size, data: DataConfig) -> None:
    """Refuses an image that a crop sets in grey, if pixels without a label have no value."""
    smaller = size[0] < wanted[0] or size[1] < wanted[1]
    if smaller and data.crops and data.ignore is None:
        raise ImageError(
            f"data.fit={data.fit} brings in pixels without a label where an image is smaller than "
            f"{wanted[0]} x {wanted[1]}, and this one has {size[0]} x {size[1]}; name their value, "
            f"data.ignore=255, use a smaller image=, or data.fit=resize"
        )


def mask_size(path: str, max_pixels: int) -> Size:
    """Returns (height, width) of a label map; ImageError: it is none."""
    with closing(open_image(Path(path), max_pixels)) as image:
        size, lossy = image.size, image.facts.lossy
    if lossy:
        raise ImageError(
            f"a label map that was saved as {lossy}, which changes classes; write it anew from its "
            f"source, as PNG or a TIFF with deflate (what was changed stays so in a copy)"
        )
    if suffix_of(Path(path).name) in TIFF:
        return size
    from hires.data.formats.pillow import opened  # ranks without label maps need no Pillow

    with opened(Path(path)) as stored:
        if stored.mode not in _MODES:
            raise ImageError(
                f"a label map has one number a pixel, and its pixels are {stored.mode}; save it as "
                f"grey or with a palette"
            )
    return size


def labels_of(
    path: str, size: Size, data: DataConfig, rows: Span | None = None, cols: Span | None = None
) -> NDArray[Any]:
    """Returns the classes of rows and columns of a label map; all of them by default.

    ImageError: it has a value that is no class, or more than one number a pixel.
    """
    stored = labels = _stored(path, data.max_pixels, rows or (0, size[0]), cols or (0, size[1]))
    if data.values is not None:
        classes = np.full(2**16 + 1, -1, np.int32)  # of each value, and of all that are larger
        classes[data.values] = range(len(data.values))
        labels = classes[stored if stored.dtype.itemsize < 4 else np.minimum(stored, 2**16)]
        if data.ignore is not None:
            labels[stored == data.ignore] = data.ignore
    wrong = (labels < 0) | (labels >= data.num_classes)
    if data.ignore is not None:
        wrong &= labels != data.ignore
    if wrong.any():
        value = int(stored[wrong].max())
        known = f"data.values={data.values}" if data.values else f"data.classes={data.classes}"
        raise ImageError(
            f"it holds the value {value}, which is none of {known}; it has the values "
            f"{_values_in(stored)}: name those of the classes in data.values, and with data.ignore="
            f"{value} that of pixels without a label"
        )
    return labels


def _values_in(stored: NDArray[Any]) -> str:
    return listed([str(value) for value in np.unique(stored).tolist()], 16)


def _stored(path: str, max_pixels: int, rows: Span, cols: Span) -> NDArray[Any]:
    # Rows and columns of a label map as it is stored, (h, w).
    if suffix_of(Path(path).name) not in TIFF:
        from hires.data.formats.pillow import pixels_of

        return pixels_of(Path(path), as_stored=True)[slice(*rows), slice(*cols), 0]
    with closing(open_image(Path(path), max_pixels)) as image:
        if image.facts.is_float:
            raise ImageError("a label map has whole numbers, not floats; save it as 8 or 16 bits")
        pixels = image.read(rows, cols)
    if pixels.shape[2] != 1:
        raise ImageError(
            f"a label map has one whole number a pixel, not {pixels.shape[2]} of {pixels.dtype}; "
            f"save it as grey"
        )
    return pixels[:, :, 0]
