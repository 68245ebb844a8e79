"""Composes the configs of thousands of points in seconds.

Hydra takes tens of milliseconds for one config, nearly all of them for the groups. Points mostly
differ in plain values, as ``image=512``: Hydra composes the other words once, and those values are
set in its result. A value that Hydra would convert, or that may refer to others, is Hydra's.
"""

from __future__ import annotations

import copy
import functools
import typing
from pathlib import Path
from typing import Any

import yaml

from hires.cli.compose.choices import conf_dir, groups, keys
from hires.cli.compose.compose_config import composed, make_absolute
from hires.cli.compose.overrides import parsed

_REFERENCE = "${"
_MISSING = "???"


class Composer:
    """Composes the points of one sweep."""

    def __init__(self, config_dir: str | None) -> None:
        """Takes the folder of ``--config-dir``."""
        extra = Path(config_dir).expanduser() if config_dir else None
        self._config_dir = config_dir
        self._groups = groups(extra)
        self._hints = keys()
        folders = [conf_dir()] + ([extra] if extra is not None else [])
        files = [file for folder in folders for file in folder.rglob("*.yaml")]
        # A file that refers to a key must be resolved with that key's own value.
        self._refers = any(_REFERENCE in file.read_text(encoding="utf-8") for file in files)
        self._bases: dict[tuple[str, ...], dict[str, Any]] = {}
        self._defaults = _default_choices()

    def values(self, words: list[str]) -> dict[str, Any]:
        """Returns the plain values of a point.

        Raises:
            ConfigError: a word is misspelt or has the wrong type.
        """
        plain = self._plain(words)
        others = tuple(word for word in words if word.partition("=")[0] not in plain)
        if others not in self._bases:
            self._bases[others] = composed(list(others), self._config_dir)
        values = copy.deepcopy(self._bases[others])
        for key, value in plain.items():
            *path, last = key.split(".")
            functools.reduce(dict.__getitem__, path, values)[last] = copy.deepcopy(value)
        make_absolute(values)
        return values

    def choices(self, words: list[str]) -> dict[str, str]:
        """Returns the choice of every group at a point."""
        chosen = dict(self._defaults)
        for word in words:
            key, _, value = word.lstrip("+").partition("=")
            if key in self._groups:
                chosen[key] = value.strip("'\"")
        return chosen

    def _plain(self, words: list[str]) -> dict[str, Any]:
        """Returns the keys whose words all hold plain values of the declared type."""
        if self._refers or any(_REFERENCE in word for word in words):
            return {}
        plain: dict[str, Any] = {}
        odd = set()
        for word in words:
            key = word.partition("=")[0]
            is_key = key in self._hints and key not in self._groups
            override = parsed(word) if is_key else None
            if override is not None and _is_exactly(self._hints[key], override.value()):
                plain[key] = override.value()
            else:
                odd.add(key.lstrip("+~"))
        return {key: value for key, value in plain.items() if not _touched(key, odd)}


def _touched(key: str, others: set[str]) -> bool:
    """Whether words that take Hydra's way set a key, or what is below or above it."""
    return any(
        f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
        for other in others
        if "." in other or "." not in key
    )


def _is_exactly(hint: Any, value: Any) -> bool:
    """Whether a value has the declared type, so that nothing would convert it."""
    if isinstance(value, str):
        plain = "\\" not in value and value != _MISSING
        return plain and (hint is Any or hint in (str, str | None))
    if hint is Any or "list" in str(hint):
        return _is_numbers(value) and (hint is Any or isinstance(value, list))
    allowed = typing.get_args(hint) or (hint,)
    return type(value) in allowed or (type(value) is int and float in allowed)


def _is_numbers(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_numbers(item) for item in value)
    return type(value) is int


def _default_choices() -> dict[str, str]:
    """Returns the default choice of every group."""
    held = yaml.safe_load((conf_dir() / "config.yaml").read_text(encoding="utf-8"))
    return {
        group: choice
        for entry in held["defaults"]
        if isinstance(entry, dict)
        for group, choice in entry.items()
    }
