"""Warns of an evaluation or prediction of images that its weights were trained with.

Both configs decide it, so no pixel is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from hires.cli.data_keys import names_classes
from hires.cli.named_weights import training_of
from hires.core.config.data_config import DataConfig
from hires.core.config.fields import keys_with
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import ONE_PASS
from hires.plan.plan import Finding

_OF_SEED = ("synthetic", "textures", "hard")
"""``data.name`` of images that are made from the seed of the run."""
_SOURCE = ("name", "images", "masks", "level", "cut", "region", "stride", "tissue", "outside")
"""Keys that say where the images come from, beside ``data.path``."""


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
    if training is not None and _reads_same_images(config, training[1]):
        division = keys_with(DataConfig, "divides")
        theirs, evaluates = training[1].data, config.task.name == "evaluate"
        does, means = ("evaluates", "its numbers") if evaluates else ("predicts", "predictions")
        text = (
            f"{training[0]} trains with images that this {does} (data.split={theirs.split} of its "
            f"run), so {means} are better than those of new images; train with data.split=train "
            f"(validate.every sets it), and use data.split=validation and the "
            f"{', '.join(f'data.{name}' for name in division)} of its run"
        )
        severity = "warning" if evaluates and config.data.split != "train" else "note"
        yield Finding(severity, "data.split", text)


def _reads_same_images(config: RunConfig, trained: RunConfig) -> bool:
    """Whether two configs read images of one source, and parts of it that may share some."""
    ours, theirs = config.data, trained.data
    if _source(config) != _source(trained):
        return False
    if "all" in (ours.split, theirs.split) or ours.split == theirs.split:
        return True
    from hires.data.splits import own_parts

    # Neither shares nor a seed divide what comes in parts; CIFAR-10 has one file for two parts.
    in_parts = ours.name == "cifar10" or bool(own_parts(ours.path))
    if in_parts and ours.split_file is None and theirs.split_file is None:
        return ours.name == "cifar10" and "train" not in (ours.split, theirs.split)
    return any(
        getattr(ours, name) != getattr(theirs, name) for name in keys_with(DataConfig, "divides")
    )


def _source(config: RunConfig) -> list[object]:
    data = config.data
    if data.name in _OF_SEED:
        return [data.name, data.classes, data.length, config.seed]
    path = None if data.path is None else Path(data.path).expanduser().resolve()
    return [path, *(getattr(data, name) for name in _SOURCE)]
