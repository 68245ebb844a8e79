"""Describes every config key: type, default, choices and meaning, read from the dataclasses."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from typing import Any

from hires.core.config.run_config import RunConfig

_TYPES = (  # the first name that stands in the declared type counts
    ("list[str]", "a list of names, as [a,b]"),
    ("list", "a list of whole numbers, as [2,2]"),
    ("dict", "keys and values, as {width:64}"),
    ("int", "a whole number"),
    ("float", "a number"),
    ("bool", "true or false"),
    ("str", "text"),
)


@dataclasses.dataclass(frozen=True)
class ConfigKey:
    """One key of a run's config."""

    name: str
    """Dotted, as ``parallel.stages``."""
    hint: Any
    """Declared type."""
    default: str
    """As one types it: ``null``, ``true``, ``[1,1]``."""
    choices: tuple[str, ...]
    """Names that it takes; empty: any value of its type."""
    section: type
    """The dataclass that declares it."""

    @property
    def type(self) -> str | None:
        """The declared type in words; None where several are allowed."""
        return next((text for name, text in _TYPES if name in str(self.hint)), None)

    @property
    def meaning(self) -> str:
        """The docstring of the field on one line, without its markup."""
        text = _field_docs(self.section).get(self.name.rpartition(".")[2], "")
        return " ".join(text.split()).replace("``", "`")


@functools.cache
def config_keys() -> dict[str, ConfigKey]:
    """Returns every key that a run has, by its dotted name, in the order of their declaration."""
    return {key.name: key for key in _keys_of(RunConfig, "")}


@functools.cache
def keys() -> dict[str, Any]:
    """Returns every key that a run has, dotted, with its declared type."""
    return {name: key.hint for name, key in config_keys().items()}


def _keys_of(section: type, prefix: str) -> list[ConfigKey]:
    hints, listed = typing.get_type_hints(section), []
    for field in dataclasses.fields(section):
        name, hint = prefix + field.name, hints[field.name]
        if dataclasses.is_dataclass(hint):
            listed += _keys_of(typing.cast(type, hint), f"{name}.")
            continue
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        choices = field.metadata.get("choices", ())
        listed.append(ConfigKey(name, hint, _typed(default), choices, section))
    return listed


def _typed(value: Any) -> str:
    """Returns a value as one types it on the command line."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


@functools.cache
def _field_docs(section: type) -> dict[str, str]:
    """Returns the strings below the fields of a dataclass, which Python itself does not keep."""
    [body] = ast.parse(textwrap.dedent(inspect.getsource(section))).body
    assert isinstance(body, ast.ClassDef)
    return {
        field.target.id: text.value.value
        for field, text in itertools.pairwise(body.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
