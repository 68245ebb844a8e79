"""Opens the images that a config names, alone or as pairs, and chooses those of each step.

0     cols        W       A window is the part rows x cols of an image. Its numbers are bit for
+-----------------+       bit those of the same part of the whole image, whatever the window:
|     +----+      | rows  pixels go through elementwise operations that IEEE 754 rounds alike
|     |    |      |       everywhere (+ - * / on float32); sines and sums, whose rounding may
|     +----+      |       depend on the position in a vector, are taken over whole axes first.
+-----------------+ H
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.augmented import AugmentedSource
from hires.data.balanced import balanced_order
from hires.data.folder import CONTENTS, FolderSource, scan
from hires.data.image_fit import Place, resize
from hires.data.image_format import Pixels, Size, Span, Window, check_window
from hires.data.masks import AugmentedMasks, MaskSource
from hires.data.overlapping import OverlappingSource
from hires.data.slides import SlideSource
from hires.data.small_images import cifar10, digits
from hires.data.splits import chosen, part_of
from hires.data.synthetic import SyntheticSource

KINDS = ("synthetic", "textures", "hard", "digits", "cifar10", "masks", "slide", *CONTENTS)
"""Values of ``data.name``."""


class Source(Protocol):
    """Labelled images of one size, of which any window can be read alone."""

    num_classes: int
    """Labels go from 0 to this, exclusive."""
    class_names: tuple[str, ...]
    """Their names, in the order of the labels."""

    def __len__(self) -> int:
        """Returns the number of images."""
        ...

    def label(self, i: int) -> int:
        """Returns the class of image ``i``; reads no pixel."""
        ...

    def name(self, i: int) -> str:
        """Returns what names image ``i`` in results; no other image has it."""
        ...

    def check(self, i: int, most_bytes: int) -> int:
        """Raises a RunError if image ``i`` cannot be read; returns how many bytes were decoded.

        An image of more than ``most_bytes`` is opened only.
        """
        ...

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a part of image ``i`` at the size of the config, from -2 (black) to 2 (white).

        ``place`` is that of its random crop (``data.fit=random_crop``); None: the middle.
        An image that cannot be read raises a RunError that names the file.
        """
        ...


def open_data(config: RunConfig) -> Source | PairSource:
    """Returns what a run learns from; errors are those of :func:`open_source`."""
    channels, size = config.model.channels, config.target_size or (config.height, config.width)
    whole = open_source(config.data, size, channels, config.seed)
    if config.augments and isinstance(whole, MaskSource):
        whole = AugmentedMasks(whole, size, config.augment, config.seed)
    elif config.augments:
        whole = AugmentedSource(whole, size, config.augment, config.seed)
    if config.target_size is None:
        return whole
    return PairSource(whole, (config.height, config.width), config.model.scale, channels)


def open_source(data: DataConfig, image: Sequence[int], channels: int, seed: int) -> Source:
    """Returns the images that the config names; reads no pixel.

    Every image is given the size ``image``, [height, width], and as many ``channels``; ``seed``
    decides the images that are made.

    Raises:
        ConfigError: ``data.name`` is unknown, or ``data.path`` does not hold what it needs.
    """
    whole = _whole_source(data, (image[0], image[1]), channels, seed)
    _name_classes(whole, data)
    numbers = chosen(data, whole.slides if isinstance(whole, SlideSource) else whole)
    if numbers is not None and isinstance(whole, (MaskSource, SlideSource)):
        whole.keep(numbers)
    elif numbers is not None:
        whole = SplitSource(whole, numbers)
    # Images are divided by the data's own numbers, so that every run divides them alike.
    return whole if data.order is None or not data.has_labels else _ordered(whole, data.order)


def _ordered(source: Source, order: Sequence[str]) -> Source:
    """Returns a source whose labels are numbers in an order of names; ConfigError: one has none."""
    missing = [name for name in source.class_names if name not in order]
    if missing or len({*order}) < len(order):
        raise ConfigError(
            f"data.order={','.join(order)} must have each class of the data once, and has no "
            f"{', '.join(missing) or 'name for several'}; the data has "
            f"{','.join(source.class_names)}"
        )
    numbers = [order.index(name) for name in source.class_names]
    if not isinstance(source, MaskSource):
        return OrderedSource(source, numbers, order)
    source.renumber(numbers, order)
    return source


def _name_classes(source: Source, data: DataConfig) -> None:
    """Gives the classes of a source the names of the config; ConfigError: they do not fit it."""
    if not data.has_labels:  # there is one class for all of them, which means nothing
        source.num_classes, source.class_names = 0, ()
    elif data.names is not None and len(data.names) != source.num_classes:
        raise ConfigError(
            f"data.names has {len(data.names)} names, and the data {source.num_classes} classes; "
            f"name them all, or leave data.names out"
        )
    if data.names is not None:
        source.num_classes, source.class_names = len(data.names), tuple(data.names)


