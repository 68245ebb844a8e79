"""How is a file read that anybody may have written? As plain values, or as a note, never a crash.

A run folder may be half written, damaged, of a newer hires, or hostile. What is read here is small
enough to hold, free of control characters and of the type that is asked for; everything else is
missing, and a note says why.
"""

from __future__ import annotations

import json
import math
import os
import stat
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MIB = 2**20
MAX_BYTES = {
    "config.yaml": MIB,
    "exit.json": MIB,
    "env.json": MIB,
    "record.json": 64 * MIB,
    "plan.json": 128 * MIB,
    "metrics.jsonl": 128 * MIB,
    "timeline.jsonl": 128 * MIB,
    "campaign.json": 64 * MIB,
    "index.jsonl": 512 * MIB,
}
"""Larger files are not read: whatever they hold, no report of this size is useful."""
MAX_TEXT = 2000
"""Characters of one text that are kept; a command line with many overrides has a few hundred."""
MAX_KEYS = 2000
"""Values of one config that are looked at: YAML can name the same ones a million times over."""
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
"""Kinds of characters that move the cursor, turn the direction of writing or show nothing."""


@dataclass(frozen=True)
class Note:
    """Something that the report could not use."""

    where: str
    """Run folder or file, as a person would name it."""
    text: str


def read_json(path: Path, notes: list[Note], *, needed: bool = False) -> dict[str, Any]:
    """Returns the object in a JSON file; an empty one, and a note, if it cannot be used.

    Args:
        path: of the file.
        notes: what is wrong is added here.
        needed: whether a missing file is worth a note.
    """
    data = read_bytes(path, notes, needed=needed)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        notes.append(_note(path, f"damaged: {error}"))
        return {}
    if not isinstance(value, dict):
        notes.append(_note(path, "damaged: it holds no object"))
        return {}
    return value


def read_yaml(path: Path, notes: list[Note]) -> dict[str, Any]:
    """Returns the mapping in a YAML file; an empty one, and a note, if it cannot be used."""
    data = read_bytes(path, notes, needed=True)
    if data is None:
        return {}
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        value = yaml.load(data, Loader=loader)
    except (yaml.YAMLError, ValueError, RecursionError, TypeError) as error:
        notes.append(_note(path, f"damaged: {error}"))
        return {}
    if not isinstance(value, dict):
        notes.append(_note(path, "damaged: it holds no keys"))
        return {}
    return value


def read_lines(path: Path, notes: list[Note]) -> Iterator[dict[str, Any]]:
    """Yields the objects of a JSON-lines file; torn lines are counted in one note."""
    torn = 0
    for text in (read_bytes(path, notes) or b"").split(b"\n"):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict):
            yield line
        else:
            torn += 1
    if torn:
        notes.append(_note(path, f"{torn} torn line{'s' if torn > 1 else ''} left out"))


def read_bytes(path: Path, notes: list[Note], *, needed: bool = False) -> bytes | None:
    """Returns what a plain file holds; None if there is none, or if it is too large.

    A pipe or a device that bears the name of a file is not opened: reading it may never end.
    """
    try:
        # The file that was looked at is the one that is read.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        if needed or not isinstance(error, FileNotFoundError):
            notes.append(_note(path, getattr(error, "strerror", None) or str(error)))
        return None
    with os.fdopen(fd, "rb") as file:
        facts = os.fstat(fd)
        limit = MAX_BYTES.get(path.name, MIB)
        if not stat.S_ISREG(facts.st_mode):
            notes.append(_note(path, "not a plain file, and left out"))
        elif facts.st_size > limit:
            size = f"{facts.st_size / MIB:.1f} MiB"
            notes.append(_note(path, f"{size}, more than the {limit // MIB} MiB that are read"))
        else:
            return file.read(limit)
    return None


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
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def count(value: Any) -> int | None:
    """Returns a whole number of at least 0 that a table can hold, or None."""
    found = number(value)
    return int(found) if found is not None and 0 <= found < 2**63 and found == int(found) else None


def text(value: Any, limit: int = MAX_TEXT) -> str | None:
    """Returns a text without what is invisible, shortened if it is long; None if it is none."""
    if not isinstance(value, str):
        return None
    kept = value[: limit + 1]
    if not kept.isprintable():
        kept = "".join(_visible(character) for character in kept)
    return kept if len(value) <= limit else f"{kept[:limit]}... ({len(value)} characters)"


def dicts(value: Any) -> list[dict[str, Any]]:
    """Returns the entries of a list that are dicts; none of what is no list."""
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def discarded_steps(record: Any) -> set[int]:
    """Returns the steps of a record that do not count: warm-up, and what else was discarded."""
    steps = (count(entry.get("step")) for entry in dicts(dig(record, "throughput", "discarded")))
    return {step for step in steps if step is not None}


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested keys as ``parallel.tiles``: the leaves of a config, lists among them.

    Args:
        values: the config.
        prefix: of its keys.
    """
    found: dict[str, Any] = {}
    left = MAX_KEYS
    stack = [(prefix, values)]
    while stack and left:
        left -= 1
        name, value = stack.pop()
        if isinstance(value, dict):
            inner = [(f"{name}.{key}" if name else str(key), v) for key, v in value.items()]
            stack += reversed(inner[:MAX_KEYS])
        else:
            found[text(name, 200) or "?"] = value
    return found


def spoken(value: Any) -> str:
    """Returns a config value in few words, as one would type it."""
    if isinstance(value, str):
        return text(value, 200) or ""
    if value is None or isinstance(value, (bool, float)):
        return json.dumps(value)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**30 else "(a huge number)"
    if isinstance(value, list) and len(value) <= 16:
        return f"[{','.join('...' if _is_deep(inner) else spoken(inner) for inner in value)}]"
    return f"({type(value).__name__})"


def alike(held: Any, said: str) -> bool:
    """Whether a run has a value; an image may be said as 64, 64x64 or [64,64]."""
    if held is None:
        return said == "null"
    words = spoken(held)
    height, times, width = words.partition("x")
    if times and height.isdigit() and width.isdigit():
        square = height == width
        return said in (words, f"[{height},{width}]", *([height] if square else []))
    return said == words


def _is_deep(value: Any) -> bool:
    """Whether a value holds keys, or lists in lists, which no key has."""
    if not isinstance(value, list):
        return isinstance(value, dict)
    return any(isinstance(inner, (dict, list)) for inner in value)


def _visible(character: str) -> str:
    """Returns a character, or a space or nothing in its place."""
    if character in "\n\r\t":
        return " "
    return (
        "\N{REPLACEMENT CHARACTER}" if unicodedata.category(character) in _INVISIBLE else character
    )


def _note(path: Path, why: str) -> Note:
    """Returns what to say about a file."""
    where = "/".join(path.parts[-3:])
    return Note(text(where, 200) or "?", text(why, 300) or "?")
