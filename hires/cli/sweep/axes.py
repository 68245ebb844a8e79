"""Reads the values of every key of a sweep, and forms their combinations.

Words are Hydra's: commas separate values except inside brackets, braces and quotes, and
``choice()``, ``range()`` and ``glob()`` work too. What comes out are words with one value each.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hires.cli.compose.choices import Groups, offer
from hires.cli.compose.overrides import checked, parsed
from hires.core.config.value_checks import Checks
from hires.core.errors import ConfigError

MOST_POINTS = 100_000
"""A sweep of more points is taken for a mistake."""
ONE_FOR_ALL = ("campaign", "results")
"""Keys that have one value in a sweep, which is recorded in one folder."""

_WORD = re.compile(r"(?P<sign>\+{0,2})(?P<key>[^=+~]+)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class SweepAxis:
    """One key, or several that change together, and what they take one after the other."""

    keys: tuple[str, ...]
    steps: tuple[tuple[str, ...], ...]
    """Words with one value each, one for every key; nothing deletes."""

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True)
class SweepGrid:
    """The axes of a sweep, the first of which changes slowest."""

    axes: tuple[SweepAxis, ...]

    @property
    def varied(self) -> list[SweepAxis]:
        """The axes with several values."""
        return [axis for axis in self.axes if len(axis) > 1]

    def places(self) -> Iterator[tuple[int, ...]]:
        """Yields the place of every point, one number for each axis."""
        return itertools.product(*(range(len(axis)) for axis in self.axes))

    def words(self, place: tuple[int, ...]) -> list[str]:
        """Returns the overrides of a point."""
        steps = (axis.steps[at] for axis, at in zip(self.axes, place, strict=True))
        return [word for step in steps for word in step]


def grid_of(words: Sequence[str], zipped: Sequence[str], groups: Groups) -> SweepGrid:
    """Returns the axes that the words on a command line describe.

    Args:
        words: overrides, each with one or several values; a later one replaces an earlier one of
            the same key.
        zipped: keys with commas between them, as ``image,batch``, whose values are paired.
        groups: group -> choices, see :func:`hires.cli.compose.choices.groups`.

    Raises:
        ConfigError: a word is no override, or one of its values is unknown.
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
    grid = SweepGrid(tuple(axes.values()))
    count = math.prod(len(axis) for axis in grid.axes)
    if count > MOST_POINTS:
        raise ConfigError(
            f"the sweep has {count} points and {MOST_POINTS} is the most; use fewer values, or "
            f"pair some with --zip"
        )
    return grid


def _axis(word: str, groups: Groups) -> SweepAxis:
    match = _WORD.fullmatch(word)
    if match is None:  # a deletion, or no override at all
        checked([word], groups)
        return SweepAxis((word.lstrip("~").split("=")[0],), ((word,),))
    key = match["key"]
    values = _values(word, match["value"], groups.get(key, {}))
    if key in ONE_FOR_ALL and len(values) > 1:
        raise ConfigError(f"{word} gives a sweep {len(values)} values of {key}; it has one")
    made = [f"{match['sign']}{key}={value}" for value in dict.fromkeys(values)]
    check = Checks()
    usable = [check(checked, [one], groups) for one in made]
    check.done()
    if key in groups:  # in the order of its parts, as sp+gems for gems+sp
        made = [one[0] for one in usable if one]
    return SweepAxis((key,), tuple((one,) for one in made))


def _values(word: str, text: str, choices: dict[str, str]) -> list[str]:
    """Returns the values of a word as one would type each of them alone."""
    override = parsed(word)
    if override is None:
        if "," in text and text[:1] not in "'\"":
            raise ConfigError(
                f"{word!r} cannot be read as a list of values; put each value that holds spaces, "
                f"brackets or other signs in quotes, as key=\"'a b','c d'\""
            )
        return [text]  # text that is quoted when it is composed, as for one run
    if not override.is_sweep_override():
        return [text]
    values = _listed(word, override, choices)
    if not values:
        raise ConfigError(f"{word} holds no value")
    if len(values) > MOST_POINTS:
        raise ConfigError(f"{word} holds more than {MOST_POINTS} values; use a larger step")
    return values


def _listed(word: str, override: Any, choices: dict[str, str]) -> list[str]:
    from hydra.core.override_parser.types import Glob
    from hydra.errors import HydraException

    value = override._value  # Hydra has no other way to the names of a glob
    if isinstance(value, Glob):
        names = value.filter(list(choices))
        if not names:
            raise ConfigError(f"{word} fits no choice; {offer(word, choices) if choices else word}")
        return names
    if not override.is_discrete_sweep():
        raise ConfigError(f"{word} is an interval without single values; use range() or commas")
    try:
        return list(itertools.islice(override.sweep_string_iterator(), MOST_POINTS + 1))
    except (HydraException, ValueError) as error:
        raise ConfigError(f"{word} holds no values: {error}") from None


def _zip(keys: str, by_key: dict[str, SweepAxis]) -> None:
    """Joins the axes of some keys to one, in the place of the first."""
    names = [name.strip() for name in keys.split(",")]
    for name in names:
        if name not in by_key:
            raise ConfigError(
                f"--zip {keys}: {name!r} is given no values; {offer(name, by_key)}"
                if by_key
                else f"--zip {keys}: no key is given values; write them as {name}=1,2"
            )
    axes = [by_key[name] for name in names]
    if len(set(names)) < 2:
        raise ConfigError(f"--zip {keys} pairs keys; name two or more, as --zip image,batch")
    counts = {len(axis) for axis in axes}
    if len(counts) > 1:
        have = ", ".join(f"{name} {len(axis)}" for name, axis in zip(names, axes, strict=True))
        raise ConfigError(f"--zip {keys} pairs values, but their numbers differ: {have}")
    joined = tuple(
        tuple(itertools.chain.from_iterable(parts))
        for parts in zip(*(axis.steps for axis in axes), strict=True)
    )
    for name in names[1:]:
        del by_key[name]
    by_key[names[0]] = SweepAxis(tuple(names), joined)