def _whole_source(data: DataConfig, size: Size, channels: int, seed: int) -> Source:
    if data.name in ("synthetic", "textures"):
        return SyntheticSource(data.classes, data.length, size, channels, seed)
    if data.name == "hard":
        return OverlappingSource(data.classes, data.length, size, channels, seed)
    if data.name in ("digits", "cifar10"):
        small = digits(size, channels, data.fit) if data.name == "digits" else None
        return small or cifar10(data, size, channels)
    if data.name in CONTENTS:
        index = scan(part_of(data), data.name)
        return FolderSource(index, size, channels, data.fit, data.max_pixels)
    if data.name == "masks":
        return MaskSource(data, part_of(data), size, channels)
    if data.name == "slide":
        return SlideSource(data, part_of(data), size, channels)
    raise ConfigError(f"data={data.name!r} is unknown; choose one of {', '.join(KINDS)}")


class SplitSource:
    """Some images of a source, in its order: those of ``data.split``."""

    def __init__(self, whole: Source, numbers: Sequence[int]) -> None:
        self.num_classes, self.class_names = whole.num_classes, whole.class_names
        self._whole, self._numbers = whole, numbers

    def __len__(self) -> int:
        return len(self._numbers)

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self._whole.label(self._numbers[i])

    def name(self, i: int) -> str:
        """Returns what names an image, the same as in the whole source."""
        return self._whole.name(self._numbers[i])

    def check(self, i: int, most_bytes: int) -> int:
        """Checks an image, as the whole source does."""
        return self._whole.check(self._numbers[i], most_bytes)

    def window(self, i: int, rows: Span, cols: Span, place: Place | None = None) -> Window:
        """Returns a window of an image, (C, h, w)."""
        return self._whole.window(self._numbers[i], rows, cols, place)


class OrderedSource(SplitSource):
    """A source whose classes have other numbers."""

    def __init__(self, whole: Source, numbers: Sequence[int], names: Sequence[str]) -> None:
        super().__init__(whole, range(len(whole)))
        self.num_classes, self.class_names = len(names), tuple(names)
        self._of_label = numbers

    def label(self, i: int) -> int:
        """Returns the class of an image."""
        return self._of_label[super().label(i)]


class PairSource:
    """Pairs of images for super-resolution: inputs of ``size`` (height, width), larger targets.

    The target is an image of ``large``, ``scale`` times as large. The input is the target shrunk by
    bicubic interpolation whose kernel widens with the scale, as the pairs of super-resolution are
    usually made, and kept between black and white. A window of it reads only a part of the target.
    """

    def __init__(self, large: Source, size: Size, scale: int, channels: int) -> None:
        self.num_classes = channels
        """Numbers that the network returns for every pixel."""
        self._large = large
        self._size = size
        self._scale = scale

    def __len__(self) -> int:
        return len(self._large)

    def name(self, i: int) -> str:
        """Returns the name of the target of pair ``i``."""
        return self._large.name(i)

    def check(self, i: int, most_bytes: int) -> int:
        """Checks the target of pair ``i``, as :meth:`Source.check`."""
        return self._large.check(i, most_bytes)

    def window(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of the input of pair ``i``, (C, h, w), from -2 (black) to 2 (white)."""
        check_window(rows, cols, self._size)

        def read(rows: Span, cols: Span) -> Pixels:
            pixels: Pixels = self._large.window(i, rows, cols).transpose(1, 2, 0)
            return pixels

        large = (self._scale * self._size[0], self._scale * self._size[1])
        small = resize(read, large, self._size, rows, cols, kernel="cubic")
        made: Window = np.ascontiguousarray(small.clip(-2, 2).transpose(2, 0, 1), np.float32)
        return made

    def target(self, i: int, rows: Span, cols: Span) -> Window:
        """Returns a window of the target of pair ``i``, (C, h, w), in pixels of the target."""
        return self._large.window(i, rows, cols)


def step_images(config: RunConfig, source: Sized, step: int) -> list[int]:
    """Returns the images of one step of a run, as :func:`step_indices`."""
    order = balanced_order(source, config.seed, config.shuffles) if config.balances else None
    return step_indices(step, config.batch, len(source), config.seed, config.shuffles, order=order)


def step_indices(
    step: int,
    batch: int,
    length: int,
    seed: int,
    shuffle: bool,
    order: Callable[[int], Sequence[int]] | None = None,
) -> list[int]:
    """Returns the images of one step, for the whole world; it depends on the arguments alone.

    epoch 0          epoch 1          epoch 2           each a permutation of the data set
    [ 3 0 4 1 2 ]    [ 1 4 0 2 3 ]    [ 2 ...           (in order without ``shuffle``)
     step 0  | step 1   | step 2   |                    batch = 3

    Steps count from 0, ``batch`` may exceed the ``length`` of the data set, and ``seed`` decides
    the permutations, or an ``order`` that gives the images of an epoch. Replicas and microbatches
    take the ``batch`` indices in their order.
    """
    assert step >= 0
    assert min(batch, length) >= 1
    indices: list[int] = []
    position, end = step * batch, (step + 1) * batch
    while position < end:
        epoch, offset = divmod(position, length)
        count = min(length - offset, end - position)
        if order is not None:
            indices += order(epoch)[offset : offset + count]
        elif shuffle:
            indices += _permutation(seed, epoch, length)[offset : offset + count].tolist()
        else:
            indices += range(offset, offset + count)
        position += count
    return indices


@lru_cache(maxsize=2)  # a step touches the end of one epoch and the start of the next
def _permutation(seed: int, epoch: int, length: int) -> NDArray[np.int64]:
    order = np.random.Generator(np.random.PCG64([seed, epoch])).permutation(length)
    order.setflags(write=False)  # it is shared through the cache
    return order
