"""Cuts slides into patches that are tissue, or takes them whole: ``data=slide``.

    data.level    +----+----+----+----+
                  |    |####|####|    |    # patches of image pixels, data.stride apart, of which
                  +----+-##-+-##-+----+      at least data.tissue is tissue; each is an image
                  |    | ###|#   |    |
                  +----+----+----+----+

A patch has the class of its slide, or the one whose outlines cover at least half of its area. Every
window of an image reads only its own pixels of the slide.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store.cache import cached, keep, key_of
from hires.core.store.file_names import is_file
from hires.data import slide_labels, tissue
from hires.data.georeference import Georeference
from hires.data.image_fit import Place, fitted
from hires.data.image_format import (
    ImageError,
    ImageFile,
    Pixels,
    Size,
    Span,
    Window,
    check_window,
    normalised,
    suffix_of,
)
from hires.data.slide_classes import SlideClasses
from hires.data.slide_file import SUFFIXES, levels_of, slide_level
from hires.data.source import ERROR, NOTE, SOURCES, DataFinding, Source
from hires.data.sources.folder import listed_folder, naming, to_channels, visible_files
from hires.data.splits import part_of

log = logging.getLogger(__name__)


class Patch(NamedTuple):
    """A rectangle of a slide that is one image."""

    slide: int
    row: int
    col: int
    size: Size
    label: int


def slide_files(data: DataConfig, path: str | None) -> list[str]:
    """Returns the slides of a folder, or a single one; ConfigError: there are none."""
    if path and is_file(Path(path).expanduser()):
        files = [str(Path(path).expanduser())]
    else:
        with listed_folder(path, "slide", "slides") as root:
            files = visible_files(root)
    files = [file for file in files if suffix_of(Path(file).name) in SUFFIXES]
    if not files:
        raise ConfigError(
            f"data.path={path} holds no slides; they are files named "
            f"{', '.join('*' + suffix for suffix in SUFFIXES)}"
        )
    return files


def label_files(data: DataConfig) -> list[str]:
    """Returns the files that say what the slides show."""
    if data.labels is None:
        return []
    root = root_of(data)
    if "*" in data.labels:
        return [*map(str, slide_labels.annotation_files(root, data.labels).values())]
    return [str(root / data.labels)]


def root_of(data: DataConfig) -> Path:
    """Returns the folder of the data."""
    path = Path(data.path or "").expanduser()
    return path if path.is_dir() else path.parent


class _Slides(Source):
    # The slides of a source, each as one thing that has a name and a class.
    def __init__(self, source: SlideSource) -> None:
        self._source = source

    def __len__(self) -> int:
        return self._source.num_slides

    def label(self, i: int) -> int:
        return self._source.slide_label(i)

    def name(self, i: int) -> str:
        return self._source.slide_name(i)


@SOURCES.register("slide")
class SlideSource(Source):
    """Patches of slides, or regions of them, as images."""

    reads_files = True

    def __init__(self, data: DataConfig, path: str | None, size: Size, channels: int) -> None:
        self._data, self._size, self._channels = data, size, channels
        self._root = root_of(data)
        self._files = slide_files(data, path)
        self._kept: Sequence[int] = range(len(self._files))
        self._patches: dict[int, list[Patch]] = {}
        slides = [self.slide_name(number) for number in range(len(self._files))]
        everything = slide_files(data, str(self._root)) if data.labels is not None else []
        names = [Path(file).relative_to(self._root).as_posix() for file in everything]
        self._classes = SlideClasses(data, self._root, slides, names)
        self.class_names = self._classes.names  # data.names may replace them
        self.num_classes = len(self.class_names)

    @classmethod
    def open(cls, data: DataConfig, size: Size, channels: int, seed: int) -> Source:
        """Returns the patches of the slides of ``data.path``, or of its part."""
        return cls(data, part_of(data), size, channels)

    @classmethod
    def files(cls, data: DataConfig) -> Sequence[str]:
        """Returns the files that it reads."""
        return [*slide_files(data, part_of(data)), *label_files(data)]

    @property
    def units(self) -> Source:
        """The slides, which ``data.split`` divides."""
        return _Slides(self)

    @property
    def num_slides(self) -> int:
        """How many slides there are."""
        return len(self._files)

    def slide_name(self, number: int) -> str:
        """Returns the path of a slide in its folder."""
        return Path(self._files[number]).relative_to(self._root).as_posix()

    def slide_label(self, number: int) -> int:
        """Returns the class of a slide, 0 where its patches have classes of their own."""
        return self._classes.of_slide[number]

    def keep(self, numbers: Sequence[int]) -> Source:
        """Leaves some of the slides, those of ``data.split``; returns itself."""
        self._kept = numbers
        self.__dict__.pop("patches", None)
        return self

    @cached_property
    def patches(self) -> list[Patch]:
        """All images, slide by slide."""
        patches = [patch for number in self._kept for patch in self.patches_of(number)]
        if not patches:
            if wrong := [one for one in self.findings() if one.severity == ERROR]:
                raise ConfigError(f"data=slide: {wrong[0].text}: {', '.join(wrong[0].files)}")
            raise ConfigError(
                f"data=slide: no patch of {self._size[0]} x {self._size[1]} pixels is one to learn "
                f"from; lower data.tissue={self._data.tissue:g}, or use another data.level"
            )
        return patches

    def patches_of(self, number: int) -> list[Patch]:
        """Returns the images of a slide, which may be none; ConfigError: it cannot be read."""
        if number not in self._patches:
            self._patches[number] = self._cut(number)
        return self._patches[number]

    def _cut(self, number: int) -> list[Patch]:
        path = Path(self._files[number])
        try:
            with naming(path, self._data):
                levels = levels_of(path, self._data.max_pixels)
                region = self._region(levels)
                if self._data.cut == "whole":
                    r0, c0, height, width = region
                    if self._data.fit == "error" and (height, width) != self._size:
                        raise ImageError(
                            f"it has {height} x {width} pixels where image asks for "
                            f"{self._size[0]} x {self._size[1]}; use data.fit=resize or "
                            f"data.fit=crop, or data.region"
                        )
                    return [Patch(number, r0, c0, (height, width), self.slide_label(number))]
                return self._grid(number, path, levels, region)
        except RunError as error:
            raise ConfigError(str(error)) from None

    def _region(self, levels: list[Size]) -> tuple[int, int, int, int]:
        """Returns row, column, height and width of what is used of a slide."""
        level, region = self._data.level, self._data.region
        if level >= len(levels):
            raise ImageError(f"it has {len(levels)} levels, and data.level={level} is none of them")
        height, width = levels[level]
        if region is None:
            return 0, 0, height, width
        row, col, tall, wide = region
        if row + tall > height or col + wide > width:
            raise ImageError(
                f"data.region={region} leaves the {height} x {width} pixels of level {level}; it "
                f"is [row, column, height, width]"
            )
        return row, col, tall, wide

    def _grid(
        self, number: int, path: Path, levels: list[Size], region: tuple[int, int, int, int]
    ) -> list[Patch]:
        """Returns the patches of a slide that are tissue and have a class."""
        data, size = self._data, self._size
        row, col, height, width = region
        stride = data.stride or 0
        down, across = stride or size[0], stride or size[1]
        places = [
            (r, c)
            for r in range(row, row + height - size[0] + 1, down)
            for c in range(col, col + width - size[1] + 1, across)
        ]
        if not places:
            raise ImageError(
                f"its {height} x {width} pixels at data.level={data.level} hold no patch of "
                f"{size[0]} x {size[1]}; use a smaller image, or a finer level"
            )
        slide = levels[data.level]
        if data.tissue > 0:
            places = self._tissue(number, levels, places)
        labels = self._classes.of_patches(number, levels[0], slide, places, size)
        return [
            Patch(number, r, c, size, label)
            for (r, c), label in zip(places, labels, strict=True)
            if label >= 0
        ]

    def _tissue(
        self, number: int, levels: list[Size], places: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Returns the places at which enough is tissue; the map of a slide is kept in the cache."""
        path = Path(self._files[number])
        data, slide, stat = self._data, levels[self._data.level], path.stat()
        cells = tissue.map_size(slide, self._size)
        facts = [str(path.resolve()), stat.st_size, stat.st_mtime_ns, slide, cells]
        key = key_of("tissue", facts)
        held = cached("tissue", key)
        if not isinstance(held, str):
            log.info("%s: looking for tissue", path)
            found = tissue.tissue_of(tissue.small_copy(path, levels, cells, data.max_pixels))
            held = np.packbits(found).tobytes().hex()
            keep("tissue", key, held)
        packed = np.frombuffer(bytes.fromhex(held), np.uint8)
        bits = np.unpackbits(packed, count=cells[0] * cells[1])
        if bits.all() or not bits.any():
            what = "all of it is tissue: no glass" if bits.all() else "no tissue"
            self._classes.note(number, NOTE, f"{what} was found (data.tissue=0 takes all patches)")
        shares = tissue.tissue_shares(bits.reshape(cells), slide, places, self._size)
        return [one for one, share in zip(places, shares, strict=True) if share >= data.tissue]

    def findings(self) -> list[DataFinding]:
        """Returns what stands out in the labels and in the slides whose patches were asked for."""
        labels = {patch.label for patches in self._patches.values() for patch in patches}
        return self._classes.findings(labels, self._patches)

    def __len__(self) -> int:
        return len(self.patches)

    def label(self, i: int) -> int:
        """Returns the class of a patch."""
        return self.patches[i].label

    def name(self, i: int) -> str:
        """Returns the slide of an image, and row and column of a patch at its level."""
        patch = self.patches[i]
        name = self.slide_name(patch.slide)
        return name if self._data.cut == "whole" else f"{name}[{patch.row},{patch.col}]"

    def check(self, i: int, most_bytes: int) -> int:
        """Raises a RunError if an image cannot be read; returns how many bytes were decoded."""
        height, width = self.patches[i].size
        num_bytes = 4 * self._channels * height * width
        if num_bytes > most_bytes:
            return 0
        self._read(i, (0, height), (0, width))
        return num_bytes

    def stored(self, i: int) -> tuple[Size, Georeference]:
        """Returns the size of an image in pixels of its level, and where it lies."""
        patch = self.patches[i]
        with naming(Path(self._files[patch.slide]), self._data):
            reference = self._image(i).facts.reference
            return patch.size, reference.part((patch.row, patch.col))

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image, (C, h, w); only regions are changed by ``data.fit``."""
        check_window(rows, cols, self._size)
        read, sizes = partial(self._read, i), (self.patches[i].size, self._size)
        peak = self._image(i).peak
        pixels = fitted(read, *sizes, self._data.fit, rows, cols, fill=peak / 2, place=place)
        return normalised(pixels, peak, self._channels)

    def _image(self, i: int) -> ImageFile:
        path = Path(self._files[self.patches[i].slide])
        with naming(path, self._data):
            return slide_level(path, self._data.level, self._data.max_pixels)

    def _read(self, i: int, rows: Span, cols: Span) -> Pixels:
        patch, image = self.patches[i], self._image(i)
        with naming(Path(self._files[patch.slide]), self._data):
            down, right = patch.row, patch.col
            pixels = image.read(
                (down + rows[0], down + rows[1]), (right + cols[0], right + cols[1])
            )
            return to_channels(pixels, image.colours, self._channels, self._data.bands)

    def classes(self) -> Counter[str]:
        """Returns how many images there are of each class."""
        return Counter(self.class_names[patch.label] for patch in self.patches)
