"""Makes dataclasses of the values of a JSON file.

A file with a value of another type than its field has is damaged: that is one note, and what is
shown has none of it.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any, Union, get_args, get_origin, get_type_hints

from hires.core.store.reading import Values, text
from hires.report.columns import value_text

_LONG = ("cause", "reproduce", "why")
"""Texts that may be longer than a name."""
_MAX_NAME = 160


def typed(kind: Any, value: Any, where: str = "its") -> Any:
    """Returns a value of a JSON file as a type; ValueError names the first that has another one.

    Numbers are finite, texts without invisible characters. Keys without a field are left out.
    """
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return None if value is None else typed(inner[0], value, where)
    if origin is list and isinstance(value, list):
        return [typed(inner[0], one, f"{where}.{n}") for n, one in enumerate(value)]
    if origin is tuple and isinstance(value, list) and len(value) == len(inner):
        return tuple(typed(inner[n], one, f"{where}.{n}") for n, one in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {str(text(k)): typed(inner[1], one, f"{where}.{k}") for k, one in value.items()}
    if kind is str and isinstance(value, str):
        is_long = where.replace(" ", ".").rpartition(".")[2] in _LONG
        return text(value) if is_long else text(value, _MAX_NAME)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is int and type(value) is int and -1 <= value < 2**63:
        return value
    if kind is float and type(value) in (int, float) and abs(value) < 1e300:
        return float(value)
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return _built(kind, value, where)
    name = getattr(kind, "__name__", str(kind)).removeprefix("Recorded").lower()
    raise ValueError(f"{where} is {value_text(value)}, which is no {name}")


def _built(kind: Any, values: Values, where: str) -> Any:
    fields = {
        name: typed(hint, values[key], f"{where} {key}" if where == "its" else f"{where}.{key}")
        for name, hint in _hints(kind).items()
        if values.get(key := name.rstrip("_")) is not None
    }
    try:
        return kind(**fields)
    except TypeError as error:
        missing = str(error).partition(": ")[2]
        raise ValueError(f"{where} lacks {missing or 'a value'}") from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)
