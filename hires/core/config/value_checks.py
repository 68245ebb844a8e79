"""Builds dataclasses from plain values, checks these, and reports all mistakes at once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, TypeVar

from hires.core.errors import ConfigError
from hires.core.units import parse_size

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


def choice(default: str | None, choices: Iterable[str]) -> Any:
    """Returns a field that takes one of some names, and None only if that is its default.

    The names may be a registry that another package fills: while it is empty nothing is refused,
    since looking up a name in it refuses an unknown one, too.
    """
    return dataclasses.field(default=default, metadata={"choices": choices})


def number(default: float | None, least: int = 0, most: int | None = None, unit: str = "") -> Any:
    """Returns a field that takes numbers from ``least`` to ``most``; ``unit`` follows ``most``."""

    def check(key: str, value: int) -> None:
        if value < least:
            raise ConfigError(f"{key}={value} must be at least {least}")
        if most is not None and value > most:
            raise ConfigError(f"{key}={value} must be at most {most}{unit}")

    return dataclasses.field(default=default, metadata={"check": check})


def real(default: float, *, above_zero: bool = False, unit: str = "") -> Any:
    """Returns a field that takes finite numbers of at least 0, or only those above 0."""

    def check(key: str, value: float) -> None:
        # Every comparison with nan is false, so the check is for valid values, not for wrong ones.
        if not (0 < value < math.inf if above_zero else 0 <= value < math.inf):
            least = f"above 0{unit}" if above_zero else f"0{unit} or more"
            raise ConfigError(f"{key}={value} must be {least}, and finite")

    return dataclasses.field(default=default, metadata={"check": check})


def word(default: str | None = None) -> Any:
    """Returns a field that takes text which fits on a line of a job script, or None."""
    return dataclasses.field(default=default, metadata={"check": check_word})


class Section:
    """A section of the config: its fields are checked as they are declared.

    It is declared with its dotted key, as ``class HaloConfig(Section, key="parallel.halo")``.
    """

    _key: ClassVar[str] = ""

    def __init_subclass__(cls, key: str = "") -> None:
        cls._key = key

    def __post_init__(self) -> None:
        check = Checks()
        for field in dataclasses.fields(typing.cast(Any, self)):
            check(self._check_field, field)
        self.check_more(check)
        check.done()

    def check_more(self, check: Checks) -> None:
        """Runs the checks that concern several fields, or a single one in its own way."""

    def _check_field(self, field: dataclasses.Field[Any]) -> None:
        value, choices = getattr(self, field.name), tuple(field.metadata.get("choices", ()))
        if value is None and field.default is None:
            return
        key = f"{self._key}.{field.name}" if self._key else field.name
        if field.name == "name":
            key = self._key  # as one types it: launcher=slurm
        if choices and value not in choices:
            raise ConfigError(f"{key}={value!r} is unknown; choose one of {', '.join(choices)}")
        if "check" in field.metadata:
            field.metadata["check"](key, value)


def check_word(key: str, value: str) -> None:
    """Refuses text that no line of a job script can hold."""
    if not value or not value.isprintable():
        raise ConfigError(f"{key}={value!r} must be a name on one line, or null")


def _check_size(key: str, value: Any) -> None:
    if parse_size(value) is None:
        raise ConfigError(
            f"{key}={value!r} is no size; give bytes, or a number and a unit as 4GiB or 800MB"
        )


SIZE = {"check": _check_size}
"""Metadata of a field that takes a size in bytes or as text such as 4GiB."""


def build(cls: type[T], values: Any, prefix: str = "") -> T:
    """Returns an instance of a dataclass, its fields checked one by one.

    Args:
        cls: the dataclass.
        values: by the names of its fields; those that are left out keep their defaults.
        prefix: what stands before the names in messages, as ``parallel.``.

    Raises:
        ConfigError: a key is unknown or a value has the wrong type or makes no sense.
    """
    if not isinstance(values, dict):
        raise ConfigError(f"{prefix.rstrip('.') or 'the config'} must hold keys, not {values!r}")
    hints = _hints(cls)
    unknown = sorted(str(k) for k in values if k not in hints)
    if unknown:
        raise ConfigError(
            f"unknown key {prefix}{unknown[0]}; choose one of {', '.join(sorted(hints))}"
        )
    made, check = {}, Checks()
    for name, value in values.items():
        num_problems = len(check.problems)
        checked = check(_typed, hints[name], value, prefix + name, build)
        if len(check.problems) == num_problems:
            made[name] = checked
    # With defaults in the place of what is wrong, the rest is checked too.
    built = check(functools.partial(cls, **made))
    check.done()
    assert built is not None
    return built


def build_usable(cls: type[T], values: Any, prefix: str = "") -> T:
    """Returns an instance of a dataclass or NamedTuple from those values that can be used.

    Unknown keys, wrong values and wrong entries of lists are left out; a NamedTuple may be a list.

    Raises:
        ConfigError: a field without a default has no value that can be used.
    """
    fields = getattr(cls, "_fields", ())
    if isinstance(values, list) and fields:
        values = dict(zip(fields, values, strict=False))
    made, hints = {}, _hints(cls)
    for name, value in values.items() if isinstance(values, dict) else ():
        if name in hints:
            with contextlib.suppress(ConfigError):
                made[name] = _typed(hints[name], value, prefix + str(name), build_usable)
    try:
        return cls(**made)
    except TypeError as error:
        raise ConfigError(f"{prefix.rstrip('.') or 'it'} is incomplete: {error}") from None


def _hints(cls: type) -> dict[str, Any]:
    """Returns the declared types of a dataclass or NamedTuple by the names of its fields."""
    hints = typing.get_type_hints(cls)
    names = getattr(cls, "_fields", None) or [field.name for field in dataclasses.fields(cls)]
    return {name: hints[name] for name in names}


def _typed(hint: Any, value: Any, key: str, nested: Callable[..., Any]) -> Any:
    """Returns the value as the type that a field declares; ``nested`` builds dataclasses in it."""
    if hint is Any:
        return value
    args = typing.get_args(hint)
    if type(None) in args:
        if value is None:
            return None
        hint = next(a for a in args if a is not type(None))
        args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return nested(hint, value, f"{key}.")
    origin = typing.get_origin(hint) or hint
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and origin is not bool
    if not isinstance(value, origin) or wrong_bool:
        raise ConfigError(f"{key}={value!r} must be {_type_words(hint)}")
    if origin is not list:
        return value
    items = []
    for index, item in enumerate(value):
        try:
            items.append(_typed(args[0], item, f"{key}[{index}]", nested))
        except ConfigError:
            if nested is build:
                raise
    return items


def _type_words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a name", bool: "true or false"}
    if "list[str]" in str(hint):
        return "a list of names, as [a,b]"
    return names.get(hint, "a list of whole numbers, as [2,2]" if "list" in str(hint) else "keys")
