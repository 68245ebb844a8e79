"""Finds the images of an evaluation or prediction that its weights were trained with.

    run of weights=RUN      data.split=train          1618 images
    task=evaluate           data.split=all            1797 images, 1618 of them learnt

Both configs decide it, so no pixel is read. Where they divide the data alike, counts are enough.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from hires.cli.data_keys import DataSize, size_of
from hires.cli.named_weights import run_of_weights
from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.task_config import ONE_PASS
from hires.core.errors import HiresError
from hires.core.store.records import read_config
from hires.plan.plan import Finding

_MADE = ("synthetic", "textures", "hard")
"""``data.name`` of images that are made from the seed of the run."""
_CHOICES = ("data.split_file", "data.validation", "data.test", "data.split_seed")
"""Keys that divide the data."""
_OF_PLACE = ("name", "images", "masks", "level", "cut", "region", "stride", "tissue", "outside")


def learnt_images(config: RunConfig, seen: dict[str, DataSize]) -> list[Finding]:
    """Returns a finding if a run has trained its weights with images that it evaluates or predicts.

    It is a note where that is no mistake: of predictions, and of ``data.split=train``. ``config``
    is complete (``with_classes``), and ``seen`` has the sizes of data that was opened.
    """
    if config.weights is None or config.task.name not in ONE_PASS:
        return []
    try:
        run = run_of_weights(config.weights)
        trained = None if run is None else read_config(run)
        if trained is None or trained.task.name != "train" or not _same_data(config, trained):
            return []
        count = _num_shared(config, trained.data, seen)
        total = size_of(config, seen).images
    except HiresError:  # a training of which nothing is left but its weights
        return []
    if not count:
        return []
    evaluates, split = config.task.name == "evaluate", trained.data.split
    means = "its numbers are" if evaluates else "predictions are"
    text = (
        f"the run of weights={config.weights} trains with {count} of the {total} images that this "
        f"{'evaluates' if evaluates else 'predicts'} (data.split={split} of its run), so {means} "
        f"better than those of new images; {_remedy(config, trained.data)}"
    )
    severity = "warning" if evaluates and config.data.split != "train" else "note"
    return [Finding(severity, "data.split", text)]


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


def _num_shared(config: RunConfig, theirs: DataConfig, seen: dict[str, DataSize]) -> int:
    """Returns how many images of a config are in the split of a training, too."""
    ours = config.data
    learnt = _with_data_of(config, theirs)
    if theirs.split == "all":
        return size_of(config, seen).images
    if ours.split == "all":
        return size_of(learnt, seen).images
    if _divided_alike(ours, theirs):
        return size_of(config, seen).images if _part(ours) == _part(theirs) else 0
    from hires.data.source import open_data

    sources = [open_data(one) for one in (config, learnt)]
    names = [{one.name(i) for i in range(len(one))} for one in sources]
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
