"""Reads the values of every key of a sweep, typed or stored, as words with one value each.

Words are Hydra's: commas separate values except inside brackets, braces and quotes.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hires.cli.choices import EXPERIMENTS, Groups, experiments
from hires.cli.compose_config import read_mapping
from hires.cli.overrides import checked, parsed
from hires.core.config.fields import Checks
from hires.core.errors import ConfigError
from hires.core.registry import offer

MOST_POINTS = 100_000
"""A sweep of more points is taken for a mistake."""
ONE_FOR_ALL = ("campaign", "results")
"""Keys that have one value in a sweep, which is recorded in one folder."""
OPTIONS: dict[str, type | tuple[type, ...]] = {
    "zip": list,
    "first": list,
    "where": str,
    "repeat": int,
    "order": str,
    "max_parallel": int,
}
"""Options that a stored sweep may hold, and what each must be."""
_WORD = re.compile(r"(?P<sign>\+{0,2})(?P<key>[^=+~]+)=(?P<value>.*)", re.DOTALL)


class StoredSweep(NamedTuple):
    """What a file of ``conf/experiment`` holds.

    # What it compares, on the first line
    overrides:            # words as one types them, each with one or several values
      - model=resnet18
      - parallel=sp,sp+gems
    first: [task=train, steps=400, checkpoint.every=400]    # the run before each point
    zip: [image,batch]    # options of `hires sweep` by their names, all of them optional
    where: image * batch <= 8192
    repeat: 3
    """

    words: list[str]
    options: dict[str, Any]
    """Options of the verb by their names in its parser."""


class SweepAxis(NamedTuple):
    """One key, or several that change together, and what they take one after the other."""

    keys: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    """Words with one value each, one for every key; nothing deletes."""


def stored_sweep(words: Sequence[str], extra: Path | None) -> tuple[list[str], StoredSweep]:
    """Returns the words without ``experiment=NAME``, and what it stands for, also in ``extra``."""
    rest = [word for word in words if not _is_experiment(word)]
    names = [word.partition("=")[2].strip("'\"") for word in words if _is_experiment(word)]
    if not names:
        return rest, StoredSweep([], {})
    if len(names) > 1 or "," in names[0]:
        raise ConfigError(f"{EXPERIMENTS}={','.join(names)} names more than one; a sweep has one")
    files = experiments(extra)
    if names[0] not in files:
        raise ConfigError(f"unknown {EXPERIMENTS} {names[0]!r}; {offer(names[0], files)}")
    path, example = files[names[0]], "overrides: [model=resnet18]"
    values = read_mapping(path, example)
    if not values:
        raise ConfigError(f"{path} is empty; it must hold keys, as `{example}`")
    inside = _words_of(path, values.pop("overrides", []))
    options = {name.replace("-", "_"): value for name, value in values.items()}
    for name, value in options.items():
        if name not in OPTIONS:
            meant = offer(name, ["overrides", *OPTIONS])
            raise ConfigError(f"{path}: unknown key {name!r}; {meant}")
        if isinstance(value, bool) or not isinstance(value, OPTIONS[name]):
            why = "has the wrong type; see `hires sweep --help`"
            raise ConfigError(f"{path}: {name}={value!r} {why}")
    return rest, StoredSweep(inside, options)


def _words_of(path: Path, words: Any) -> list[str]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(f"{path}: overrides must be a list of words, as [model=resnet18]")
    for word in filter(_is_experiment, words):
        raise ConfigError(f"{path}: {word} names another experiment, which none may")
    return words


def _is_experiment(word: str) -> bool:
    return word.lstrip("+").startswith(f"{EXPERIMENTS}=")


def axes_of(words: Sequence[str], zipped: Sequence[str], groups: Groups) -> list[SweepAxis]:
    """Returns the axes of words, the first of which changes slowest; the last word of a key counts.

    The values of ``zipped`` keys, as ``image,batch``, are paired.
    """
    check = Checks()
    axes: dict[str, SweepAxis] = {}
    for word in words:
        axis = check(_axis, word, groups)
        if axis is not None:
            axes.pop(axis.keys[0], None)
            axes[axis.keys[0]] = axis
    check.done()
    for keys in zipped:
        check(_zip, keys, axes)
    check.done()
    count = math.prod(len(axis.steps) for axis in axes.values())
    if count > MOST_POINTS:
        raise ConfigError(
            f"the sweep has {count} points and {MOST_POINTS} is the most; use fewer values, or "
            f"pair some with --zip"
        )
    return list(axes.values())


def _axis(word: str, groups: Groups) -> SweepAxis:
    match = _WORD.fullmatch(word)
    if match is None:  # a deletion, or no override at all
        checked([word], groups)
        return SweepAxis((word.lstrip("~").split("=")[0],), ((word,),))
    key = match["key"]
    values = _values(word, match["value"], groups.get(key, {}))
    if key in ONE_FOR_ALL and len(values) > 1:
        raise ConfigError(f"{word} gives a sweep {len(values)} values of {key}; it has one")
    words = [f"{match['sign']}{key}={value}" for value in dict.fromkeys(values)]
    usable = checked(words, groups)
    if key in groups:  # in the order of its parts, as sp+gems for gems+sp
        words = usable
    return SweepAxis((key,), tuple((one,) for one in words))


def _values(word: str, text: str, choices: dict[str, str]) -> list[str]:
    """Returns the values of a word as one would type each of them alone."""
    override = parsed(word)
    if override is None and "," in text and text[:1] not in "'\"":
        raise ConfigError(
            f"{word!r} cannot be read as a list of values; put each value that holds spaces, "
            f"brackets or other signs in quotes, as key=\"'a b','c d'\""
        )
    if override is None or not override.is_sweep_override():
        return [text]  # text that Hydra cannot read is quoted when it is composed, as for one run
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    value = override._value  # Hydra has no other way to the names of a glob
    if isinstance(value, Glob):
        values = value.filter(list(choices))
    elif not override.is_discrete_sweep():
        raise ConfigError(f"{word} is an interval without single values; use range() or commas")
    else:
        try:
            values = list(itertools.islice(override.sweep_string_iterator(), MOST_POINTS + 1))
        except (HydraException, ValueError) as error:
            raise ConfigError(f"{word} holds no values: {error}") from None
    if not values:
        raise ConfigError(f"{word} holds no value{f'; {offer(word, choices)}' if choices else ''}")
    if len(values) > MOST_POINTS:
        raise ConfigError(f"{word} holds more than {MOST_POINTS} values; use a larger step")
    return values


def _zip(keys: str, by_key: dict[str, SweepAxis]) -> None:
    names = [name.strip() for name in keys.split(",")]
    for name in names:
        if name not in by_key:
            meant = offer(name, by_key) if by_key else f"write them as {name}=1,2"
            raise ConfigError(f"--zip {keys}: {name!r} is given no values; {meant}")
    axes = [by_key[name] for name in names]
    if len(set(names)) < 2:
        raise ConfigError(f"--zip {keys} pairs keys; name two or more, as --zip image,batch")
    if len({len(axis.steps) for axis in axes}) > 1:
        have = ", ".join(f"{name} {len(by_key[name].steps)}" for name in names)
        raise ConfigError(f"--zip {keys} pairs values, but their numbers differ: {have}")
    steps = zip(*(axis.steps for axis in axes), strict=True)
    for name in names[1:]:
        del by_key[name]
    by_key[names[0]] = SweepAxis(tuple(names), tuple(sum(parts, ()) for parts in steps))
