"""Sets a table for a reader's screen: as wide as it is, states in colours, and what is missing.

The verbs and the benchmarks show their tables with it; files hold them whole.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from hires.core import terminal
from hires.core.text_table import Rows, aligned, columns_of, fitted

_COLOURS = {
    **dict.fromkeys(("done", "ok", "complete"), terminal.GREEN),
    **dict.fromkeys(("failed", "lost", "error"), terminal.RED),
    **dict.fromkeys(("cancelled", "infeasible", "saved", "warning"), terminal.YELLOW),
    "running": terminal.CYAN,
}
"""State -> its colour."""


def screen_lines(
    rows: Rows,
    width: int | None,
    sides: str,
    names: Sequence[str],
    keep: Sequence[int] = (),
    rule: str = "",
    indent: int = 0,
) -> tuple[list[str], list[str]]:
    """Returns the lines of a table in ``width``, and what is missing in words, if anything is.

    A column named ``state`` is in colours if the output takes them; ``rule`` is drawn below the
    headings, which stand on it. The caller writes ``indent`` characters before every line.
    """
    width = None if width is None else width - indent
    fit = fitted(rows, width, sides, keep)
    tall = max(head.count("\n") for head in fit.rows[0])
    fit.rows[0] = ["\n" * (tall - head.count("\n")) + head for head in fit.rows[0]]
    shown = [names[place] for place in fit.places]

    def paint(place: int, cell: str) -> str:
        return painted_state(cell) if shown[place] == "state" else cell

    kept = "".join(sides[place] for place in fit.places)
    lines = aligned(fit.rows, kept, paint=paint if terminal.paints() else None)
    if rule:
        lines.insert(tall + 1, rule * max(map(columns_of, lines)))
    parts = [f"left out: {', '.join(names[place] for place in fit.lost)}"] if fit.lost else []
    parts += [] if fit.is_whole else ["texts are shortened"]
    all_of_it = f"COLUMNS={fit.needs + indent} shows all"
    note = f"({'; '.join([*parts, all_of_it])})" if parts else ""
    return lines, textwrap.wrap(note, width or len(note) or 1)


def painted_state(text: str) -> str:
    """Returns the name of a state, and what follows it, in its colour."""
    colour = _COLOURS.get(text.partition(" ")[0])
    return text if colour is None else terminal.painted(text, colour)
