"""Fills in the keys of a config that follow from its data and from the run of its weights.

Weights are named as ``weights=`` does, or by the name or hash of a run::

    default/RUN   RUN/best   RUN/ema   RUN/best/ema   RUN/checkpoints/step000012   net.safetensors

Both configs decide whether an evaluation sees images that its weights were trained with, so no
pixel is read for that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from hires.cli.overrides import key_in
from hires.cli.screen import print_activity
from hires.core.config.data_config import DataConfig
from hires.core.config.fields import keys_of, keys_with
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.config.training_config import INFERENCE, ONE_PASS
from hires.core.errors import ConfigError, HiresError
from hires.core.evaluation_summary import ROW_KINDS, one_pass
from hires.core.losses import CLASSES
from hires.core.store import file_names, naming, records, rundir
from hires.core.store.cache import cached, keep, mark_of
from hires.core.store.file_names import StrPath
from hires.core.store.network_weights import BEST, EMA, PICKLES, SAFETENSORS, find_weights
from hires.core.store.records import read_config
from hires.core.units import listed
from hires.plan.plan import Finding
from hires.plan.planner import evaluation_of
from hires.plan.search.candidates import written

_OF_TRAINING = ("split", "shuffle", "balance", "prefetch", "mean", "std", "order")
"""Keys of a training's data that are not those of its evaluation, or that follow from it."""
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


def resolve_data(config: RunConfig, seen: dict[str, DataSize] | None = None) -> RunConfig:
    """Returns the config with what follows from its data, which is opened unless it was ``seen``.

    ``data.order`` is that of the classes of its weights. ``model.classes`` are as many as the data
    has, unless it is set; the ``steps`` of an evaluation or prediction are those of one pass, and
    those of a training may follow from its ``epochs``. A training that is evaluated learns from
    ``data.split=train``. ``checkpoint.at_end=auto`` of a training that is no measurement alone
    becomes ``always``.
    """
    seen = {} if seen is None else seen
    if config.weights and run_of_weights(config.weights) is None:
        find_weights(config.weights, verify=False)  # what is missing explains all that follows
    if config.checkpoint.at_end == "auto" and saves_end(config):
        config = replace(config, checkpoint=replace(config.checkpoint, at_end="always"))
    if config.validates:
        config = _with_data(config, split="train")
        size_of(evaluation_of(config), seen)  # there are images for it
    name, labelled = config.data.name, config.data.has_labels
    if not labelled and config.task.name in ("train", "evaluate"):
        raise ConfigError(
            f"data={name} has no classes, which task={config.task.name} compares with; use "
            f"data.labels, or task=predict"
        )
    config = _with_order(_with_statistics(_as_trained(config)), seen)
    num_classes, length, names = size_of(config, seen)
    is_unnamed = config.data.order is None and not _is_made(config.data)
    if names and is_unnamed and config.task.name == "train":
        config = _with_data(config, names=[*names])
    makes_images = config.target_size is not None
    if not labelled and config.model.classes is None and not makes_images:
        raise ConfigError(
            f"data={name} has no classes to count; set model.classes to those of the network, or "
            "weights=RUN, which knows them"
        )
    classes = config.model.classes or (config.model.channels if makes_images else num_classes)
    compares = config.objective.compares
    if compares in ROW_KINDS and labelled:
        fits = classes == num_classes  # each is an output of its own
    else:  # a single score is that of the second of two classes
        fits = makes_images or max(2, classes) >= num_classes
    if not fits:
        what = compares if compares in ROW_KINDS else "classes"
        raise ConfigError(
            f"model.classes={classes} does not fit the data, which has {num_classes} {what} "
            f"({listed(names, _NAMED)}); leave model.classes out"
        )
    config = _with_model_classes(config, classes)
    if config.task.name not in ONE_PASS and config.epochs is None:
        return config
    steps, counted = one_pass(length, config.batch), None
    if config.epochs is not None:
        passes = Fraction(str(config.epochs))  # 1.1 of 10 images are 11
        steps, counted = math.ceil(passes * length / config.batch), config.measure.steps
    warmup = min(config.measure.warmup, steps - (counted or 1))
    measure = replace(config.measure, warmup=max(0, warmup), steps=counted)
    return replace(config, measure=measure, steps=steps, epochs=None)


def saves_end(config: RunConfig) -> bool:
    """Whether ``checkpoint.at_end=auto`` of a config is ``always``.

    A short run on synthetic images measures a layout; its weights are of no use.
    """
    learns = config.data.name != "synthetic" or config.epochs is not None or config.validates
    return config.task.name == "train" and learns


