"""How are single values of a config checked?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hires.core.errors import ConfigError

T = TypeVar("T")


class Checks:
    """Runs checks one after the other, and tells all that failed at once."""

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


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a name that is not among the choices."""
    if value not in choices:
        raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(choices)}")


def check_word(key: str, value: str | None) -> None:
    """Refuses text that no line of a job script can hold."""
    if value is not None and (not value or not value.isprintable()):
        raise ConfigError(f"{key}={value!r} must be a name on one line, or null")
