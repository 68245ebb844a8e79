"""``hires list keys`` and ``hires list KEY``: show what keys mean and which values they take."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from hires.cli.compose.choices import ConfigKey
from hires.core import terminal
from hires.core.text_table import aligned, fitted, folded

_HEADS = ("key", "default", "values", "meaning")
_MOST = 8  # choices that set a key
_ROOM = 120
"""With fewer characters a line the meaning of a key stands below it."""


def print_keys(keys: Iterable[ConfigKey]) -> None:
    """Prints a table of keys: default, values and the first sentence of the meaning."""
    width = terminal.columns()
    rows = [_HEADS, *((key.name, key.default, _plain(key.values), sentence(key)) for key in keys)]
    if width is None or width >= _ROOM:
        print("\n".join(aligned(folded(rows, width), "llll")))
    else:
        fit = fitted([row[:3] for row in rows], width, "lll")
        lines = aligned(fit.rows, "l" * len(fit.places))
        for line, row in zip(lines, rows, strict=True):
            print("\n".join([line, *_indented(row[3], width)]))
    print("\n`hires list KEY` shows all about one key.")


def key_facts(key: ConfigKey, extra: Path | None) -> dict[str, Any]:
    """Returns all about a key; ``extra`` is a folder with more choices of groups."""
    facts = {"default": key.default, "values": key.values, "meaning": key.meaning}
    return facts | {"aliases": key.aliases, "set_by": key.set_by(extra)}


def key_lines(name: str, facts: dict[str, Any]) -> list[str]:
    """Returns all about a key as it is shown."""
    chosen = [f"{choice} ({value})" for choice, value in facts["set_by"].items()]
    if len(chosen) > _MOST:
        chosen[_MOST:] = [f"and {len(chosen) - _MOST} more, which --json lists"]
    rows = [
        ("  default", facts["default"]),
        ("  values", _plain(facts["values"])),
        ("  alias", ", ".join(facts["aliases"])),
        ("  set by", ", ".join(chosen)),
        ("  meaning", facts["meaning"]),
    ]
    return [name, *aligned(folded([row for row in rows if row[1]], terminal.columns()), "ll")]


def sentence(key: ConfigKey) -> str:
    """Returns the first sentence of a meaning."""
    return key.meaning.split(". ")[0].rstrip(".")


def _indented(text: str, width: int) -> Sequence[str]:
    return textwrap.wrap(text, width, initial_indent="    ", subsequent_indent="    ")


def _plain(values: str) -> str:
    return values.replace("`", "")
