"""Turns the values of a config into texts as one would type them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hires.core.store.reading import text

MAX_KEYS = 2000
"""Values of one config that are read: a small YAML file can repeat the same ones very often."""


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
