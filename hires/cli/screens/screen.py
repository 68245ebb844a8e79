"""Prints tables, configs, notes and what is under way."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import yaml

from hires.cli.screens.screen_table import table_lines
from hires.core import terminal
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.store.reading import Note, printable
from hires.core.terminal import behind
from hires.report.columns import Column

_MOST_NOTES = 5


def print_lines(lines: Sequence[str]) -> None:
    """Prints the lines of a table with its colours: ``table_lines`` makes its cells printable."""
    print("\n".join(lines), file=behind(sys.stdout), flush=True)


def print_table(
    title: str,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[str]],
) -> None:
    """Prints a table; a column that is only a heading holds text."""
    drawn = [Column(one, one) if isinstance(one, str) else one for one in columns]
    if title:
        print("\n".join([*textwrap.wrap(title, terminal.columns() or len(title)), ""]))
    # The unit, or else further words of a heading, stand below: narrow columns.
    heads = [c.title + f"\n[{c.unit}]" if c.unit else c.title.replace(" ", "\n") for c in drawn]
    sides = "".join("r" if column.numeric else "l" for column in drawn)
    names = [column.heading for column in drawn]
    lines = table_lines([heads, *rows], sides, names=names, indent=1)
    print_lines([*(f" {line}".rstrip() for line in lines), ""])


def print_json(facts: Any, indent: int | None = 2) -> None:
    """Prints plain values as the one JSON object of a verb."""
    print(json.dumps(facts, indent=indent, default=str))


class _Dumper(yaml.SafeDumper):
    """Writes keys below each other and lists on one line, as one types them."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)


def print_config(config: RunConfig, as_json: bool = False) -> int:
    """Prints a config as the YAML that a run would freeze, or as JSON; returns 0."""
    if as_json:
        print_json(to_dict(config))
        return 0
    print(yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False), end="")
    return 0


def percent(ratio: float | None) -> str:
    """Returns by how much a number grows, as ``+10.0``; ``-`` if that is unknown."""
    return "-" if ratio is None else f"{100 * (ratio - 1):+.1f}"


def shown(value: Any) -> str:
    """Returns a value with at most five significant digits; ``-`` if it is missing."""
    if value is None:
        return "-"
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def print_notes(notes: Sequence[Note]) -> None:
    """Prints the first few notes to standard error, each once."""
    lines = list(dict.fromkeys(f"note: {note.where}: {note.text}" for note in notes))
    if len(lines) > _MOST_NOTES:
        lines[_MOST_NOTES:] = [f"note: and {len(lines) - _MOST_NOTES} more"]
    for line in lines:
        print(line, file=sys.stderr)


def plural(count: int, noun: str) -> str:
    """Returns a count with its noun, as ``1 run`` or ``2 runs``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def print_activity(text: str) -> None:
    """Shows what is under way in the current line of a terminal; the next text overwrites it."""
    if terminal.moves(sys.stderr):
        width = (terminal.columns(sys.stderr) or 80) - 1  # a longer line could not be overwritten
        line = f"{printable(text[:width]):<{min(40, width)}}"
        print(line, end="\r", file=behind(sys.stderr), flush=True)
