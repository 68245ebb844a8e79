"""Prints configs, records, tables, notes, and what is under way."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import yaml

from hires.cli.screens.printable import behind
from hires.core import terminal
from hires.core.config.run_config import RunConfig, to_dict
from hires.core.screen_table import screen_lines
from hires.core.store.reading import Note, printable, text
from hires.core.text_table import aligned, columns_of, folded
from hires.report.columns import Column
from hires.report.load.plain_values import count, dig
from hires.report.tables import tables

_PLAIN_WIDTH = 200
"""In a file, in which no table is cut, a single row of more characters stands upright."""
_MOST_NOTES = 5


class _Dumper(yaml.SafeDumper):
    """Writes keys below each other and lists on one line, as one types them."""


_Dumper.add_representer(
    list, lambda dumper, data: dumper.represent_sequence("tag:yaml.org,2002:seq", data, True)
)


def print_config(config: RunConfig) -> int:
    """Prints a config as the YAML that a run would freeze; returns 0."""
    print(yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False), end="")
    return 0


def print_record(record: dict[str, Any]) -> None:
    """Prints the tables of a record if it has any numbers, and how to make it again."""
    state, samples = text(record.get("state"), 20), count(dig(record, "throughput", "samples"))
    if state != "done" and samples:
        print(f"{state}: the tables hold what was measured until then\n")
    if samples or state == "done":
        for table in tables(record):
            print_table(table.title, table.columns, table.text_rows())
    line = text(record.get("reproduce"))
    if line:
        print(f"again: {line}")


def print_table(
    title: str,
    columns: Sequence[Column | str],
    rows: Sequence[Sequence[str]],
    keep: Sequence[str] = (),
) -> None:
    """Prints a table; a column that is only a heading holds text.

    Where the screen is too narrow, a single row becomes one line a column; of several rows texts
    are shortened and columns left out, those named in ``keep`` last, and a line below says so.
    """
    drawn = [Column(one, one) if isinstance(one, str) else one for one in columns]
    width = terminal.columns()
    only = zip(drawn, rows[0], strict=True) if len(rows) == 1 else ()
    # With the headings on one line.
    needs = sum(max(len(c.title), len(c.unit) + 2, columns_of(cell)) + 3 for c, cell in only)
    if needs > (width or _PLAIN_WIDTH):
        heads = [f"  {column.title}" for column in drawn]
        cells = [f"{c} {column.unit}" for c, column in zip(rows[0], drawn, strict=True)]
        upright = folded(list(zip(heads, cells, strict=True)), width)
        print("\n".join([title, *aligned(upright, "ll"), ""]))
        return
    if title:
        print(f"{title}\n")
    table = [[_two_lines(column) for column in drawn], *rows]
    names = [column.title for column in drawn]
    sides = "".join("r" if column.numeric else "l" for column in drawn)
    places = [place for key in keep for place, column in enumerate(drawn) if column.key == key]
    lines, note = screen_lines(table, width, sides, names, places, rule="─", indent=1)
    print("\n".join([*(f" {line}".rstrip() for line in [*lines, *note]), ""]))


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


def _two_lines(column: Column) -> str:
    """Returns the heading with its unit, or else its further words, below: narrow columns."""
    return f"{column.title}\n[{column.unit}]" if column.unit else column.title.replace(" ", "\n")
