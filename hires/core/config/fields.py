"""Declares the keys of the config by their defaults, limits and readers, and checks their values.

A mistake does not hide others: all that is wrong in a config is reported at once.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import operator
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.units import parse_size

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
MAX_NAME_BYTES = 200
"""Of a folder; file systems take 255, and names beside it have a word more."""


def value(
    default: Any = None, low: float | None = None, high: float | None = None, **facts: Any
) -> Any:
    """Returns a field of the config with its default and what is true of its values.

    Args:
        default: its default; each config has its own copy of a list or dict.
        low: least number, also of the items of a list.
        high: largest number; unset: ``MOST`` for whole numbers.
        **facts: ``above`` and ``below``: limits that are not reached. ``choices``: the names that
            it takes. ``of``: values of the section's ``name`` that read it, or ``key=value`` for
            another key of the section. ``check``: called with key and value. ``line``: whether it
            is text that fits on a line of a job script. ``size``: whether it is a size with its
            unit. ``path``: whether it names a file or folder. ``identity=False``: it decides
            nothing of what a run computes, only where the run is kept, or how it is started.
            ``plan=False``: it changes neither the network, nor the plan, nor its memory; a key that
            does not say so costs time and gives no wrong answer. ``tasks``: those that read it.
            ``calibrates``: a run with scales does not read it. ``divides``: it divides the data.
            ``source``: it says which images the data has.
    """
    facts |= {"low": low, "high": high}
    if isinstance(default, (list, dict)):
        return dataclasses.field(
            default_factory=functools.partial(copy.deepcopy, default), metadata=facts
        )
    return dataclasses.field(default=default, metadata=facts)


def section(kind: type[T], **facts: Any) -> T:
    """Returns a field that holds a section of the config, of which facts of ``value`` are true."""
    return dataclasses.field(default_factory=kind, metadata=facts)


class Checks:
    """Runs checks one after the other and reports all that failed at once."""

    def __init__(self, problems: Iterable[str] = ()) -> None:
        self.problems = [*problems]

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


class Section:
    """A section of the config, declared with its dotted key; checks fields as they declare.

    ``choices`` are the names that one may type, each with a sentence; a file of ``conf/`` is one
    with keys of its own.
    """

    _key: ClassVar[str] = ""
    choices: ClassVar[Mapping[str, str]] = {}
    choice_keys: ClassVar[Callable[[str], dict[str, Any]]]
    """Returns the keys that one of the ``choices`` sets."""

    def __init_subclass__(
        cls,
        key: str = "",
        choices: Mapping[str, str] | None = None,
        choice_keys: Callable[[str], dict[str, Any]] = lambda name: {"name": name},
    ) -> None:
        cls._key, cls.choices, cls.choice_keys = key, choices or {}, staticmethod(choice_keys)

    def __post_init__(self) -> None:
        check = Checks()
        for field in dataclasses.fields(typing.cast(Any, self)):
            check(self._check_field, field)
        check.problems += self._problems()
        check.problems += self.unread(dict(changed_keys(self)))
        check.done()

    def unread(self, keys: Collection[str]) -> Iterator[str]:
        """Yields what is wrong with those among keys that its other values leave unread."""
        for field in dataclasses.fields(typing.cast(Any, self)):
            readers = field.metadata.get("of", ())
            key, _, _ = readers[0].rpartition("=") if readers else ("", "", "")
            mine = getattr(self, key or "name", None)
            is_known = key or mine in names_of(typing.cast(Any, type(self)))
            if not readers or field.name not in keys or not is_known:
                continue
            values = [one.rpartition("=")[2] for one in readers]
            if str(mine) not in values:
                by = f"{self._key}.{key}" if key else self._key
                read = [] if key else keys_of(type(self), str(mine))
                reads = f", which reads {', '.join(f'{by}.{one}' for one in read)}" if read else ""
                yield (
                    f"{self._key}.{field.name}={getattr(self, field.name)} is for "
                    f"{by}={' or '.join(values)}, not {by}={mine}{reads}; leave it out"
                )

    def _problems(self) -> Iterable[str]:
        """Yields what is wrong with several fields together, or with one in its own way."""
        return ()

    def _check_field(self, field: dataclasses.Field[Any]) -> None:
        facts, item = field.metadata, getattr(self, field.name)
        if item is field.default or (type(item) is type(field.default) and item == field.default):
            return  # most of them, and checks take a third of the time of reading a config
        key = f"{self._key}.{field.name}" if self._key else field.name
        if field.name == "name":
            key = self._key  # as one types it: launcher=slurm
        choices = tuple(facts.get("choices", ()))
        for one in item if isinstance(item, list) else [item]:
            if choices and one not in choices:
                raise ConfigError(f"{key}={one!r} is unknown; choose one of {', '.join(choices)}")
        if facts.get("line"):
            for text in item if isinstance(item, list) else [item]:
                check_word(key, text, null=field.default is None)
        if facts.get("size"):
            _check_size(key, item)
        if "check" in facts:
            facts["check"](key, item)
        _check_limits(key, item, facts)


def _check_limits(key: str, item: Any, facts: Mapping[str, Any]) -> None:
    """Refuses a number, or one in a list, beyond the limits of a field."""
    if isinstance(item, (list, tuple)):
        for one in item:
            _check_limits(key, one, facts)
    if isinstance(item, bool) or not isinstance(item, (int, float)):
        return
    if not math.isfinite(item):
        raise ConfigError(f"{key}={item} must be finite")
    low, high, above = facts.get("low"), facts.get("high"), facts.get("above")
    if high is None and isinstance(item, int):
        high = MOST
    if low is None and above is None and high is not None:
        low = -high
    for words, limit, holds in (
        ("at least", low, operator.ge),
        ("above", above, operator.gt),
        ("at most", high, operator.le),
        ("below", facts.get("below"), operator.lt),
    ):
        if limit is not None and not holds(item, limit):
            raise ConfigError(f"{key}={item} must be {words} {limit}")


def span(facts: Mapping[str, Any]) -> str:
    """Returns the limits of a field in words, as ``1 or more``; empty: it declares none."""
    low, high, above, below = (facts.get(name) for name in ("low", "high", "above", "below"))
    if low is not None and high is not None:
        return f"{low} to {high}"
    words = [f"{low} or more"] if low is not None else []
    words += [f"above {above}"] if above is not None else []
    words += [f"at most {high}"] if high is not None else []
    return ", ".join(words + ([f"below {below}"] if below is not None else []))


@functools.cache
def names_of(section: type[Section]) -> list[str]:
    """Returns the values of a section's ``name`` of which it is said what they read."""
    fields = dataclasses.fields(typing.cast(Any, section))
    names = [name for field in fields for name in field.metadata.get("of", ()) if "=" not in name]
    return list(dict.fromkeys([*section.choices, *names]))


