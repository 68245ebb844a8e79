"""Sets a table for a reader's screen with rich: as wide as it is, texts wrapped, states in colours.

Where even wrapped texts have no room, columns are left out, and a line below the table names them.
rich is imported where a table is drawn: help and lists do without.
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
"""A text is wrapped at no fewer characters than this, or than its heading."""
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
    keep: Sequence[str] = (),
    *,
    heads: bool = True,
    names: Sequence[str] | None = None,
    indent: int = 0,
) -> list[str]:
    """Returns the lines of a table, and what is left out of it.

    Args:
        rows: of one length; with ``heads`` the first one has the headings, and a line below it.
        sides: ``l`` or ``r`` for each column; None: right where all cells begin with a digit.
        keep: names of the columns that stay longest where the screen is narrow.
        heads: whether there are headings.
        names: of the columns; None: their headings. Texts below ``state`` are in colours.
        indent: characters that the caller writes before every line.
    """
    from rich import box, cells
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = [[printable(cell) for cell in row] for row in rows]
    names = names or (
        [" ".join(cell.split()) for cell in table[0]] if heads else [""] * len(rows[0])
    )
    columns = [*zip(*table, strict=True)]
    sides = sides or "".join(map(_side, columns))
    full = [max(cells.cell_len(line) for c in col for line in c.split("\n")) for col in columns]
    least = [
        size if side == "r" else min(size, max(LEAST, *map(cells.cell_len, col[0].split("\n"))))
        for size, side, col in zip(full, sides, columns, strict=True)
    ]
    width = terminal.columns()
    room = sum(full) + _GAP * len(full) if width is None else width - indent
    kept: list[int] = []
    first = [0, *(names.index(name) for name in keep if name in names)]
    for place in dict.fromkeys([*first, *range(len(names))]):
        if not kept or sum(least[one] + _GAP for one in kept) + least[place] <= room:
            kept.append(place)
    kept.sort()
    drawn = Table(
        box=box.SIMPLE_HEAD if heads else None,
        show_edge=False,
        show_header=heads,
        pad_edge=False,
        header_style="none",
        padding=(0, _GAP - (1 if heads else 0), 0, 0),
    )
    for place in kept:
        drawn.add_column(
            Text(table[0][place]) if heads else "",
            justify="right" if sides[place] == "r" else "left",
            min_width=min(least[place], room),
            overflow="fold",
        )
    for row in table[1:] if heads else table:
        drawn.add_row(
            *[Text.assemble((row[place], _style(row[place], names[place]))) for place in kept]
        )
    output = io.StringIO()
    colours = "standard" if terminal.paints() else None
    console = Console(
        file=output,
        width=room,
        color_system=colours,  # type: ignore[arg-type]
        force_terminal=terminal.paints(),
        _environ={},
    )
    console.print(drawn)
    lines = [line.rstrip() for line in output.getvalue().splitlines()]
    if lost := [name for place, name in enumerate(names) if place not in kept]:
        needs = sum(least) + _GAP * (len(least) - 1) + indent
        lines += textwrap.wrap(f"(left out: {', '.join(lost)}; COLUMNS={needs} shows all)", room)
    return lines


def list_lines(pairs: Sequence[tuple[str, str]], indent: str = "") -> list[str]:
    """Returns names and what they are in two columns, the second one wrapped."""
    width, size = terminal.columns(), max((len(name) for name, _ in pairs), default=0)
    lines = []
    for name, about in pairs:
        begin = f"{indent}{printable(name):<{size}}  "
        room = max(LEAST + len(begin), width or len(begin) + len(about) + 1)
        first, *others = textwrap.wrap(
            printable(about), room, initial_indent=begin, subsequent_indent=" " * len(begin)
        ) or [begin]
        lines += [first.rstrip(), *others]
    return lines


def _side(column: Sequence[str]) -> str:
    return "r" if len(column) > 1 and all(cell[:1].isdigit() for cell in column[1:]) else "l"


def _style(cell: str, name: str) -> str:
    return _STYLES.get(cell.partition(" ")[0], "") if name == "state" else ""
