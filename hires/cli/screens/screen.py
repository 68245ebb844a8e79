"""How do configs and tables reach the screen?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import yaml

from hires.core.config.run_config import RunConfig, to_dict
from hires.core.store.reading import text
from hires.report.columns import Column
from hires.report.load.plain_values import count, dig
from hires.report.tables.run_tables import tables

if TYPE_CHECKING:
    from rich.console import Console

_PLAIN_WIDTH = 200
"""Columns when the output is no terminal, so that no table is cut in a file."""


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


def print_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table through rich, numbers flush right.

    A single row that is wider than the terminal is printed as one line a column instead, several
    rows as tables below each other, each of which begins with the first column.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() else _PLAIN_WIDTH
    console = Console(file=sys.stdout, width=width, markup=False, highlight=False)
    if len(rows) == 1 and _natural_width(columns, rows) > console.width:
        _print_upright(title, columns, rows[0])
        return
    for part in _parts(columns, rows, console.width):
        _print_part(
            console, title, [columns[i] for i in part], [[r[i] for i in part] for r in rows]
        )
        title = ""


def _print_part(
    console: Console, title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]]
) -> None:
    """Prints a table that is not too wide."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = Table(
        title=title or None,
        title_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for column in columns:
        shown.add_column(_two_lines(column), justify="right" if column.numeric else "left")
    for row in rows:
        shown.add_row(*row)
    with console.capture() as captured:
        console.print(shown)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _natural_width(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> int:
    """Returns how many characters a table wants, its headings on one line."""
    cells = zip(*rows, strict=True)
    return sum(_width(c, held, len(c.title)) + 3 for c, held in zip(columns, cells, strict=True))


def _parts(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int) -> list[list[int]]:
    """Returns which columns stand in each of the tables below each other: the first in all."""
    cells = list(zip(*rows, strict=True)) if rows else [() for _ in columns]
    widths = [
        _width(c, held, max(map(len, _two_lines(c).split("\n")))) + 2
        for c, held in zip(columns, cells, strict=True)
    ]
    parts = [[0]]
    for index in range(1, len(columns)):
        if sum(widths[i] for i in parts[-1]) + widths[index] > width + 2 and len(parts[-1]) > 1:
            parts.append([0])
        parts[-1].append(index)
    return parts


def _width(column: Column, cells: Sequence[str], heading: int) -> int:
    """Returns how many characters a column takes without the gap to the next."""
    return max(heading, len(column.unit) + 2, *map(len, cells), 0)


def _print_upright(title: str, columns: Sequence[Column], row: Sequence[str]) -> None:
    """Prints one row with its columns below each other."""
    width = max(len(column.title) for column in columns)
    print(title)
    for column, cell in zip(columns, row, strict=True):
        print(f"  {column.title:<{width}}  {cell} {column.unit}".rstrip())
    print()


def _two_lines(column: Column) -> str:
    """Returns the heading with its unit, or else its second word, below: narrow columns."""
    if column.unit:
        return f"{column.title}\n[{column.unit}]"
    return column.title.replace(" ", "\n")
