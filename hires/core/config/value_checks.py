"""Checks the single values of a config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from hires.core.errors import ConfigError

T = TypeVar("T")


class Checks:
    """Runs checks one after the other and reports all that failed at once."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __call__(self, check: Callable[..., T], *args: Any) -> T | None:
        """Returns what a check returns; None if it failed."""
        try:
            return check(*args)
        except ConfigError as error:
            self.problems.append(str(error))
            return None

    def done(self) -> None:
        """Raises ConfigError if some check failed."""
        if self.problems:
            raise ConfigError("; ".join(self.problems))


def at_least(key: str, value: int, low: int) -> None:
    """Refuses a number below ``low``."""
    if value < low:
        raise ConfigError(f"{key}={value} must be at least {low}")


def at_most(key: str, value: int, high: int, what: str = "") -> None:
    """Refuses a number above ``high``, of which ``what`` says what it is."""
    if value > high:
        raise ConfigError(f"{key}={value} must be at most {high}{what}")


def choice(default: str | None, choices: tuple[str, ...]) -> Any:
    """Returns a dataclass field that takes one of some names, and None only if that is its default.

    :func:`check_choices` refuses other values; ``hires list keys`` shows the names.
    """
    return dataclasses.field(default=default, metadata={"choices": choices})


def check_choices(section: Any, prefix: str) -> None:
    """Refuses values that are not among the choices of their fields.

    Args:
        section: an instance of a config dataclass.
        prefix: its dotted key with the last dot, as ``parallel.halo.``.

    Raises:
        ConfigError: names every such key and its choices.
    """
    check = Checks()
    for field in dataclasses.fields(section):
        value, choices = getattr(section, field.name), field.metadata.get("choices")
        if choices is None or value in choices or (value is None and field.default is None):
            continue
        key = prefix.rstrip(".") if field.name == "name" else prefix + field.name
        problem = f"{key}={value!r} is unknown; choose one of {', '.join(choices)}"
        check.problems.append(problem)
    check.done()


def check_word(key: str, value: str | None) -> None:
    """Refuses text that no line of a job script can hold."""
    if value is not None and (not value or not value.isprintable()):
        raise ConfigError(f"{key}={value!r} must be a name on one line, or null")