def size_of(config: RunConfig, seen: dict[str, DataSize]) -> DataSize:
    """Returns how much the data of a run holds; it is opened unless it was ``seen``."""
    key = _size_key(config)
    if key not in seen:
        from hires.data.opening import open_data

        source = open_data(config)
        seen[key] = DataSize(source.num_classes, len(source), getattr(source, "class_names", ()))
    return seen[key]


def training_overlap(config: RunConfig) -> Iterator[Finding]:
    """Yields findings on the run that trained the weights of an evaluation or prediction.

    Images that both read are a note for predictions and for ``data.split=train``, else a warning.
    ``config`` is complete (``resolve_data``).
    """
    if config.task.name not in ONE_PASS:
        return
    training = training_of(config)
    named = training is not None and training[1].data.class_names is not None
    if config.weights and config.data.order is None and _names_classes(config) and not named:
        text = (
            f"weights={config.weights} has no names of its classes, so those of the data were not "
            f"compared with them; data.order=[NAME,...] names its outputs"
        )
        yield Finding("note", "data.order", text)
    if training is not None and _reads_same_images(config, training[1]):
        evaluates = config.task.name == "evaluate"
        does, means = ("evaluates", "its numbers") if evaluates else ("predicts", "predictions")
        division = ", ".join(f"data.{name}" for name in keys_with(DataConfig, "divides"))
        text = (
            f"{training[0]} trains with images that this {does} (data.split="
            f"{training[1].data.split} of its run), so {means} are better than those of new "
            f"images; train with data.split=train (validate.every sets it), and use "
            f"data.split=validation and the {division} of its run"
        )
        severity = "warning" if evaluates and config.data.split != "train" else "note"
        yield Finding(severity, "data.split", text)


def _size_key(config: RunConfig) -> str:
    data = {key: value for key, value in vars(config.data).items() if key not in _OF_PIXELS}
    facts = {**data, "channels": config.model.channels, "loss": config.objective.compares}
    return json.dumps(facts, sort_keys=True)


def _names_classes(config: RunConfig) -> bool:
    """Whether a run compares classes, or predicts them, of data whose classes have names."""
    named = config.data.name != "masks" or config.data.class_names is not None
    labelled = config.data.has_labels and config.objective.compares in (CLASSES, *ROW_KINDS)
    return labelled and named and not _is_made(config.data)


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
        return _with_data(config, names=order if len(order) == config.data.num_classes else None)
    if not _names_classes(config):
        return config
    size = size_of(config, seen)
    config = _with_model_classes(config, config.model.classes or training[1].model.classes)
    if [*size.names] == order:
        return config
    if others := [name for name in size.names if name not in order]:
        remedy = "leave their images out, or give them names that it has (data.names)"
        if config.task.name == "predict":
            remedy = "predict them with data=images, or rename them"
        elif config.task.name == "train":
            remedy += "; data.order=[NAME,...] trains its outputs as other classes"
        wrong, theirs, ours = (listed(some, _NAMED) for some in (others, order, size.names))
        raise ConfigError(
            f"data={config.data.name} has {wrong}, which {training[0]} does not have: "
            f"its classes are {theirs}, and those of the data {ours}; {remedy}"
        )
    config = _with_data(config, order=order)
    seen[_size_key(config)] = DataSize(len(order), size.images, tuple(order))
    return config


def _as_trained(config: RunConfig) -> RunConfig:
    """Returns the config with what an inference must share with the run that it has its weights of.

    These are the classes of the network, if the data has none, the normalisation of images, and
    what an image has. ConfigError: the data has something else.
    """
    run = run_of_weights(config.weights or "")
    if not config.weights or config.task.name not in INFERENCE or run is None:
        return config
    trained = read_config(run)
    if config.data.normalize == "white" and config.data.mean is None:
        config = _with_data(config, mean=trained.data.mean, std=trained.data.std)
    data, targets = config.data, trained.data.targets
    if config.task.name in ONE_PASS and data.targets != targets:
        if data.targets != "class" or "targets" not in keys_of(DataConfig, data.name):
            raise ConfigError(
                f"data={data.name} has data.targets={data.targets}, and weights={config.weights} "
                f"learned data.targets={targets}; use data=images with such a table in "
                f"data.labels, or without one for task=predict"
            )
        config = _with_data(config, targets=targets)
    if config.data.has_labels:
        return config
    if config.data.names is None:
        config = _with_data(config, names=trained.data.class_names)
    return _with_model_classes(config, config.model.classes or trained.model.classes)


