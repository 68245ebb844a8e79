"""Declares the keys of where images come from, and of how they are read: ``data``."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.value_checks import (
    COSMETIC,
    MOST_LABEL,
    MOST_SEED,
    MOST_STEPS,
    Checks,
    Section,
    choice,
    cosmetic,
    number,
    share,
    word,
)

_MADE = ("classes", "length")
_FILES = ("path", "split_file", "fit")
OWN_KEYS = {
    "synthetic": _MADE,
    "textures": _MADE,
    "hard": _MADE,
    "digits": ("fit",),
    "cifar10": ("path", "fit"),
    "folder": _FILES,
    "images": _FILES,
    "pairs": _FILES,
    "masks": (*_FILES, "classes", "images", "masks", "ignore"),
    "slide": (
        *(*_FILES, "level", "cut", "region", "stride", "tissue", "labels"),
        *("groups", "detections", "outside"),
    ),
}
"""Value of ``data.name`` -> the keys that it reads beside those that all read."""


CHOICES = {
    "synthetic": "Made in memory from the seed; data.classes and data.length say how many",
    "digits": "1797 handwritten digits of 8 x 8 pixels, which ship with hires",
    "cifar10": "CIFAR-10: the binary files of its authors, in data.path=FOLDER",
    "folder": "Images on disk, one sub-folder a class: data.path=FOLDER (PNG, JPEG, TIFF)",
    "images": "Images below data.path=FOLDER without classes, to predict theirs",
    "pairs": "Images below data.path=FOLDER and their smaller copies, for super-resolution",
    "masks": "Images below data.path=FOLDER with label maps: a class for each pixel",
}
"""Choices of ``data`` without further keys, and what each is."""


@dataclass
class DataConfig(Section, key="data", own_keys=OWN_KEYS, choices=CHOICES):
    """``data=NAME``: where the images come from."""

    name: str = "synthetic"
    """Made in memory from the seed: ``synthetic`` or ``textures`` (a network learns them), ``hard``
    (its classes overlap). ``digits`` ship with hires; below ``data.path``: ``cifar10`` (binary
    files), ``folder`` (one sub-folder per class), ``images`` (without classes), ``masks`` (images
    and label maps, for a class of each pixel), ``pairs`` (an image and a smaller copy of it, for
    super-resolution), ``slide`` (patches of slides, or slides whole)."""
    path: str | None = None
    """Folder of the images or files; its sub-folders are the classes of a ``folder``."""
    classes: int = number(10, least=1)
    """Of images that are made, and of ``masks``: number of classes."""
    length: int = number(1024, least=1, most=MOST_STEPS)
    """Of images that are made: number of images."""
    images: str = word("images/*")
    """Of ``masks``: names of the images below ``data.path``; the star is a name without suffix."""
    masks: str = word("masks/*")
    """Of ``masks``: names of the label maps; the star is the name of the image."""
    ignore: int | None = number(None, most=MOST_LABEL)
    """Of ``masks``: the value of pixels that have no label."""
    level: int = number(0)
    """Of ``slide``: level of the pyramid; 0 is the finest."""
    cut: str = choice("patches", ("patches", "whole"))
    """Of ``slide``: ``patches`` of the size of ``image``, each an image, or the ``whole`` slide."""
    region: list[int] | None = None
    """Of ``slide``: [row, column, height, width] in pixels of the level; null: all of a slide."""
    stride: int | None = number(None, least=1)
    """Of ``slide``: pixels from one patch to the next; null: the size of ``image``."""
    tissue: float = share(0.5, zero=True)
    """Of ``slide``: least share of a patch that is tissue, by Otsu's threshold of saturation; 0
    takes all patches."""
    labels: str | None = None
    """Of ``slide``: a file below ``data.path`` with the columns ``slide,label``, or files of
    outlines, as annotations/*.geojson (QuPath) or *.xml (ASAP); the star is the name of a slide.
    null: slides have no classes."""
    groups: dict[str, Any] = field(default_factory=dict)
    """Of ``slide`` with outlines: the class of a group or classification, as ``{_0: tumor}``; null:
    what it covers has no class. Those that are not named keep their name."""
    detections: bool = False
    """Of ``slide`` with outlines: whether QuPath's detections, cells and tiles are regions, too."""
    outside: str | None = None
    """Of ``slide`` with outlines: class of patches that they do not cover by half; null leaves
    these patches out."""
    names: list[str] | None = field(default=None, metadata=COSMETIC)
    """Names of the classes, in the order of their numbers; null: those of the data, which a run of
    files keeps here. Predictions with its weights have them, too."""
    order: list[str] | None = None
    """Names of the classes in the order of the network's outputs, to which labels are mapped by
    name; null: those of ``weights=RUN``, else the order of the data."""
    normalize: str = choice("white", ("white", "dataset"))
    """What the network gets of a value v between 0 (black) and 1 (white): ``white``: 4 v - 2;
    ``dataset``: (v - mean) / deviation, both of each channel over the images to train with."""
    mean: list[float] | None = None
    """Means of the channels that are taken instead, with ``std``: of ``dataset`` they are found
    once and stand here in the run folder."""
    std: list[float] | None = None
    """Deviations of the channels, from 0 (black) to 1 (white)."""
    fit: str = choice("resize", ("resize", "crop", "random_crop", "error"))
    """For images of another size than ``image``: ``resize`` (bilinear, which changes the aspect
    ratio), ``crop`` (or set in grey) about the centre, ``random_crop`` (in a training at a random
    place, another one in each epoch; else about the centre), or ``error``."""
    max_pixels: int = cosmetic(number(2**28, least=1, most=2**40))
    """Most pixels of a file that are decoded at once: a PNG or JPEG as a whole, of a TIFF a strip,
    tile or window. One of more than 4 bytes counts as several, so this bounds bytes, too: 1 GiB.
    What a header claims is compared with it before anything is decoded."""
    split: str = choice("all", ("all", "train", "validation", "test"))
    """Which images are used: ``all`` (``train`` with ``validate.every``), those to ``train`` with,
    those for ``validation``, or those for a last ``test``. They are listed in ``data.split_file``;
    or the sub-folders ``train``, ``val`` (or ``validation``, ``valid``) and ``test`` of
    ``data.path`` where it has the first two; or a share of every class, drawn from
    ``data.split_seed``. Slides are divided, not their patches."""
    split_file: str | None = None
    """A file below ``data.path`` with the columns ``name,split``: an image as ``predictions.csv``
    names it (or a slide), and train, validation or test. Images that it does not list are not
    used."""
    validation: float = share(0.1)
    """Share of every class that ``data.split=validation`` is."""
    test: float = share(0.0, zero=True)
    """Share of every class that ``data.split=test`` is."""
    split_seed: int = number(0, most=MOST_SEED)
    """Seed of that choice, apart from ``seed``, so that training and evaluation choose alike."""
    shuffle: bool = True
    """Whether the order is drawn anew for every epoch, from the seed."""
    balance: bool = False
    """Whether a training sees every class equally often: images of large classes take turns from
    epoch to epoch, those of small ones come several times."""
    prefetch: int = number(2)
    """Microbatches that are read ahead."""

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes that outputs stand for; None: they have none but numbers."""
        names = self.order or self.names
        numbers = self.name == "masks" and names == [*map(str, range(len(names or ())))]
        return None if numbers else names

    @property
    def crops(self) -> bool:
        """Whether larger images are cropped, and smaller ones set in grey."""
        return self.fit in ("crop", "random_crop")

    @property
    def has_labels(self) -> bool:
        """Whether images have something to compare outputs with."""
        return self.name != "images" and (self.name != "slide" or self.labels is not None)

    def _check_more(self, check: Checks) -> None:
        if self.region is not None and (
            len(self.region) != 4 or min(self.region) < 0 or min(self.region[2:]) < 1
        ):
            check.problems.append(
                f"data.region={self.region} must be [row, column, height, width] in pixels"
            )
        for name, label in self.groups.items():
            if label is not None and (not isinstance(label, str) or not label):
                check.problems.append(
                    f"data.groups has {name}: {label!r}, which must be the name of a class, or null"
                )
        if self.validation + self.test >= 1:
            check.problems.append(
                f"data.validation={self.validation:g} and data.test={self.test:g} leave nothing to "
                f"train with; their sum must be below 1"
            )
        for name in ("mean", "std"):
            other = "std" if name == "mean" else "mean"
            own, its = getattr(self, name), getattr(self, other)
            if own is not None and (its is None or len(its) != len(own)):
                check.problems.append(
                    f"data.{name}={own} needs data.{other} with as many numbers, one for each "
                    f"channel"
                )
        if any(not 0 < value < math.inf for value in self.std or ()):
            check.problems.append(f"data.std={self.std} must hold numbers above 0, and finite")
        if any(not math.isfinite(value) for value in self.mean or ()):
            check.problems.append(f"data.mean={self.mean} must hold finite numbers")
