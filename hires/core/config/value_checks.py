"""Builds dataclasses from plain values, checks these, and reports all mistakes at once."""

from __future__ import annotations

import dataclasses
import functools
import math
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.units import GIB, MIB, bytes_without_unit, parse_size

T = TypeVar("T")

_TYPES = (  # the first name that stands in the declared type counts
    ("list[str]", "a list of names, as [a,b]"),
    ("list[float]", "a list of numbers, as [0.9,0.99]"),
    ("list", "a list of whole numbers, as [2,2]"),
    ("dict", "keys and values, as {width:64}"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("bool", "true or false"),
    ("str", "text"),
)


MOST = 2**20
"""Of every whole number that does not name another limit: more of anything is a slip."""
MOST_STEPS, MOST_LABEL, MOST_SEED = 10**9, 2**31 - 1, 2**63 - 1


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
    """Returns a field that takes one of some names, or all while a registry of them is empty."""
    return dataclasses.field(default=default, metadata={"choices": choices})


def number(
    default: float | None, least: int = 0, most: int | None = None, *, above: bool = False
) -> Any:
    """Returns a field that takes numbers from ``least``, or only ``above`` it, to ``most``."""

    def check(key: str, value: float) -> None:
        finite = ", and finite" if isinstance(value, float) else ""
        # Every comparison with nan is false, so the check is for valid values, not for wrong ones.
        if not (least < value < math.inf if above else least <= value < math.inf):
            bound = f"above {least}" if above else f"at least {least}"
            raise ConfigError(f"{key}={value} must be {bound}{finite}")

    span = f"above {least}" if above else f"{least} or more"
    if most is not None:
        span = f"above {least}, at most {most}" if above else f"{least} to {most}"
    metadata = {"check": check, "span": span, "most": most}
    return dataclasses.field(default=default, metadata=metadata)


def share(default: float | None, zero: bool = False) -> Any:
    """Returns a field that takes numbers between 0 and 1, without these, or with ``zero``."""

    def check(key: str, value: float) -> None:
        if not (0 < value < 1 or (zero and value == 0)):
            least = "from 0" if zero else "above 0"
            raise ConfigError(f"{key}={value} must be a share {least} and below 1, as 0.1")

    span = "0 or more, below 1" if zero else "between 0 and 1"
    return dataclasses.field(default=default, metadata={"check": check, "span": span})


def word(default: str | None = None) -> Any:
    """Returns a field that takes text which fits on a line of a job script, or None."""
    check = functools.partial(check_word, null=default is None)
    return dataclasses.field(default=default, metadata={"check": check})


COSMETIC = {"identity": False}
"""Metadata of a field that decides nothing of what a run computes, as :func:`cosmetic`."""


def cosmetic(declared: Any) -> Any:
    """Marks a field, or one with this default, that decides nothing of what a run computes.

    It decides where the run is kept, or how and whether it is started.
    """
    if not isinstance(declared, dataclasses.Field):
        declared = dataclasses.field(default=declared)
    declared.metadata = MappingProxyType({**declared.metadata, **COSMETIC})
    return declared


MAX_NAME_BYTES = 200
"""Of a folder; file systems take 255, and names beside it have a word more."""


class Section:
    """A section of the config, declared with its dotted key; checks fields as they declare.

    ``own_keys`` has the keys that each value of its ``name`` reads. Keys that stand with none are
    read by all; a name that is not there is refused elsewhere, or reads all. ``choices`` are the
    names that one may type, each with a sentence; a file of ``conf/`` is one with keys of its own.
    """

    _key: ClassVar[str] = ""
    _own_keys: ClassVar[Mapping[str, Collection[str]]] = {}
    choices: ClassVar[Mapping[str, str]] = {}
    choice_keys: ClassVar[Callable[[str], dict[str, Any]]]
    """Returns the keys that one of the ``choices`` sets."""

    def __init_subclass__(
        cls,
        key: str = "",
        own_keys: Mapping[str, Collection[str]] | None = None,
        choices: Mapping[str, str] | None = None,
        choice_keys: Callable[[str], dict[str, Any]] = lambda name: {"name": name},
    ) -> None:
        cls._key, cls._own_keys, cls.choices = key, own_keys or {}, choices or {}
        cls.choice_keys = staticmethod(choice_keys)

    def __post_init__(self) -> None:
        check = Checks()
        for field in dataclasses.fields(typing.cast(Any, self)):
            check(self._check_field, field)
        self._check_more(check)
        check.problems += self.unread(changed_keys(self))
        check.done()

    def unread(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[str]:
        """Yields what is wrong with those among keys and their values that its name ignores."""
        name, section = getattr(self, "name", ""), self._key
        foreign = unread_keys(type(self), name)
        for key, value in pairs:
            if key in foreign:
                readers = [other for other, keys in self._own_keys.items() if key in keys]
                own = ", ".join(f"{section}.{one}" for one in self._own_keys[name])
                yield (
                    f"{section}.{key}={value} is for {section}={' or '.join(readers)}, not "
                    f"{section}={name}, which reads {own or 'no key of its own'}; leave it out"
                )

    def _check_more(self, check: Checks) -> None:
        """Checks several fields together, or one in its own way."""

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
        _check_most(key, value, field.metadata.get("most"))


def _check_most(key: str, value: Any, most: int | None) -> None:
    """Refuses a number above a limit; ``most`` None: a whole number, in lists too, above MOST."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _check_most(key, item, most)
    is_number = isinstance(value, int if most is None else (int, float))
    limit = MOST if most is None else most
    if is_number and not -limit <= value <= limit:
        raise ConfigError(f"{key}={value} must be at most {limit}")


def cosmetic_keys(section: Any) -> Iterator[str]:
    """Yields the keys of a config whose fields are marked as :func:`cosmetic`."""
    for field in dataclasses.fields(section):
        inner = field.default_factory
        if dataclasses.is_dataclass(inner):
            yield from (f"{field.name}.{key}" for key in cosmetic_keys(inner))
        elif not field.metadata.get("identity", True):
            yield field.name


def unread_keys(section: type[Section], name: str) -> set[str]:
    """Returns the keys of a section that this value of its ``name`` does not read."""
    keys = {key for own in section._own_keys.values() for key in own}
    return keys - {*section._own_keys.get(name, keys)}


def changed_keys(section: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a section, and their values, that differ from their defaults."""
    for one in dataclasses.fields(section):
        value, missing = getattr(section, one.name), dataclasses.MISSING
        made = one.default if one.default_factory is missing else one.default_factory()
        if value != made:
            yield one.name, value


def changed_names(section: Section) -> Iterator[tuple[str, Any]]:
    """Yields the same with the names of the keys, as one types them."""
    for key, value in changed_keys(section):
        yield section._key if key == "name" else f"{section._key}.{key}", value


def check_word(key: str, value: str, null: bool = False) -> None:
    """Refuses text that no line of a job script can hold."""
    if not value or not value.isprintable():
        raise ConfigError(f"{key}={value!r} must be text on one line{', or null' if null else ''}")


def check_name(key: str, value: str) -> None:
    """Refuses text that cannot name a folder which every verb and file system takes."""
    num_bytes = len(value.encode(errors="surrogatepass"))
    odd = next((letter for letter in value if not letter.isprintable()), None)
    plain = odd is None and "/" not in value and value[:1] not in ("", ".", "-")
    if not plain:
        control = "" if odd is None else f", and {odd!r} is a control character"
        raise ConfigError(
            f"{key}={value!r} names a folder under results/{control}: use a plain name on one "
            f"line, without '/', that does not begin with '.' or '-'"
        )
    if num_bytes > MAX_NAME_BYTES:
        raise ConfigError(
            f"{key}={value[:20]}... has {num_bytes} bytes; use a name of at most {MAX_NAME_BYTES}, "
            f"for it names a folder under results/"
        )


def _check_size(key: str, value: Any) -> None:
    if parse_size(value) is None:
        raise ConfigError(f"{key}={value!r} is no size; give a number and a unit, as 4GiB or 800MB")
    num_bytes = bytes_without_unit(value)
    if num_bytes is None:
        return
    if num_bytes < MIB:  # more than so many MiB is no computer's
        offers = (f"{value}GiB", f"{value}MiB", f"{num_bytes}B")
    else:
        offers = (f"{num_bytes / 1e6:.0f}MB", f"{num_bytes / MIB:.0f}MiB", f"{num_bytes}B")
        if num_bytes >= GIB:
            offers = (f"{num_bytes / 1e9:.3g}GB", f"{num_bytes / GIB:.3g}GiB", offers[2])
    raise ConfigError(
        f"{key}={value} has no unit; write {key}={offers[0]} or {offers[1]} ({offers[2]} for bytes)"
    )


SIZE = {"check": _check_size}
"""Metadata of a field that takes a size as text with its unit, such as 4GiB."""


def build(cls: type[T], values: Any, prefix: str = "", usable: bool = False) -> T:
    """Returns an instance of a dataclass or NamedTuple, which may be a list, its fields checked.

    ``prefix`` stands before the names in messages, as ``parallel.``. With ``usable``, what is
    unknown or wrong is left out; else ConfigError names all of it, and what is missing.
    """
    whole = prefix.rstrip(".") or "the config"
    names = getattr(cls, "_fields", None)
    if names and isinstance(values, list):
        values = dict(zip(names, values, strict=False))
    if not isinstance(values, dict):
        raise ConfigError(f"{whole} must hold keys, not {values!r}")
    names = names or [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if name in names}
    unknown = sorted(str(k) for k in values if k not in hints)
    if unknown and not usable:
        inside = [
            f"{section}.{unknown[0]}"
            for section, hint in hints.items()
            if not prefix and dataclasses.is_dataclass(hint)
            if unknown[0] in {field.name for field in dataclasses.fields(hint)}
        ]
        remedy = f"did you mean {' or '.join(inside)}?" if inside else offer("", sorted(hints))
        raise ConfigError(f"unknown key {prefix}{unknown[0]}; {remedy}")
    made, check = {}, Checks()
    for name in [name for name in values if name in hints]:
        try:
            made[name] = _typed(hints[name], values[name], prefix + name, usable)
        except ConfigError as error:
            check.problems.append(str(error))
    problems = Checks() if usable else check
    try:
        # With defaults in the place of what is wrong, the rest is checked too.
        built = problems(functools.partial(cls, **made))
    except TypeError as error:
        raise ConfigError(f"{whole} is incomplete: {error}") from None
    problems.done()
    assert built is not None
    return built


def _typed(hint: Any, value: Any, key: str, usable: bool) -> Any:
    if hint is Any:
        return value
    args = typing.get_args(hint)
    if type(None) in args:
        if value is None:
            return None
        hint = next(a for a in args if a is not type(None))
        args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return build(typing.cast(type, hint), value, f"{key}.", usable)
    origin = typing.get_origin(hint) or hint
    if origin is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong_bool = isinstance(value, bool) and origin is not bool
    if not isinstance(value, origin) or wrong_bool:
        raise ConfigError(f"{key}={value!r} must be {type_words(hint)}")
    if origin is not list:
        return value
    items = []
    for index, item in enumerate(value):
        try:
            items.append(_typed(args[0], item, f"{key}[{index}]", usable))
        except ConfigError:
            if not usable:
                raise
    return items


def type_words(hint: Any) -> str | None:
    """Returns a declared type in words; None where several are allowed."""
    return next((words for name, words in _TYPES if name in str(hint)), None)