def _with_statistics(config: RunConfig) -> RunConfig:
    """Returns the config with the means and deviations that ``data.normalize=dataset`` asks for."""
    if config.data.normalize != "dataset" or config.data.mean is not None:
        return config
    from hires.data.content import HAS_FILES, content_of
    from hires.data.statistics import channel_statistics, learnt_from

    def show(done: int, of: int) -> None:
        if done % 16 == 0:
            print_activity(f"reading the images for their mean and deviation: {done} of {of}")

    learnt = learnt_from(config)
    files = content_of(learnt.data).digest if config.data.name in HAS_FILES else ""
    facts = [files, vars(learnt.data), config.image, config.model.channels, config.seed]
    key = mark_of(facts)[:32]
    statistics = cached("statistics", key)
    if statistics is None:
        statistics = [*channel_statistics(config, show)]
        print_activity("")
        keep("statistics", key, statistics)
    return _with_data(config, mean=statistics[0], std=statistics[1])


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
    division = keys_with(DataConfig, "divides")
    return any(getattr(ours, name) != getattr(theirs, name) for name in division)


def _source(config: RunConfig) -> list[object]:
    data = config.data
    if _is_made(data):
        return [data.name, data.num_classes, data.length, config.seed]
    path = None if data.path is None else Path(data.path).expanduser().resolve()
    return [path, data.name, *(getattr(data, name) for name in keys_with(DataConfig, "source"))]


def _is_made(data: DataConfig) -> bool:
    """Whether images are made from the seed of the run."""
    return "length" in keys_of(DataConfig, data.name)


def _with_data(config: RunConfig, **values: Any) -> RunConfig:
    return replace(config, data=replace(config.data, **values))


def _with_model_classes(config: RunConfig, classes: int | None) -> RunConfig:
    return replace(config, model=replace(config.model, classes=classes))


def path_of_weights(source: str, results: StrPath) -> str:
    """Returns the path that ``weights=`` takes for what a user names; ConfigError: no such run."""
    if Path(source).exists() or Path(source).suffix in (*SAFETENSORS, *PICKLES):
        return source
    inside = f"/{file_names.CHECKPOINTS}/"
    run, _, step = source.rpartition(inside)
    if run:
        return f"{path_of_weights(run, results)}{inside}{step}"
    run, _, last = source.rstrip("/").rpartition("/")
    if run and last in (BEST, EMA):
        return f"{path_of_weights(run, results)}/{last}"
    return str(rundir.locate(source, results))


def run_of_weights(weights: str) -> Path | None:
    """Returns the run folder that has written some weights; None: they are a file or a copy."""
    path = Path(weights)
    folders = [path, *list(path.parents)[:3]]  # of RUN/checkpoints/step000012/ema and the like
    return next((one for one in folders if rundir.is_run(one)), None)


def words_of_training(words: Sequence[str], calibrates: bool = False) -> list[str]:
    """Returns the words that an inference with the weights of a run has of it, before its own.

    They are those of its network and image, unless ``model`` is among ``words``; and of an
    evaluation those of its data, unless these are: the part that the run did not learn from, or
    with ``calibrates`` the part that it did.
    """
    typed = {key_in(word): word.partition("=")[2] for word in words}
    task, weights = typed.get("task", typed.get("task.name")), typed.get("weights")
    run = None if weights is None else run_of_weights(weights)
    if task not in INFERENCE or run is None:
        return []
    try:
        trained = read_config(run)
    except HiresError:
        return []
    held, taken = naming.identity(naming.plain(trained)), dict[str, Any]()
    if not typed.keys() & {"model", "model.name", "model.target"}:
        taken |= {name: held[name] for name in ("model", "image") if name in held}
    if (calibrates or task == "evaluate") and not typed.keys() & {"data", "data.name", "data.path"}:
        data = {key: one for key, one in held.get("data", {}).items() if key not in _OF_TRAINING}
        learns = trained.validates or trained.data.split == "train"
        part = "train" if calibrates else "validation"
        taken["data"] = {**data, "split": part if learns else trained.data.split}
        if _is_made(trained.data) and "seed" in held:
            taken["seed"] = held["seed"]
    return naming.overrides({}, taken)


def training_of(config: RunConfig) -> tuple[str, RunConfig] | None:
    """Returns the run that trained the parameters in a few words, and its config.

    None: no run did, or nothing is left of it but its weights.
    """
    source = config.weights or config.checkpoint.source
    run = None if source is None else run_of_weights(source)
    if run is None:
        return None
    try:
        trained = records.read_config(run)
    except HiresError:
        return None
    if trained.task.name != "train":
        return None
    return f"the run of {'weights=' if config.weights else ''}{source}", trained


def trained_network(config: RunConfig) -> str:
    """Returns in words the network of the run that has written ``weights``, if it is another one.

    Nothing if it is the same, or no run is known.
    """
    training = training_of(config)
    if training is None:
        return ""
    ours, theirs = (to_dict(one)["model"] for one in (config, training[1]))
    words = [f"model.{key}={written(theirs[key])}" for key in ours if ours[key] != theirs[key]]
    return f"its run trained the network of {' '.join(words)}" if words else ""
