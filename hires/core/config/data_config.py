"""Declares the keys of images: ``data``, ``augment``, ``validate`` and ``predict``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hires.core.augmentations import with_amounts
from hires.core.config.fields import MOST_LABEL, MOST_SEED, MOST_STEPS, Section, changed_keys, value
from hires.core.errors import ConfigError
from hires.core.evaluation_summary import LOSS, METRICS
from hires.core.losses import LABELS, NUMBERS

DATA_SETS = {
    "synthetic": "Made in memory from the seed; data.classes and data.length say how many",
    "digits": "1797 handwritten digits of 8 x 8 pixels, which ship with hires",
    "cifar10": "CIFAR-10: the binary files of its authors, in data.path=FOLDER",
    "folder": "Images on disk, one sub-folder a class: data.path=FOLDER (PNG, JPEG, TIFF, ...)",
    "images": "Images below data.path=FOLDER: their classes are in data.labels, or to be predicted",
    "pairs": "Images below data.path=FOLDER and their smaller copies, for super-resolution",
    "masks": "Images below data.path=FOLDER with label maps: a class for each pixel",
}
"""Choices of ``data`` without further keys, and what each is."""
TARGETS = {"class": "", "classes": LABELS, "numbers": NUMBERS}
"""Choices of ``data.targets``, and what a loss compares then; nothing: classes or images."""
_FILES = ("folder", "images", "pairs", "masks", "slide")
_SLIDE = ("slide",)
_MADE = ("synthetic", "textures", "hard")


@dataclass
class DataConfig(Section, key="data", choices=DATA_SETS):
    """``data=NAME``: where the images come from."""

    name: str = "synthetic"
    """Made in memory from the seed: ``synthetic`` or ``textures`` (a network learns them), ``hard``
    (its classes overlap). ``digits`` ship with hires; below ``data.path``: ``cifar10`` (binary
    files), ``folder`` (one sub-folder per class), ``images`` (with a table of classes, or none),
    ``masks`` (images and label maps, for a class of each pixel), ``pairs`` (an image and a smaller
    copy of it, for super-resolution), ``slide`` (patches of slides, or slides whole)."""
    path: str | None = value(path=(), of=("cifar10", *_FILES), plan=False)
    """Folder of the images or files; its sub-folders are the classes of a ``folder``."""
    classes: int | None = value(None, 1, of=(*_MADE, "masks"), plan=False)
    """Of images that are made: number of classes; null: 10. Of ``masks``: it, or ``data.values``,
    must be set."""
    length: int = value(1024, 1, MOST_STEPS, of=_MADE, plan=False)
    """Of images that are made: number of images."""
    images: str = value("images/*", line=True, of=("masks",), plan=False, source=True)
    """Of ``masks``: names of the images below ``data.path``; the star is a name without suffix."""
    masks: str = value("masks/*", line=True, of=("masks",), plan=False, source=True)
    """Of ``masks``: names of the label maps; the star is the name of the image."""
    ignore: int | None = value(None, 0, MOST_LABEL, of=("masks",))
    """Of ``masks``: the value of pixels that have no label."""
    values: list[int] | None = value(None, 0, 2**16 - 1, of=("masks",), plan=False)
    """Of ``masks``: the value of each class in the label maps, as ``[0,255]``; null: its number."""
    level: int = value(0, 0, of=_SLIDE, plan=False, source=True)
    """Of ``slide``: level of the pyramid; 0 is the finest."""
    cut: str = value("patches", choices=("patches", "whole"), of=_SLIDE, plan=False, source=True)
    """Of ``slide``: ``patches`` of the size of ``image``, each an image, or the ``whole`` slide."""
    region: list[int] | None = value(low=0, of=_SLIDE, plan=False, source=True)
    """Of ``slide``: [row, column, height, width] in pixels of the level; null: all of a slide."""
    stride: int | None = value(None, 1, of=_SLIDE, plan=False, source=True)
    """Of ``slide``: pixels from one patch to the next; null: the size of ``image``."""
    tissue: float = value(0.5, 0, below=1, of=_SLIDE, plan=False, source=True)
    """Of ``slide``: least share of a patch that is tissue, by Otsu's threshold of saturation; 0
    takes all patches."""
    labels: str | None = value(of=("images", *_SLIDE), plan=False)
    """Of ``images``: a file below ``data.path`` with the columns ``name,label``, or those of
    ``data.targets``; images that it does not list are not used. Of ``slide``: one with the columns
    ``slide,label``, or files of outlines, as annotations/*.geojson (QuPath) or *.xml (ASAP); the
    star is the name of a slide. null: they have no classes."""
    targets: str = value("class", choices=TARGETS, of=("images", *_SLIDE, *_MADE))
    """What one image has: one ``class``; ``classes``, any number of them, which a loss and errors
    call its ``labels`` (in ``data.labels`` a label as ``cat;dog`` or ``cat|dog``, or a column of 0
    and 1 for each class); or ``numbers``, a column for each. Data with classes or without labels
    takes that of ``weights=RUN``."""
    groups: dict[str, Any] = value({}, of=_SLIDE, plan=False)
    """Of ``slide`` with outlines: the class of a group or classification, as ``{_0: tumor}``; null:
    what it covers has no class. Those that are not named keep their name."""
    detections: bool = value(False, of=_SLIDE, plan=False)
    """Of ``slide`` with outlines: whether QuPath's detections, cells and tiles are regions, too."""
    outside: str | None = value(of=_SLIDE, plan=False, source=True)
    """Of ``slide`` with outlines: class of patches that they do not cover by half; null leaves
    these patches out."""
    names: list[str] | None = value(identity=False, plan=False)
    """Names of the classes, in the order of their numbers; null: those of the data, which a run of
    files keeps here. Predictions with its weights have them, too."""
    order: list[str] | None = None
    """Names of the classes in the order of the network's outputs, to which labels are mapped by
    name; null: those of ``weights=RUN``, else the order of the data."""
    normalize: str = value("white", choices=("white", "dataset"), plan=False)
    """What the network gets of a value v between 0 (black) and 1 (white): ``white``: 4 v - 2;
    ``dataset``: (v - mean) / deviation, both of each channel over the images to train with."""
    mean: list[float] | None = value(plan=False)
    """Means of the channels that are taken instead, with ``std``: of ``dataset`` they are found
    once and stand here in the run folder."""
    std: list[float] | None = value(above=0, plan=False)
    """Deviations of the channels, from 0 (black) to 1 (white)."""
    fit: str = value(
        "resize",
        choices=("resize", "crop", "random_crop", "error"),
        of=("digits", "cifar10", *_FILES),
        plan=False,
    )
    """For images of another size than ``image``: ``resize`` (bilinear, which changes the aspect
    ratio), ``crop`` (or set in grey) about the centre, ``random_crop`` (in a training at a random
    place, another one in each epoch; else about the centre), or ``error``."""
    bands: list[int] | None = value(None, 1, 2**16, of=_FILES, plan=False)
    """Numbers of the samples of a pixel that a network sees, as ``[4,3,2]``: as many as
    ``model.channels``; null: the colours."""
    max_pixels: int = value(2**28, 1, 2**40, identity=False)
    """Most pixels of a file that are decoded at once: a PNG or JPEG as a whole, of a TIFF a strip,
    tile or window. One of more than 4 bytes counts as several, so this bounds bytes, too: 1 GiB.
    What a header claims is compared with it before anything is decoded."""
    split: str = value("all", choices=("all", "train", "validation", "test"), plan=False)
    """Which images are used: ``all`` (``train`` with ``validate.every``), those to ``train`` with,
    those for ``validation``, or those for a last ``test``. They are listed in ``data.split_file``;
    or the sub-folders ``train``, ``val`` (or ``validation``, ``valid``) and ``test`` of
    ``data.path`` where it has the first two; or a share of every class, drawn from
    ``data.split_seed``. Slides are divided, not their patches."""
    split_file: str | None = value(of=_FILES, plan=False, divides=True)
    """A file below ``data.path`` with the columns ``name,split``: an image as ``predictions.csv``
    names it (or a slide), and train, validation or test. Images that it does not list are not
    used."""
    validation: float = value(0.1, above=0, below=1, plan=False, divides=True)
    """Share of every class that ``data.split=validation`` is."""
    test: float = value(0.0, 0, below=1, plan=False, divides=True)
    """Share of every class that ``data.split=test`` is."""
    split_seed: int = value(0, 0, MOST_SEED, plan=False, divides=True)
    """Seed of that choice, apart from ``seed``, so that training and evaluation choose alike."""
    shuffle: bool = value(True, plan=False, tasks=("train", "infer"))
    """Whether the order is drawn anew for every epoch, from the seed."""
    balance: bool = value(False, plan=False, tasks=("train",))
    """Whether a training sees every class equally often: images of large classes take turns from
    epoch to epoch, those of small ones come several times."""
    prefetch: int = value(2, 0)
    """Microbatches that are read ahead."""

    @property
    def num_classes(self) -> int:
        """Of images that are made, and of ``masks``."""
        return self.classes or len(self.values or ()) or 10

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
        return self.name not in ("images", *_SLIDE) or self.labels is not None

    def _problems(self) -> Iterator[str]:
        if self.region is not None and (len(self.region) != 4 or 0 in self.region[2:]):
            yield f"data.region={self.region} must be [row, column, height, width] in pixels"
        for number, label in enumerate(self.values or ()):
            if label == self.ignore != number:
                yield (
                    f"data.values={self.values} has data.ignore={label} as class {number}; take it "
                    f"out, or write it as class {label}"
                )
            elif number == self.ignore != label:
                yield (
                    f"data.ignore={number} is also the number of the class {label} in data.values="
                    f"{self.values}; write {number} there as class {number}"
                )
        if self.values is not None and len({*self.values}) < len(self.values):
            yield f"data.values={self.values} has a value twice; write that of each class once"
        elif self.values is not None and len(self.values) != self.num_classes:
            yield (
                f"data.values={self.values} must have one value for each of data.classes="
                f"{self.num_classes}; use data.classes={len(self.values)}"
            )
        if self.targets != "class" and self.balance:
            yield f"data.balance=true is of a class an image, not data.targets={self.targets}"
        if self.targets != "class" and self.name == "slide" and self.labels is not None:
            yield f"data.labels of data=slide are a class an image, not data.targets={self.targets}"
        for name, label in self.groups.items():
            if label is not None and (not isinstance(label, str) or not label):
                yield f"data.groups has {name}: {label!r}; give the name of a class, or null"
        if self.validation + self.test >= 1:
            yield (
                f"data.validation={self.validation:g} and data.test={self.test:g} leave nothing to "
                f"train with; their sum must be below 1"
            )
        if (self.mean is None) != (self.std is None) or len(self.mean or ()) != len(self.std or ()):
            yield (
                f"data.mean={self.mean} and data.std={self.std} go together: one number of each "
                f"for every channel"
            )


@dataclass
@with_amounts
class AugmentConfig(
    Section,
    key="augment",
    choices={"none": "Images are taken as they are"},
    choice_keys=lambda name: {},
):
    """``augment=NAME``: random changes of the images of a training, and of their targets.

    They follow from ``seed``, the epoch and the image, so every layout sees the same pixels. No
    other task has any. Its keys are those of :mod:`hires.augmentations`.
    """

    @property
    def is_on(self) -> bool:
        """Whether anything changes."""
        return any(True for _ in changed_keys(self))


EPOCH = "epoch"
AUTO = "auto"


def _check_every(key: str, every: Any) -> None:
    if every != EPOCH and not (type(every) is int and every > 0):
        raise ConfigError(f"{key}={every!r} must be {EPOCH}, or a number of steps as 500")


@dataclass
class ValidateConfig(Section, key="validate"):
    """``validate.*``: evaluations of a training on the images that it does not learn from."""

    every: Any = value(high=MOST_STEPS, check=_check_every)
    """When a training is evaluated on ``data.split=validation``: after each ``epoch``, or after so
    many steps; also after its last one. Unset: never."""
    metric: str = value(AUTO, choices={AUTO: "", LOSS: "", **METRICS.sentences()})
    """The number that says which evaluation is the best: ``loss``, or ``auto``: ``top1`` of
    classes, ``mean_iou`` of the pixels' classes, ``psnr`` of images, ``mean_ap`` of many labels,
    ``rmse`` of numbers."""
    weights: str = value("trained", choices=("trained", "ema"))
    """Which weights are evaluated: those that are ``trained``, or their running means, ``ema`` (of
    ``optimizer.ema``). The best checkpoint has both."""
    patience: int | None = value(None, 1, MOST_STEPS)
    """Evaluations in a row without a better one after which the training ends; unset: it takes all
    its steps."""
    min_delta: float = value(0.0, 0)
    """By how much an evaluation must be better than the best before it, to count as better."""

    def _problems(self) -> Iterator[str]:
        if self.every is None:
            for key, item in changed_keys(self):
                yield (
                    f"validate.{key}={item} needs validate.every, as validate.every={EPOCH}; leave "
                    f"it out"
                )


PROBABILITY = "probability"
PARQUET = "parquet"
OME_TIFF, ZARR = "ome-tiff", "zarr"


@dataclass
class PredictConfig(Section, key="predict"):
    """``predict.*``: what ``task=predict`` writes."""

    reduce: str = value("argmax", choices=("argmax", PROBABILITY))
    """What is written of the scores of the classes. ``argmax``: of an image its class and that
    one's probability, of a map the class of each pixel (8 bits; 16 above 255 classes).
    ``probability``: of an image that of each class beside them, of a map that of each class and
    pixel (32-bit floats). Images that a network makes are written as they are."""

    table: str = value("csv", choices=("csv", PARQUET))
    """Form of the table of images: ``csv``, or ``parquet``, which is smaller and keeps the types
    of its columns."""

    format: str = value(OME_TIFF, choices=(OME_TIFF, ZARR))
    """Form of the map, or image, of each sample: ``ome-tiff`` (``ID.ome.tif``, a TIFF with axes and
    names of classes as OME-XML), or ``zarr`` (``ID.zarr``, a folder of Zarr 3, in chunks of at most
    1024 x 1024 pixels). Both hold the same numbers, uncompressed."""
