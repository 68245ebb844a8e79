"""Turns values that a file may hold into numbers, counts and texts that a table can show."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from hires.core.store.reading import text

MAX_KEYS = 2000
"""Values of one config that are read: a small YAML file can repeat the same ones very often."""


def dig(values: Any, *keys: str | int) -> Any:
    """Returns a value inside nested dicts and lists; None if the way to it does not exist."""
    for key in keys:
        if isinstance(values, dict):
            values = values.get(key)
        elif (
            isinstance(values, list) and isinstance(key, int) and -len(values) <= key < len(values)
        ):
            values = values[key]
        else:
            return None
    return values


def number(value: Any) -> float | None:
    """Returns a finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def count(value: Any) -> int | None:
    """Returns a whole number of at least 0 that a table can hold, or None."""
    whole = number(value)
    return int(whole) if whole is not None and 0 <= whole < 2**63 and whole == int(whole) else None


def dicts(value: Any) -> list[dict[str, Any]]:
    """Returns the entries of a list that are dicts; none of what is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def discarded_steps(record: Any) -> set[int]:
    """Returns the steps of a record that do not count: warm-up, and what else was discarded."""
    steps = (count(entry.get("step")) for entry in dicts(dig(record, "throughput", "discarded")))
    return {step for step in steps if step is not None}


def steps_of(record: Any) -> list[tuple[int, float | None, bool]]:
    """Returns number and seconds of the steps of a record, and whether they count."""
    discarded = discarded_steps(record)
    steps = [(count(s.get("step")), number(s.get("step_s"))) for s in dicts(dig(record, "samples"))]
    return [(step, step_s, step not in discarded) for step, step_s in steps if step is not None]


def counted_steps(record: Any) -> list[float]:
    """Returns the seconds of the steps that count, in their order."""
    return [step_s for _, step_s, counts in steps_of(record) if counts and step_s and step_s > 0]


def flat(values: Any) -> dict[str, Any]:
    """Returns the leaves of a config, lists among them, by their keys: ``parallel.tiles``."""
    leaves: dict[str, Any] = {}
    stack = [("", values)]
    for _ in range(MAX_KEYS):
        if not stack:
            break
        name, value = stack.pop()
        if isinstance(value, dict):
            inner = [(f"{name}.{key}" if name else str(key), v) for key, v in value.items()]
            stack += reversed(inner[:MAX_KEYS])
        else:
            leaves[text(name, 200) or "?"] = value
    return leaves


def value_text(value: Any) -> str:
    """Returns a config value as short text, as one would type it."""
    if isinstance(value, str):
        return text(value, 200) or ""
    if value is None or isinstance(value, (bool, float)):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "(a huge number)"
    if isinstance(value, list) and len(value) <= 16:
        return f"[{','.join('...' if _is_deep(inner) else value_text(inner) for inner in value)}]"
    return f"({type(value).__name__})"


def listed(words: Sequence[str], most: int, separator: str = ", ") -> str:
    """Returns the first words of a list, and how many more there are."""
    left = len(words) - most
    more = f"{separator.rstrip(' ,')} and {left} more" if left > 0 else ""
    return separator.join(words[:most]) + more


def same_value(value: Any, words: str) -> bool:
    """Whether words name a value; an image may be written as 64, 64x64 or [64,64]."""
    if value is None:
        return words == "null"
    text_of = value_text(value)
    height, times, width = text_of.partition("x")
    if times and height.isdigit() and width.isdigit():
        square = height == width
        return words in (text_of, f"[{height},{width}]", *([height] if square else []))
    return words == text_of


def _is_deep(value: Any) -> bool:
    """Whether a value holds keys, or lists in lists, which no key has."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    return any(isinstance(inner, (dict, list)) for inner in value)
