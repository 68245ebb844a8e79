"""Checks overrides before Hydra, whose own answers to a typo mislead ("use +paralel=...").

Keys that the run of a command does not read are named, too.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from hires.cli.choices import ALIASES, EXPERIMENTS, Groups, config_keys, shipped_groups
from hires.core.config.fields import Checks, Section, changed_keys
from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import ONE_PASS, MeasureConfig
from hires.core.errors import ConfigError
from hires.core.registry import nearest, offer
from hires.plan.plan import Finding

_ASSIGNMENT = re.compile(r"^(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w./-]*)=(?P<value>.*)$", re.DOTALL)


@functools.cache
def free_keys() -> tuple[str, ...]:
    """Returns the beginnings of keys whose names users choose, as ``model.args.``."""
    return tuple(f"{name}." for name, key in config_keys().items() if "dict" in str(key.hint))


def checked(words: list[str], groups: Groups) -> list[str]:
    """Returns overrides as Hydra takes them; raises ConfigError with all that cannot be used.

    Text that Hydra cannot read, as a path with spaces, is quoted; free keys get their ``++``.
    """
    check = Checks()
    good: list[str] = []
    taken = in_force(words)
    for word in words:
        usable = check(_checked_word, word, groups)
        if usable is not None and word in taken:
            good.append(usable)
    check.done()
    return good


def in_force(words: Iterable[str]) -> list[str]:
    """Returns words without each ``~KEY`` and those of KEY before it, which has its default."""
    kept: list[str] = []
    for word in words:
        if word.startswith("~"):
            kept = [one for one in kept if key_in(one) != key_in(word)]
        else:
            kept.append(word)
    return kept


def key_in(word: str) -> str:
    """Returns the key that a word sets, chooses or deletes."""
    return word.lstrip("+~").partition("=")[0]


def is_key(word: str) -> bool:
    """Whether a word, as :func:`checked` returns it, sets a key, and chooses nothing."""
    key = word.lstrip("+").partition("=")[0]
    return key in config_keys() or key.startswith(free_keys())


@functools.lru_cache(maxsize=65536)
def parsed(word: str) -> Any | None:
    """Returns Hydra's ``Override`` of a word; None if its grammar cannot read the word."""
    # Imported here: it takes a tenth of a second, which the shell completion does not have.
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def _checked_word(word: str, groups: Groups) -> str:
    """Returns one word as Hydra takes it."""
    if len(word.splitlines()) > 1:
        raise ConfigError(
            f"{word!r} has a line break, which the line that repeats a run cannot hold; leave it "
            f"out, or rename the file"
        )
    if word.startswith("~"):
        _check_key(key_in(word), groups)
        if "=" in word:
            key = key_in(word)
            raise ConfigError(
                f"{word} has a value, and a ~ takes none; write ~{key}, with which {key} has its "
                f"default again, or {key}=VALUE"
            )
        return word
    match = _ASSIGNMENT.match(word)
    if match is None:
        raise ConfigError(_no_override(word, groups))
    key, value = match["key"], match["value"]
    if key in ("optimizer", "optimizer.name") and value.lower() in groups["optimizer"]:
        key, value = "optimizer", value.lower()  # with the learning rate of that class
    if key in groups:
        parts = sorted(value.split("+"))  # sp+gems for gems+sp
        same = [name for name in groups[key] if sorted(name.split("+")) == parts]
        value = same[0] if same and len(parts) > 1 else value
        _check_choice(key, value, groups[key])
    else:
        _check_key(key, groups)
    word = f"{match['sign']}{key}={value}"
    type_words = (config_keys()[key].type or "") if key in config_keys() else ""
    override = parsed(word)
    if override is None and type_words == "text":
        from hydra.core.override_parser.types import Quote, QuotedString

        return f"{key}={QuotedString(value, Quote.single).with_quotes()}"
    if override is None:
        raise ConfigError(
            f"{word!r} cannot be read; put a value with spaces or brackets in quotes, as "
            f"'key=[2,2]'"
        )
    takes_list = type_words.startswith("a list") or key in ("image", "parallel.tiles")
    if override.is_sweep_override():
        why = "names several values and one run takes one; quote a comma that belongs to it"
        if takes_list:
            why = f"needs brackets; write '{key}=[{value}]'"
        raise ConfigError(f"{key}={value} {why}, or run one after the other with `hires sweep`")
    if f"{key}.".startswith(free_keys()):
        return f"++{key}={value}"
    # Every key has a default, so a + has nothing to add, except a group of --config-dir.
    has_default = key in config_keys() or key in shipped_groups()
    return f"{key}={value}" if has_default else f"+{key}={value}"


