"""Builds config dataclasses from plain values, checks them, and reports all mistakes at once."""

from __future__ import annotations

import dataclasses
import functools
import typing
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


def build(cls: type[T], values: Any, prefix: str) -> T:
    """Returns an instance of a config dataclass, its fields checked one by one.

    Args:
        cls: the dataclass.
        values: by the names of its fields; those that are left out keep their defaults.
        prefix: what stands before the names in messages, as ``parallel.``.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type or makes no sense.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'the config'} must hold keys, not {values!r}")
    hints = typing.get_type_hints(cls)
    unknown = sorted(str(k) for k in values if k not in hints)
    if unknown:
        raise ConfigError(
            f"unknown key {prefix}{unknown[0]}; choose one of {', '.join(sorted(hints))}"
        )
    made, check = {}, Checks()
    for name, value in values.items():
        hint, num_problems = hints[name], len(check.problems)
        if dataclasses.is_dataclass(hint):
            checked = check(build, hint, value, f"{prefix}{name}.")
        else:
            checked = check(_checked, hint, value, prefix + name)
        if len(check.problems) == num_problems:
            made[name] = checked
    # With defaults in the place of what is wrong, the rest is checked too.
    built = check(functools.partial(cls, **made))
    check.done()
    assert built is not None
    return built


def _checked(hint: Any, value: Any, key: str) -> Any:
    """Returns the value as the type that the field declares."""
    if hint is Any:
        return value
    args = typing.get_args(hint)
    if type(None) in args:
        if value is None:
            return None
        hint = next(a for a in args if a is not type(None))
        args = typing.get_args(hint)
    origin = typing.get_origin(hint) or hint
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and origin is not bool
    if not isinstance(value, origin) or wrong_bool:
        raise ConfigError(f"{key}={value!r} must be {_type_words(hint)}")
    if origin is list:
        return [_checked(args[0], item, f"{key}[{i}]") for i, item in enumerate(value)]
    return value


def _type_words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a name", bool: "true or false"}
    if "list[str]" in str(hint):
        return "a list of names, as [a,b]"
    return names.get(hint, "a list of whole numbers, as [2,2]" if "list" in str(hint) else "keys")