def keys_of(section: type[Section], name: str) -> list[str]:
    """Returns the keys of a section that this value of its ``name`` reads and others do not."""
    fields = dataclasses.fields(typing.cast(Any, section))
    return [field.name for field in fields if name in field.metadata.get("of", ())]


def keys_without(config: Any, fact: str) -> Iterator[str]:
    """Yields the keys and sections of a config that are marked with ``identity=False``, say."""
    for field in dataclasses.fields(config):
        inner = field.default_factory
        if not field.metadata.get(fact, True):
            yield field.name
        elif dataclasses.is_dataclass(inner):
            yield from (f"{field.name}.{key}" for key in keys_without(inner, fact))


def keys_with(config: Any, fact: str) -> list[str]:
    """Returns the keys of a section for which a fact is true."""
    return [field.name for field in dataclasses.fields(config) if field.metadata.get(fact)]


def changed_keys(section: Any) -> Iterator[tuple[str, Any]]:
    """Yields the fields of a section, and their values, that differ from their defaults."""
    for one in dataclasses.fields(section):
        item, missing = getattr(section, one.name), dataclasses.MISSING
        usual = one.default if one.default_factory is missing else one.default_factory()
        if item != usual:
            yield one.name, item


def make_paths_absolute(section: Any) -> None:
    """Makes the paths in a config absolute: ranks may start in another folder."""
    for field in dataclasses.fields(section):
        item, words = getattr(section, field.name), field.metadata.get("path")
        if dataclasses.is_dataclass(item):
            make_paths_absolute(item)
        elif words is not None and item and item not in words:
            setattr(section, field.name, str(Path(item).expanduser().absolute()))


def check_word(key: str, text: str, null: bool = False) -> None:
    """Refuses text that no line of a job script can hold."""
    if not text or not text.isprintable():
        raise ConfigError(f"{key}={text!r} must be text on one line{', or null' if null else ''}")


