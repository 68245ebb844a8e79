"""Finds the images of an evaluation or prediction that its weights were trained with.

    run of weights=RUN      data.split=train          1618 images
    task=evaluate           data.split=all            1797 images, 1618 of them learnt

Both configs decide it, so no pixel is read. Where they divide the data alike, counts are enough.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from hires.cli.data_keys import DataSize, names_classes, size_of
from hires.cli.named_weights import UNUSABLE, training_of
from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.task_config import ONE_PASS
from hires.plan.plan import Finding

_MADE = ("synthetic", "textures", "hard")
"""``data.name`` of images that are made from the seed of the run."""
_CHOICES = ("data.split_file", "data.validation", "data.test", "data.split_seed")
"""Keys that divide the data."""
_OF_PLACE = ("name", "images", "masks", "level", "cut", "region", "stride", "tissue", "outside")


def learnt_images(config: RunConfig, seen: dict[str, DataSize]) -> list[Finding]:
    """Returns a finding if a run has trained its weights with images that it evaluates or predicts.

    A note for predictions and for ``data.split=train``, else a warning. ``config`` is complete
    (``with_classes``), and ``seen`` has the sizes of data that was opened.
    """
    findings: list[Finding] = []
    if config.task.name not in ONE_PASS:
        return findings
    findings += _of_names(config)
    with contextlib.suppress(*UNUSABLE):
        findings += _of_training(config, seen)
    return findings


def _of_names(config: RunConfig) -> Iterator[Finding]:
    if config.weights is None or config.data.order is not None or not names_classes(config):
        return
    with contextlib.suppress(*UNUSABLE):
        training = training_of(config)
        if training is not None and training[1].data.class_names is not None:
            return
    text = (
        f"weights={config.weights} has no names of its classes, so those of the data were not "
        f"compared with them; data.order=[NAME,...] names its outputs"
    )
    yield Finding("note", "data.order", text)


def _of_training(config: RunConfig, seen: dict[str, DataSize]) -> Iterator[Finding]:
    training = training_of(config)
    if training is None:
        return
    named, trained = training
    count = _num_shared(config, trained, seen)
    if not count:
        return
    total = size_of(config, seen).images
    evaluates, split = config.task.name == "evaluate", trained.data.split
    means = "its numbers are" if evaluates else "predictions are"
    words = (
        f"{named} trains with {count} of the {total} images that this {_does(config)} "
        f"(data.split={split} of its run), so {means} better than those of new images; "
        f"{_remedy(config, trained.data)}"
    )
    severity = "warning" if evaluates and config.data.split != "train" else "note"
    yield Finding(severity, "data.split", words)


def _does(config: RunConfig) -> str:
    return "evaluates" if config.task.name == "evaluate" else "predicts"


def _same_data(config: RunConfig, trained: RunConfig) -> bool:
    """Whether both runs choose from the same images."""
    ours, theirs = config.data, trained.data
    if ours.name in _MADE:
        facts = [(one.data.classes, one.data.length, one.seed) for one in (config, trained)]
        return ours.name == theirs.name and facts[0] == facts[1]
    return _place(ours) == _place(theirs)


def _place(data: DataConfig) -> list[object]:
    path = None if data.path is None else Path(data.path).expanduser().resolve()
    return [path, *(getattr(data, name) for name in _OF_PLACE)]


def _num_shared(config: RunConfig, other: RunConfig, seen: dict[str, DataSize]) -> int:
    """Returns how many images of a config another one reads, too."""
    if not _same_data(config, other):
        return 0
    ours, theirs = config.data, other.data
    learnt = _with_data_of(config, theirs)
    if ours.split == "all" or (_divided_alike(ours, theirs) and _part(ours) == _part(theirs)):
        return size_of(learnt, seen).images
    if theirs.split == "all":
        return size_of(config, seen).images
    if _divided_alike(ours, theirs):
        return 0
    from hires.data.source import open_data

    sources = [open_data(one) for one in (config, learnt)]
    names = [{source.name(i) for i in range(len(source))} for source in sources]
    return len(names[0] & names[1])


def _with_data_of(config: RunConfig, theirs: DataConfig) -> RunConfig:
    names = ("split", *(key.partition(".")[2] for key in _CHOICES))
    values = {name: getattr(theirs, name) for name in names}
    return dataclasses.replace(config, data=dataclasses.replace(config.data, **values))


def _divided_alike(ours: DataConfig, theirs: DataConfig) -> bool:
    names = [key.partition(".")[2] for key in _CHOICES]
    if all(getattr(ours, name) == getattr(theirs, name) for name in names):
        return True
    from hires.data.splits import own_parts

    # Neither shares nor a seed divide what comes in parts.
    in_parts = ours.name == "cifar10" or bool(own_parts(ours.path))
    return in_parts and ours.split_file is None and theirs.split_file is None


def _part(data: DataConfig) -> str:
    # CIFAR-10 has one file for both.
    return "validation" if data.name == "cifar10" and data.split == "test" else data.split


def _remedy(config: RunConfig, theirs: DataConfig) -> str:
    if theirs.split != "train":
        return "train with data.split=train (validate.every sets it) to keep some images for this"
    if config.data.split in ("all", "train"):
        return "use data.split=validation"
    return f"use the {', '.join(_CHOICES)} of its run"
