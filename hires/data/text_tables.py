"""Reads small tables of text that users write about their images: CSV with a line of names."""

from __future__ import annotations

import csv
from pathlib import Path

from hires.core.errors import ConfigError
from hires.core.store.reading import read_named

MOST_BYTES = 2**28
"""Of a file that says something about images."""


def read_table(path: Path, first: str, second: str, key: str) -> dict[str, str]:
    """Returns a column of a CSV file by another; ConfigError, which names the ``key``: it has none.

    Files of other columns, and two lines of one name, are refused.
    """
    try:
        text = read_named(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"{key}={path} cannot be read: {reason}; give a CSV file whose first line "
            f"names {first},{second}"
        ) from None
    rows = csv.DictReader(text.lstrip("\ufeff").splitlines())
    try:
        names, lines = rows.fieldnames or [], [(rows.line_num, row) for row in rows]
    except csv.Error as error:
        raise ConfigError(f"{key}={path}, line {rows.line_num + 1}: {error}") from None
    if first not in names or second not in names:
        raise ConfigError(
            f"{key}={path} has the columns {', '.join(names) or 'none'}; its first line must name "
            f"{first},{second}"
        )
    found: dict[str, str] = {}
    for number, row in lines:
        name, value = (row[first] or "").strip(), (row[second] or "").strip()
        if not name or not value:
            raise ConfigError(f"{key}={path}: line {number} lacks its {first} or {second}")
        if found.setdefault(name, value) != value:
            raise ConfigError(f"{key}={path}: {name} is {found[name]} and, later, {value}")
    return found
