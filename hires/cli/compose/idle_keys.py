"""Names the keys of a command that the run which it starts does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator
from typing import Any, cast

from hires.cli.compose.overrides import key_in
from hires.core.config.fields import Section, changed_keys
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import ONE_PASS
from hires.core.errors import ConfigError
from hires.plan.plan import Finding


def idle_keys(config: RunConfig, words: Iterable[str]) -> Iterator[Finding]:
    """Yields a note for each key among the typed ``words`` that a config does not read.

    ``config`` has the steps of its one pass (``with_classes``).
    """
    typed = {*map(key_in, words)}
    if config.task.name == "calibrate" and "steps" in typed:
        text = (
            f"steps does nothing: task=calibrate takes as many as quant.images="
            f"{config.quant.images} need in batches of {config.batch}"
        )
        yield Finding("note", "steps", text)
    if config.task.name in ONE_PASS and "steps" in typed:
        text = (
            f"steps does nothing: task={config.task.name} makes one pass over its data, "
            f"{config.steps} steps of batch={config.batch}"
        )
        yield Finding("note", "steps", text)


def require_read_keys(config: RunConfig, words: Iterable[str] = ()) -> None:
    """Raises ConfigError with the keys that a config sets, or ``words`` type, and no code reads.

    A default that is typed counts, too: one point of a sweep over the key would have it.
    """
    typed = {*map(key_in, words)}
    problems = list[str]()
    for section in _sections(config):
        pairs = _pairs(section)
        problems += section.unread([key for key, _ in pairs if _name(section, key) in typed])
    for is_read, needs, keys in _readers(config):
        if is_read:
            continue
        found = [
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for section in _sections(config)
            for key, value in _pairs(section)
            if (name := _name(section, key)) in keys or section._key in keys
            if name in typed or key in {*dict(changed_keys(section))}
        ]
        if found:
            them = "it" if len(found) == 1 else "them"
            problems.append(f"{', '.join(found)} needs {needs}; leave {them} out")
    if problems:
        raise ConfigError("; ".join(problems))


def _readers(config: RunConfig) -> Iterator[tuple[bool, str, Collection[str]]]:
    """Yields whether sections and keys are read, and what reads them."""
    task, data = config.task.name, config.data
    learning: tuple[str, ...] = (
        "optimizer",
        "lr_schedule",
        "augment",
        "data.balance",
        "memory.checkpoint",
        "checkpoint.every",
    )
    learning += ("measure.tensorboard", "loss.weights", "loss.ignore_index")
    losses = ("loss.label_smoothing", "loss.smooth")
    outlines = ("data.groups", "data.detections", "data.outside")
    shares = ("data.validation", "data.test", "data.split_seed")
    orders = "task=train or task=infer, which may take images in another order"
    parts = "images that are divided by it: data.split or validate.every, without data.split_file"
    divides = (data.split != "all" or config.validates) and data.split_file is None
    yield task == "train", "task=train", learning
    yield task in ("train", "evaluate"), "task=train or task=evaluate", losses
    yield task not in ONE_PASS, orders, ("data.shuffle",)
    labels = "outlines, as data.labels=annotations/*.geojson"
    yield "*" in (data.labels or ""), labels, outlines
    yield data.cut == "patches", "data.cut=patches", ("data.stride",)
    yield divides, parts, shares


def _sections(config: RunConfig) -> list[Section]:
    values = [getattr(config, one.name) for one in dataclasses.fields(config)]
    return [value for value in values if isinstance(value, Section)]


def _pairs(section: Section) -> list[tuple[str, Any]]:
    fields = dataclasses.fields(cast(Any, section))
    return [(one.name, getattr(section, one.name)) for one in fields]


def _name(section: Section, key: str) -> str:
    return section._key if key == "name" else f"{section._key}.{key}"