def _check_key(key: str, groups: Groups) -> None:
    known = config_keys()
    if key in known or key in groups or key.startswith(free_keys()):
        return
    if key == EXPERIMENTS:
        raise ConfigError(f"{key}=NAME is a stored sweep; start it with hires sweep {key}=NAME")
    if inside := [name for name in known if name.startswith(f"{key}.")]:
        raise ConfigError(f"{key} is several keys, not one; set one of {', '.join(inside)}")
    for word, (ours, what) in ALIASES.items():
        if word.partition("=")[0] == key:
            name = ours.partition("=")[0]
            raise ConfigError(f"unknown key {key!r}: hires calls it {name} ({what})")
    names = [*known, *groups]
    hits = nearest(key, names) or [n for n in names if n.split(".")[-1] == key.split(".")[-1]]
    remedy = f"did you mean {' or '.join(hits)}?"
    if not hits:
        remedy = "`hires list keys` shows every key with its default"
    raise ConfigError(f"unknown key {key!r}; {remedy}")


def _check_choice(group: str, value: str, choices: dict[str, str]) -> None:
    name = value.strip("'\"")
    if name in choices:
        return
    if group == "data" and ("/" in name or Path(name).is_dir()):
        raise ConfigError(f"data={name} names a kind of data; write data=folder data.path={name}")
    # An offer of the nearest choices is followed by all of them.
    every = f" (all: {', '.join(choices)})" if nearest(name, choices) else ""
    raise ConfigError(f"unknown {group} {name!r}; {offer(name, choices)}{every}")


def _no_override(word: str, groups: Groups) -> str:
    for group, choices in groups.items():
        if word in choices:
            return f"{word!r} is not an override; did you mean {group}={word}?"
    if word in config_keys() or word in groups:
        return f"{word!r} has no value; write {word}=VALUE"
    return f"{word!r} is not an override; write key=value, as batch=8 (see `hires list keys`)"


def idle_keys(config: RunConfig, words: Iterable[str]) -> Iterator[Finding]:
    """Yields a note for each key among the typed ``words`` that a config does not read.

    ``config`` has the steps of its one pass (``resolve_data``).
    """
    typed, warmup = {*map(key_in, in_force(words))}, config.measure.warmup
    left = config.steps - (config.measure.steps or 1)
    if "steps" in typed and warmup == left < MeasureConfig.warmup:
        text = f"measure.warmup={warmup}, as steps={config.steps} leaves no more to measure"
        yield Finding("note", "measure.warmup", text)
    if config.task.name in ("calibrate", *ONE_PASS) and "steps" in typed:
        reads = f"takes quant.images={config.quant.images}"
        if config.task.name in ONE_PASS:
            reads = f"makes one pass over its data, {config.steps} steps of batch={config.batch}"
        text = f"steps does nothing: task={config.task.name} {reads}"
        yield Finding("note", "steps", text)


def require_read_keys(config: RunConfig, words: Iterable[str] = ()) -> None:
    """Raises ConfigError with the keys that a config sets, or ``words`` type, and no code reads.

    A default that is typed counts, too: one point of a sweep over the key would have it.
    """
    typed, problems = {*map(key_in, in_force(words))}, list[str]()

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
