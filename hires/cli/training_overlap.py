"""Warns of an evaluation or prediction of images that its weights were trained with.

Both configs decide it, so no pixel is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hires.cli.data_keys import names_classes
from hires.cli.named_weights import training_of
from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import ONE_PASS
from hires.plan.plan import Finding

_MADE = ("synthetic", "textures", "hard")
"""``data.name`` of images that are made from the seed of the run."""
_DIVISION = ("split_file", "validation", "test", "split_seed")
"""Keys that divide the data."""
_OF_PLACE = ("name", "images", "masks", "level", "cut", "region", "stride", "tissue", "outside")


def training_overlap(config: RunConfig) -> Iterator[Finding]:
    """Yields findings on the run that trained the weights of an evaluation or prediction.

    Images that both read are a note for predictions and for ``data.split=train``, else a warning.
    ``config`` is complete (``with_classes``).
    """
    if config.task.name not in ONE_PASS:
        return
    training = training_of(config)
    named = training is not None and training[1].data.class_names is not None
    if config.weights and config.data.order is None and names_classes(config) and not named:
        text = (
            f"weights={config.weights} has no names of its classes, so those of the data were not "
            f"compared with them; data.order=[NAME,...] names its outputs"
        )
        yield Finding("note", "data.order", text)
    share = "" if training is None else _common_share(config, training[1])
    if training is None or not share:
        return
    evaluates, theirs = config.task.name == "evaluate", training[1].data
    does, means = "predicts", "predictions are"
    if evaluates:
        does, means = "evaluates", "its numbers are"
    text = (
        f"{training[0]} trains with {share} of the images that this {does} (data.split="
        f"{theirs.split} of its run), so {means} better than those of new images; "
        f"{_remedy(config, theirs)}"
    )
    severity = "warning" if evaluates and config.data.split != "train" else "note"
    yield Finding(severity, "data.split", text)


def _common_share(config: RunConfig, trained: RunConfig) -> str:
    """Returns how much of the images of a config another one reads, in a word; empty: none."""
    ours, theirs = config.data, trained.data
    if ours.name in _MADE:
        facts = [
            (one.data.name, one.data.classes, one.data.length, one.seed)
            for one in (config, trained)
        ]
        same = facts[0] == facts[1]
    else:
        same = _place(ours) == _place(theirs)
    if not same:
        return ""
    if theirs.split == "all":
        return "all"
    if ours.split == "all":
        return "some"
    if _divided_alike(ours, theirs):
        return "all" if _part(ours) == _part(theirs) else ""
    return "some"


def _place(data: DataConfig) -> list[object]:
    path = None if data.path is None else Path(data.path).expanduser().resolve()
    return [path, *(getattr(data, name) for name in _OF_PLACE)]


def _divided_alike(ours: DataConfig, theirs: DataConfig) -> bool:
    if all(getattr(ours, name) == getattr(theirs, name) for name in _DIVISION):
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
    return f"use the {', '.join(f'data.{name}' for name in _DIVISION)} of its run"
