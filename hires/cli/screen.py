"""Prints tables, configs, notes and what is under way.

A table is as wide as the screen, with texts wrapped and states in colours. Where it is too wide,
columns with one value go below it. What then has no room is left out from the right, and a line
names it; a single row becomes a list. rich is imported where a table is drawn: help and lists do
without.
"""

from __future__ import annotations

import io
import json
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from hires.core import streams
from hires.core.config.run_config import RunConfig
from hires.core.store.naming import plain
from hires.core.store.reading import Note, printable, yaml_text
from hires.core.streams import behind
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
        print("\n".join([*textwrap.wrap(title, streams.columns() or len(title)), ""]))
    # The unit, or else further words of a heading, stand below: narrow columns.
    heads = [c.title + f"\n[{c.unit}]" if c.unit else c.title.replace(" ", "\n") for c in drawn]
    sides = "".join("r" if column.numeric else "l" for column in drawn)
    names = [column.heading for column in drawn]
    lines = table_lines([heads, *rows], sides, names=names, indent=1)
    print_lines([*(f" {line}".rstrip() for line in lines), ""])


def print_json(facts: Any, indent: int | None = 2) -> None:
    """Prints plain values as the one JSON object of a verb."""
    print(json.dumps(facts, indent=indent, default=str))


def print_result(as_json: bool, facts: Any, *lines: str) -> None:
    """Prints the result of a verb: its facts as one JSON object, or its lines."""
    if as_json:
        print_json(facts)
    else:
        print("\n".join(lines))


def print_config(config: RunConfig, as_json: bool = False) -> int:
    """Prints a config as the YAML that a run would freeze, or as JSON; returns 0."""
    print(json.dumps(plain(config), indent=2) if as_json else yaml_text(plain(config)).rstrip())
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
    if streams.moves(sys.stderr):
        width = (streams.columns(sys.stderr) or 80) - 1  # a longer line could not be overwritten
        line = f"{printable(text[:width]):<{min(40, width)}}"
        print(line, end="\r", file=behind(sys.stderr), flush=True)


Rows = Sequence[Sequence[str]]
"""Rows of one length, headings first; a cell with line breaks takes several lines."""
LEAST = 16
"""A text is wrapped at no fewer characters than this, or than its longest word up to ``_NAME``."""
_NAME = 40
_GAP = 2
_STYLES = {
    **dict.fromkeys(("done", "ok", "complete"), "green"),
    **dict.fromkeys(("failed", "lost", "error"), "red"),
    **dict.fromkeys(("cancelled", "infeasible", "saved", "warning"), "yellow"),
    "running": "cyan",
}
"""State -> its colour of the terminal's own palette, readable on light and dark."""


def table_lines(
    rows: Rows,
    sides: str | None = None,
    *,
    heads: bool = True,
    names: Sequence[str] | None = None,
    indent: int = 0,
) -> list[str]:
    """Returns the lines of a table, and what is left out of it.

    Args:
        rows: of one length; with ``heads`` the first one has the headings, and a line below it.
        sides: ``l`` or ``r`` for each column; None: right where all cells begin with a digit.
        heads: whether there are headings.
        names: of the columns; None: their headings. Texts below ``state`` are in colours.
        indent: characters that the caller writes before every line.
    """
    table = [[printable(cell) for cell in row] for row in rows]
    names = names or [" ".join(cell.split()) if heads else "" for cell in table[0]]
    columns = [*zip(*table, strict=True)]
    sides = sides or "".join(map(_side, columns))
    least = [_least(*column) for column in zip(columns, sides, strict=True)]
    width = streams.columns()
    room = None if width is None else width - indent
    shown, below = [*range(len(names))], list[str]()
    if heads and not _fits(least, room):
        if len(table) == 2:
            pairs = [pair for pair in zip(names, table[1], strict=True) if pair[1] not in ("", "-")]
            return list_lines(pairs, room=room)
        shown, below = _fitting(table[1:], names, least, room)
    kept = [[row[n] for n in shown] for row in table]
    lines = _drawn(kept, [(names[n], sides[n], least[n]) for n in shown], heads, room)
    return [*lines, *(part for line in below for part in textwrap.wrap(line, room or len(line)))]


def _fits(least: Sequence[int], room: int | None) -> bool:
    """Whether columns that need so many characters fit beside each other."""
    return room is None or sum(least) + _GAP * (len(least) - 1) <= room


def _fitting(
    rows: Rows, names: Sequence[str], least: Sequence[int], room: int | None
) -> tuple[list[int], list[str]]:
    """Returns the columns that a narrow screen shows, and in words what the others hold.

    Those that are alike in all rows are left out first, then the last ones.
    """
    shown = [n for n in range(len(names)) if len({row[n] for row in rows}) > 1] or [0]
    alike = [f"{names[n]} {rows[0][n]}" for n in range(len(names)) if n not in shown]
    below = [f"(every row: {', '.join(alike)})"] if alike else []
    lost: list[str] = []
    while not _fits([least[n] for n in shown], room) and len(shown) > 1:
        lost.insert(0, names[shown.pop()])
    below += [f"(left out: {', '.join(lost)}; a wider screen or --json has it)"] if lost else []
    return shown, below


def _drawn(
    rows: Rows, columns: Sequence[tuple[str, str, int]], heads: bool, room: int | None
) -> list[str]:
    """Returns the lines of rows; each column has a name, a side and a least width."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawn = Table(
        box=box.SIMPLE_HEAD if heads else None,
        show_edge=False,
        show_header=heads,
        pad_edge=False,
        header_style="none",
        padding=(0, _GAP - (1 if heads else 0), 0, 0),
    )
    for head, (_, side, least) in zip(rows[0], columns, strict=True):
        drawn.add_column(
            Text(head) if heads else "",
            justify="right" if side == "r" else "left",
            min_width=least if room is None else min(least, room),
            overflow="fold",
        )
    for row in rows[1:] if heads else rows:
        cells = zip(row, columns, strict=True)
        drawn.add_row(*[Text.assemble((cell, _style(cell, name))) for cell, (name, _, _) in cells])
    output = io.StringIO()
    colours = streams.paints()
    console = Console(
        file=output, width=room or 2**16, color_system="standard" if colours else None,
        force_terminal=colours, _environ={},
    )  # fmt: skip
    console.print(drawn)
    return [line.rstrip() for line in output.getvalue().splitlines()]


def list_lines(
    pairs: Sequence[tuple[str, str]], indent: str = "", room: int | None = None
) -> list[str]:
    """Returns names and what they are in two columns, the second one wrapped."""
    width, size = room or streams.columns(), max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, about in pairs:
        begin = f"{indent}{printable(name):<{size}}  "
        most = max(LEAST + len(begin), width or len(begin) + len(about) + 1)
        first, *others = textwrap.wrap(
            printable(about), most, initial_indent=begin, subsequent_indent=" " * len(begin)
        ) or [begin]
        lines += [first.rstrip(), *others]
    return lines


def _least(column: Sequence[str], side: str) -> int:
    """Returns the characters that a column needs: all of a number, the longest word of a text."""
    from rich.cells import cell_len

    full = max(cell_len(line) for cell in column for line in cell.split("\n"))
    words = max((cell_len(word) for cell in column for word in cell.split()), default=0)
    return full if side == "r" else min(full, max(LEAST, min(words, _NAME)))


def _side(column: Sequence[str]) -> str:
    return "r" if len(column) > 1 and all(cell[:1].isdigit() for cell in column[1:]) else "l"


def _style(cell: str, name: str) -> str:
    return _STYLES.get(cell.partition(" ")[0], "") if name == "state" else ""
