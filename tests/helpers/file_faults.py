"""What may stand in the place of any file of a run folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ODD_VALUES: dict[str, Any] = {
    "infinite": float("inf"),
    "nan": float("nan"),
    "negative": -1,
    "huge": 10**30,
    "text": "\x1b]0;owned\x07\x1b[31m\u202e",
    "list": [[1]],
    "object": {"a": {"b": 1}},
    "null": None,
    "true": True,
}


def _replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Returns what puts something else in the place of a file or folder."""

    def cause(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
        make(path)

    return cause


def _write(data: bytes) -> Callable[[Path], None]:
    return _replaced(lambda path: path.write_bytes(data))


def _link(target: str) -> Callable[[Path], None]:
    return _replaced(lambda path: path.symlink_to(target))


def _halve(path: Path) -> None:
    if path.is_file():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**30)


STRUCTURAL: dict[str, Callable[[Path], None]] = {
    "missing": _replaced(lambda path: None),
    "pipe": _replaced(os.mkfifo),
    "folder": _replaced(lambda path: (path / "inside").mkdir(parents=True)),
    "link to itself": _replaced(lambda path: path.symlink_to(path.name)),
    "endless device": _link("/dev/zero"),
    "file that fails as it is read": _link("/proc/self/mem"),
    "sparse": _replaced(_sparse),
    "empty": _write(b""),
    "half": _halve,
    "not UTF-8": _write(b'{"state": "\xff\xfe\x00"}\n\xff\n'),
    "nested": _write(b"[" * 100_000),
    "nested objects": _write(b'{"a":' * 20_000 + b"1" + b"}" * 20_000 + b"\n"),
    "list": _write(b"[1, 2]\n"),
    "text": _write(b'"text"\n'),
    "number": _write(b"Infinity\n"),
    "null": _write(b"null\n"),
    "empty object": _write(b"{}\n"),
    "empty lines": _write(b"\n\n\n"),
    "long line": _write(b'{"a": "' + b"x" * 2**20 + b'"}\n'),
    "digits": _write(b'{"state": ' + b"9" * 10_000 + b"}\n"),
    "escapes": _write(b"\x1b]0;owned\x07\x1b[2J\r\xe2\x80\xae\n"),
}
"""Name -> what is done to a file, or a folder, in place."""


def values_of(path: Path) -> Any:
    """Returns the values of a JSON, JSON-lines or YAML file; None of another."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in text.splitlines()]
    if path.suffix == ".json":
        return json.loads(text)
    return yaml.safe_load(text) if path.suffix == ".yaml" else None


def write_values(path: Path, values: Any) -> None:
    """Writes values in the format of the file."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(line) + "\n" for line in values))
    elif path.suffix == ".json":
        path.write_text(json.dumps(values))
    else:
        path.write_text(yaml.safe_dump(values))


def places_in(values: Any, most: int = 60) -> Iterator[tuple[object, ...]]:
    """Yields the places of values, those of the first entry of each list; at most so many."""
    todo: list[tuple[tuple[object, ...], Any]] = [((), values)]
    while todo and most > 0:
        place, value = todo.pop(0)
        if place:
            most -= 1
            yield place
        if isinstance(value, dict):
            todo += [((*place, key), inner) for key, inner in value.items()]
        elif isinstance(value, list) and value:
            todo.append(((*place, 0), value[0]))


def with_value(values: Any, place: tuple[object, ...], odd: Any) -> Any:
    """Returns a copy of values with another one in a place."""
    made = json.loads(json.dumps(values))
    inner = made
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = odd
    return made
