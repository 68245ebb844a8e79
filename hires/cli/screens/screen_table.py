"""Sets a table for a reader's screen with rich: as wide as it is, texts wrapped, states in colours.

Where a table is too wide, columns with one value go below it. What then has no room is left out
from the right, and a line names it; a single row becomes a list. rich is imported where a table is
drawn: help and lists do without.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence

from hires.core import terminal
from hires.core.store.reading import printable

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
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = [[printable(cell) for cell in row] for row in rows]
    names = names or [" ".join(cell.split()) if heads else "" for cell in table[0]]
    columns = [*zip(*table, strict=True)]
    sides = sides or "".join(map(_side, columns))
    least = [_least(*column) for column in zip(columns, sides, strict=True)]
    width, shown, below = terminal.columns(), [*range(len(names))], [""] * 0
    room = None if width is None else width - indent

    def fits() -> bool:
        return room is None or sum(least[n] + _GAP for n in shown) - _GAP <= room

    if heads and not fits():
        if len(table) == 2:
            pairs = [pair for pair in zip(names, table[1], strict=True) if pair[1] not in ("", "-")]
            return list_lines(pairs, room=room)
        shown = [n for n in shown if len({row[n] for row in table[1:]}) > 1] or shown[:1]
        alike = [f"{names[n]} {table[1][n]}" for n in range(len(names)) if n not in shown]
        below = [f"(every row: {', '.join(alike)})"] if alike else []
        lost: list[str] = []
        while not fits() and len(shown) > 1:
            lost.insert(0, names[shown.pop()])
        below += [f"(left out: {', '.join(lost)}; a wider screen or --json has it)"] if lost else []
    drawn = Table(
        box=box.SIMPLE_HEAD if heads else None,
        show_edge=False,
        show_header=heads,
        pad_edge=False,
        header_style="none",
        padding=(0, _GAP - (1 if heads else 0), 0, 0),
    )
    for n in shown:
        side = "right" if sides[n] == "r" else "left"
        least_room = least[n] if room is None else min(least[n], room)
        head = Text(table[0][n]) if heads else ""
        drawn.add_column(head, justify=side, min_width=least_room, overflow="fold")  # type: ignore[arg-type]
    for row in table[1:] if heads else table:
        drawn.add_row(*[Text.assemble((row[n], _style(row[n], names[n]))) for n in shown])
    output = io.StringIO()
    colours = terminal.paints()
    console = Console(
        file=output, width=room or 2**16, color_system="standard" if colours else None,
        force_terminal=colours, _environ={},
    )  # fmt: skip
    console.print(drawn)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    return [*lines, *(part for line in below for part in textwrap.wrap(line, room or len(line)))]


def list_lines(
    pairs: Sequence[tuple[str, str]], indent: str = "", room: int | None = None
) -> list[str]:
    """Returns names and what they are in two columns, the second one wrapped."""
    width, size = room or terminal.columns(), max((len(name) for name, _ in pairs), default=0)
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