def check_name(key: str, text: str) -> None:
    """Refuses text that cannot name a folder which every verb and file system takes."""
    num_bytes = len(text.encode(errors="surrogatepass"))
    odd = next((letter for letter in text if not letter.isprintable()), None)
    if odd is not None or "/" in text or text[:1] in ("", ".", "-"):
        control = "" if odd is None else f", and {odd!r} is a control character"
        raise ConfigError(
            f"{key}={text!r} names a folder under results/{control}: use a plain name on one "
            f"line, without '/', that does not begin with '.' or '-'"
        )
    if num_bytes > MAX_NAME_BYTES:
        raise ConfigError(
            f"{key}={text[:20]}... has {num_bytes} bytes; use a name of at most {MAX_NAME_BYTES}, "
            f"for it names a folder under results/"
        )


def not_function(section: str, target: str | None) -> Iterator[str]:
    """Yields what is wrong with a target that is not ``package.module:function``."""
    if target is None or target.count(":") != 1:
        yield f"{section}=custom needs {section}.target=package.module:function, not {target!r}"


def _check_size(key: str, text: Any) -> None:
    if parse_size(text) is None:
        raise ConfigError(f"{key}={text!r} is no size; give a number and a unit, as 4GiB or 800MB")
    if not str(text).strip()[-1].isalpha():
        raise ConfigError(f"{key}={text} has no unit; write {key}={text}GiB, {text}MiB or {text}B")


def build(cls: type[T], values: Any, prefix: str = "") -> T:
    """Returns an instance of a dataclass or NamedTuple, which may be a list, its fields checked.

    ``prefix`` stands before the names in messages, as ``parallel.``. ConfigError names all that is
    unknown or wrong, or what is missing.
    """
    whole = prefix.rstrip(".") or "the config"
    names = getattr(cls, "_fields", None)
    if names and isinstance(values, list):
        values = dict(zip(names, values, strict=False))
    if not isinstance(values, dict):
        raise ConfigError(f"{whole} must hold keys, not {values!r}")
    names = names or [field.name for field in dataclasses.fields(typing.cast(Any, cls))]
    hints = {name: hint for name, hint in _hints(typing.cast(Any, cls)).items() if name in names}
    good, check = {}, Checks()
    for name, item in values.items():
        try:
            if name not in hints:
                raise ConfigError(_unknown_key(prefix, str(name), hints))
            good[name] = _typed(hints[name], item, prefix + name)
        except ConfigError as error:
            check.problems.append(str(error))
    try:
        # With defaults in the place of what is wrong, the rest is checked too.
        built = check(functools.partial(cls, **good))
    except TypeError as error:
        check.done()  # what is wrong is missing, too
        raise ConfigError(f"{whole} is incomplete: {error}") from None
    check.done()
    assert built is not None
    return built


def _unknown_key(prefix: str, name: str, hints: Mapping[str, Any]) -> str:
    inside = [
        f"{section}.{name}"
        for section, hint in hints.items()
        if not prefix and dataclasses.is_dataclass(hint)
        if name in {field.name for field in dataclasses.fields(hint)}
    ]
    remedy = f"did you mean {' or '.join(inside)}?" if inside else offer("", sorted(hints))
    return f"unknown key {prefix}{name}; {remedy}"


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _typed(hint: Any, item: Any, key: str) -> Any:
    args = typing.get_args(hint)
    if hint is Any or (item is None and type(None) in args):
        return item
    if type(None) in args:
        hint = next(a for a in args if a is not type(None))
        args = typing.get_args(hint)
    if dataclasses.is_dataclass(hint) or hasattr(hint, "_fields"):
        return build(typing.cast(type, hint), item, f"{key}.")
    origin = typing.get_origin(hint) or hint
    if origin is float and isinstance(item, int) and not isinstance(item, bool):
        return float(item)
    if origin is Path and isinstance(item, str):  # this and lists as JSON holds them
        return Path(item)
    if origin is tuple and isinstance(item, list):
        each = args[0] if args[1:] == (...,) else Any
        return tuple(_typed(each, one, f"{key}[{index}]") for index, one in enumerate(item))
    wrong_bool = isinstance(item, bool) and origin is not bool
    if not isinstance(item, origin) or wrong_bool:
        raise ConfigError(f"{key}={item!r} must be {type_words(hint)}")
    if origin is dict and args and dataclasses.is_dataclass(args[1]):
        return {name: _typed(args[1], one, f"{key}.{name}") for name, one in item.items()}
    if origin is not list:
        return item
    return [_typed(args[0], one, f"{key}[{index}]") for index, one in enumerate(item)]


def type_words(hint: Any) -> str | None:
    """Returns a declared type in words; None where several are allowed."""
    return next((words for name, words in _TYPES if name in str(hint)), None)
