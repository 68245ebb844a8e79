"""Fills in the keys of a config that follow from its data: classes, and steps of its passes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from hires.cli.named_weights import run_of_weights, training_of
from hires.cli.screens.screen import print_activity
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import INFERENCE, ONE_PASS
from hires.core.errors import ConfigError
from hires.core.evaluation_summary import one_pass
from hires.core.losses import CLASSES
from hires.core.store.cache import cached, keep
from hires.core.store.records import read_config
from hires.plan.validation import evaluation_of

_NAMES_CLASSES = ("folder", "slide", "masks", "cifar10", "digits")
"""``data.name`` of images whose classes have names that predictions should have."""
_NAMED = 12
"""Classes that an error names."""
_OF_PIXELS = ("normalize", "mean", "std", "prefetch")
"""Keys of the data that change no count."""


class DataSize(NamedTuple):
    """How much there is in the data of a run."""

    classes: int
    images: int
    names: tuple[str, ...]
    """Of the classes."""


def with_classes(config: RunConfig, seen: dict[str, DataSize] | None = None) -> RunConfig:
    """Returns the config with what follows from its data, which is opened unless it was ``seen``.

    ``data.order`` is that of the classes of its weights. ``model.classes`` are as many as the data
    has, unless it is set; the ``steps`` of an evaluation or prediction are those of one pass, and
    those of a training may follow from its ``epochs``. A training that is evaluated learns from
    ``data.split=train``. ``checkpoint.at_end=auto`` of a training that is no measurement alone
    becomes ``always``.
    """
    if config.task.name == "train" and config.checkpoint.at_end == "auto":
        config = _with_saved_end(config)
    seen = {} if seen is None else seen
    if config.validates:
        learnt = dataclasses.replace(config.data, split="train")
        config = dataclasses.replace(config, data=learnt)
        size_of(evaluation_of(config), seen)  # there are images for it
    name, labelled = config.data.name, config.data.has_labels
    if not labelled and config.task.name in ("train", "evaluate"):
        remedy = "data.labels" if name == "slide" else "data=folder"
        raise ConfigError(
            f"data={name} has no classes, which task={config.task.name} compares with; use "
            f"{remedy}, or task=predict"
        )
    config = _with_order(_with_statistics(_as_trained(config)), seen)
    num_classes, length, names = size_of(config, seen)
    if (
        config.data.name in _NAMES_CLASSES
        and config.task.name == "train"
        and config.data.order is None
    ):
        named = dataclasses.replace(config.data, names=[*names])
        config = dataclasses.replace(config, data=named)
    if not labelled and config.model.classes is None:
        raise ConfigError(
            f"data={name} has no classes to count; set model.classes to those of the network, or "
            "weights=RUN, which knows them"
        )
    classes = config.model.classes or num_classes
    # A single score is that of the second of two classes.
    if max(2, classes) < num_classes and config.target_size is None:
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
    warmup = min(config.measure.warmup, steps - (counted or 1))
    measure = dataclasses.replace(config.measure, warmup=max(0, warmup), steps=counted)
    config = dataclasses.replace(config, measure=measure)
    return dataclasses.replace(config, steps=steps, epochs=None)


def size_of(config: RunConfig, seen: dict[str, DataSize]) -> DataSize:
    """Returns how much the data of a run holds; it is opened unless it was ``seen``."""
    key = _size_key(config)
    if key not in seen:
        from hires.data.opening import open_data

        source = open_data(config)
        seen[key] = DataSize(source.num_classes, len(source), getattr(source, "class_names", ()))
    return seen[key]


def _size_key(config: RunConfig) -> str:
    data = {
        **{key: value for key, value in vars(config.data).items() if key not in _OF_PIXELS},
        "channels": config.model.channels,
        "loss": config.objective.compares,
    }
    return json.dumps(data, sort_keys=True)


def names_classes(config: RunConfig) -> bool:
    """Whether a run compares classes, or predicts them, of data whose classes have names."""
    named = config.data.name != "masks" or config.data.class_names is not None
    labelled = config.data.has_labels and config.objective.compares == CLASSES
    return labelled and named and config.data.name in _NAMES_CLASSES


def _with_order(config: RunConfig, seen: dict[str, DataSize]) -> RunConfig:
    """Returns the config with the classes of the run of its weights, if both have names.

    ConfigError: a class of the data has no such name.
    """
    if config.data.order is not None or config.task.name not in ("train", *ONE_PASS):
        return config
    training = training_of(config)
    order = None if training is None else training[1].data.class_names
    if training is None or order is None:
        return config
    if config.data.name == "masks" and config.data.names is None:
        names = order if len(order) == config.data.classes else None
        return dataclasses.replace(config, data=dataclasses.replace(config.data, names=names))
    if not names_classes(config):
        return config
    own, classes = size_of(config, seen), config.model.classes or training[1].model.classes
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, classes=classes))
    if [*own.names] == order:
        return config
    if others := [name for name in own.names if name not in order]:
        remedy = "leave their images out, or give them names that it has (data.names)"
        if config.task.name == "predict":
            remedy = "predict them with data=images, or rename them"
        elif config.task.name == "train":
            remedy += "; data.order=[NAME,...] trains its outputs as other classes"
        raise ConfigError(
            f"data={config.data.name} has {_shown(others)}, which {training[0]} does not have: "
            f"its classes are {_shown(order)}, and those of the data {_shown(own.names)}; {remedy}"
        )
    data = dataclasses.replace(config.data, order=order)
    config = dataclasses.replace(config, data=data)
    seen[_size_key(config)] = DataSize(len(order), own.images, tuple(order))
    return config


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _with_saved_end(config: RunConfig) -> RunConfig:
    # A short run on synthetic images measures a layout; its weights are of no use.
    learns = config.data.name != "synthetic" or config.epochs is not None or config.validates
    if not learns:
        return config
    saving = dataclasses.replace(config.checkpoint, at_end="always")
    return dataclasses.replace(config, checkpoint=saving)


def _as_trained(config: RunConfig) -> RunConfig:
    """Returns the config with what an inference must share with the run that it has its weights of.

    These are the classes of the network, if the data has none, and the normalisation of images.
    """
    if config.weights is None or config.task.name not in INFERENCE:
        return config
    run = run_of_weights(config.weights)
    if run is None:
        return config
    trained = read_config(run)
    if config.data.normalize == "white" and config.data.mean is None:
        own = dataclasses.replace(config.data, mean=trained.data.mean, std=trained.data.std)
        config = dataclasses.replace(config, data=own)
    if not config.data.has_labels and config.data.names is None:
        own = dataclasses.replace(config.data, names=trained.data.class_names)
        config = dataclasses.replace(config, data=own)
    if not config.data.has_labels and config.model.classes is None:
        model = dataclasses.replace(config.model, classes=trained.model.classes)
        config = dataclasses.replace(config, model=model)
    return config


def _with_statistics(config: RunConfig) -> RunConfig:
    """Returns the config with the means and deviations that ``data.normalize=dataset`` asks for."""
    if config.data.normalize != "dataset" or config.data.mean is not None:
        return config
    from hires.data.content import HAS_FILES, content_of
    from hires.data.statistics import channel_statistics, learnt_from

    learnt = learnt_from(config)
    files = content_of(learnt.data).digest if config.data.name in HAS_FILES else ""
    facts = [files, vars(learnt.data), config.image, config.model.channels, config.seed]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
    held = cached("statistics", key)
    if held is None:

        def show(done: int, of: int) -> None:
            if done % 16 == 0:
                print_activity(f"reading the images for their mean and deviation: {done} of {of}")

        held = [*channel_statistics(config, show)]
        print_activity("")
        keep("statistics", key, held)
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, mean=held[0], std=held[1])
    )
