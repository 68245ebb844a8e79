"""Names the keys of a command that the run which it starts does not read."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
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
    typed, problems = {*map(key_in, words)}, list[str]()

    def is_set(section: Section, key: str) -> bool:
        return _name(section, key) in typed or key in dict(changed_keys(section))

    for whole in dataclasses.fields(config):
        section, task = getattr(config, whole.name), config.task.name
        if not isinstance(section, Section):
            continue
        fields = dataclasses.fields(cast(Any, section))
        problems += section.unread([f.name for f in fields if _name(section, f.name) in typed])
        for field in fields:
            tasks = field.metadata.get("tasks") or whole.metadata.get("tasks") or [task]
            needs = "" if task in tasks else " or ".join(f"task={one}" for one in tasks)
            needs = needs or _lacking(config, _name(section, field.name))
            if needs and is_set(section, field.name):
                item = getattr(section, field.name)
                shown = str(item).lower() if isinstance(item, bool) else item
                key = _name(section, field.name)
                problems.append(f"{key}={shown} needs {needs}; leave it out")
    if problems:
        raise ConfigError("; ".join(problems))


def _lacking(config: RunConfig, key: str) -> str:
    """Returns what a key of the data needs beside the task; nothing if it is read."""
    data = config.data
    divides = (data.split != "all" or config.validates) and data.split_file is None
    if key in ("data.groups", "data.detections", "data.outside") and "*" not in (data.labels or ""):
        return "outlines, as data.labels=annotations/*.geojson"
    if key == "data.stride" and data.cut != "patches":
        return "data.cut=patches"
    if key in ("data.validation", "data.test", "data.split_seed") and not divides:
        return "images that are divided by it: data.split or validate.every, without split_file"
    return ""


def _name(section: Section, key: str) -> str:
    return section._key if key == "name" else f"{section._key}.{key}"
