"""Fills in the keys of a config that follow from its data: classes, and steps of its passes."""

from __future__ import annotations

import dataclasses
import json
import math
from fractions import Fraction
from typing import NamedTuple

from hires.core.config.run_config import RunConfig
from hires.core.config.task_config import ONE_PASS
from hires.core.errors import ConfigError
from hires.core.evaluation_summary import one_pass
from hires.plan.validation import evaluation_of


class DataSize(NamedTuple):
    """How much there is in the data of a run."""

    classes: int
    images: int


def with_classes(config: RunConfig, seen: dict[str, DataSize] | None = None) -> RunConfig:
    """Returns the config with what follows from its data, which is opened unless it was ``seen``.

    ``model.classes`` are as many as the data has, unless it is set; the ``steps`` of an evaluation
    or prediction are those of one pass, and those of a training may follow from its ``epochs``.
    A training that is evaluated learns from ``data.split=train``.
    """
    seen = {} if seen is None else seen
    if config.validates:
        learnt = dataclasses.replace(config.data, split="train")
        config = dataclasses.replace(config, data=learnt)
        _size_of(evaluation_of(config), seen)  # there are images for it
        if config.checkpoint.at_end == "auto":
            config = dataclasses.replace(
                config, checkpoint=dataclasses.replace(config.checkpoint, at_end="always")
            )
    num_classes, length = _size_of(config, seen)
    classes = config.model.classes or num_classes
    if classes < num_classes and config.target_size is None:
        raise ConfigError(
            f"model.classes={classes} is fewer than the {num_classes} classes of the data; "
            f"leave model.classes out, or set it to {num_classes} or more"
        )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, classes=classes))
    if config.task.name not in ONE_PASS and config.epochs is None:
        return config
    steps = one_pass(length, config.batch)
    counted = None
    if config.epochs is not None:
        passes = Fraction(str(config.epochs))  # 1.1 of 10 images are 11
        steps, counted = math.ceil(passes * length / config.batch), config.measure.steps
    saving = config.checkpoint
    if config.epochs is not None and saving.at_end == "auto":  # this is no measurement alone
        saving = dataclasses.replace(saving, at_end="always")
    warmup = min(config.measure.warmup, steps - (counted or 1))
    measure = dataclasses.replace(config.measure, warmup=max(0, warmup), steps=counted)
    config = dataclasses.replace(config, checkpoint=saving, measure=measure)
    return dataclasses.replace(config, steps=steps, epochs=None)


def _size_of(config: RunConfig, seen: dict[str, DataSize]) -> DataSize:
    data = {
        **vars(config.data),
        "channels": config.model.channels,
        "loss": config.objective.compares,
    }
    key = json.dumps(data, sort_keys=True)
    if key not in seen:
        from hires.data.source import open_data

        source = open_data(config)
        seen[key] = DataSize(source.num_classes, len(source))
    return seen[key]
