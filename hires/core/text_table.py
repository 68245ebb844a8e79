"""Sets rows of text in columns: the one aligner of the screens, the benchmarks and the reports.

rich takes a tenth of a second to import, which ``hires status`` does not have, and folds cells to
the width of a terminal, where a file keeps them whole.
"""

from __future__ import annotations

import itertools
import re
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import NamedTuple

LEAST = 16
"""A text is shortened to no fewer characters than this, or than its heading."""
_DOTS = "..."
_COLOUR = re.compile(r"\x1b\[\d+m")
_FORMULA = re.compile(r"[=+@\t]|-(?!$|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?$| / [\d,]+$| / -$)")
"""How a text begins that a spreadsheet computes; a number below 0 is no formula, nor are places,
as ``- / 1,0``."""

Rows = Sequence[Sequence[str]]
"""Rows of one length, headings first; a cell with line breaks takes several lines."""


def aligned(
    rows: Rows,
    align: str | None = None,
    gap: str = "  ",
    paint: Callable[[int, str], str] | None = None,
) -> list[str]:
    r"""Returns one line a row, in columns of equal width; a cell with line breaks takes several.

    Args:
        rows: of one length, headings first.
        align: ``l`` or ``r`` for each column; None: as :func:`sides_of` has them.
        gap: what stands between two columns.
        paint: returns the text of a cell in a colour, given its column.

    >>> aligned([("stage", "layers"), ("0", "12"), ("1", "7")])
    ['stage  layers', '    0      12', '    1       7']
    """
    if not rows:
        return []
    sides = align or sides_of(rows)
    widths, lines = _widths(rows), []
    for row in rows:
        cells = [cell.split("\n") for cell in row]
        for parts in itertools.zip_longest(*cells, fillvalue=""):
            texts = []
            for place, (part, width, side) in enumerate(zip(parts, widths, sides, strict=True)):
                pad = " " * (width - columns_of(part))
                text = paint(place, part) if paint and part else part
                texts.append(pad + text if side == "r" else text + pad)
            lines.append(gap.join(texts).rstrip())
    return lines


def sides_of(rows: Rows) -> str:
    """Returns ``r`` for columns whose cells begin with a digit, the heading apart, else ``l``."""
    return "".join(
        "r" if len(cells) > 1 and all(cell[:1].isdigit() for cell in cells[1:]) else "l"
        for cells in zip(*rows, strict=True)
    )


class Fitted(NamedTuple):
    """Rows that fit on a screen, and what had to go for it."""

    rows: list[list[str]]
    places: list[int]
    """Of the columns that stayed."""
    lost: list[int]
    """Places of the columns that did not fit."""
    is_whole: bool
    """Whether every cell is shown in full."""
    needs: int
    """Characters of a line that shows everything."""


def fitted(
    rows: Rows, width: int | None, align: str, keep: Sequence[int] = (), gap: int = 2
) -> Fitted:
    """Returns the columns of rows that fit into ``width`` characters; None: all of them.

        run        state   img/s   note            80 characters
        run        state   img/s   note            60: texts are shortened, down to LEAST characters
                                                   or the heading; the first to half of the width
        run        state   img/s                   40: then columns go, the last ones first

    Columns whose ``align`` is ``r`` hold numbers, which are never shortened. Those in ``keep`` stay
    longest, the first one always, and those without a value go first; ``gap`` characters stand
    between two.
    """
    widths = _widths(rows)
    needs = sum(widths) + gap * (len(widths) - 1)
    places = list(range(len(widths)))
    if width is None or needs <= width:
        return Fitted([list(row) for row in rows], places, [], True, needs)
    least = [
        full if side == "r" else min(full, max(LEAST, _widest(head)))
        for full, side, head in zip(widths, align, rows[0], strict=True)
    ]
    if align[0] == "l":  # a name that is cut says little
        least[0] = min(widths[0], max(least[0], width // 2))
    places = [p for p in places if any(row[p] not in ("", "-") for row in rows[1:])] or places
    order, spare = places[:1], width - least[places[0]]
    for place in dict.fromkeys([*(place for place in keep if place in places), *places]):
        if place not in order and spare >= gap + least[place]:
            order.append(place)
            spare -= gap + least[place]
    for place in order:  # what is left serves the columns in the same order
        more = max(0, min(spare, widths[place] - least[place]))
        least[place] += more
        spare -= more
    stay = sorted(order)
    cut = [[_shortened(row[place], least[place]) for place in stay] for row in rows]
    whole = all(widths[place] <= least[place] for place in stay)
    return Fitted(cut, stay, [place for place in places if place not in order], whole, needs)


def folded(rows: Rows, width: int | None, gap: int = 2) -> list[list[str]]:
    """Returns rows whose last column is folded into the ``width`` that the others leave."""
    if width is None or not rows:
        return [list(row) for row in rows]
    room = max(LEAST, width - sum(_widths(rows)[:-1]) - gap * (len(rows[0]) - 1))
    return [[*row[:-1], "\n".join(textwrap.wrap(row[-1], room) or [""])] for row in rows]


def shortened(text: str, width: int) -> str:
    """Returns a text of at most ``width`` characters: a sentence's beginning, a name's two ends.

    >>> shortened("the loss is nan", 12), shortened("resnet50-sp-fp32-0123abcd", 16)
    ('the loss...', 'resnet...123abcd')
    """
    if columns_of(text) <= width:
        return text
    room = max(0, width - len(_DOTS))
    tail = 0 if " " in text.strip() else -(-room // 2)
    head = _first(text, room - tail).rstrip()
    return head + _DOTS[:width] + _first(text[::-1], tail)[::-1]


def columns_of(text: str) -> int:
    """Returns how many columns of a terminal a line takes: some letters take two, or none."""
    if "\x1b" in text:
        text = _COLOUR.sub("", text)
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def spreadsheet_text(text: str) -> str:
    """Returns a text for a CSV file; one that a spreadsheet would compute gets an apostrophe."""
    return f"'{text}" if _FORMULA.match(text) else text


def _first(text: str, width: int) -> str:
    """Returns as much of the beginning of a text as fits."""
    ends = itertools.accumulate(map(columns_of, text))
    return text[: sum(end <= width for end in ends)]


def _shortened(cell: str, width: int) -> str:
    return "\n".join(shortened(line, width) for line in cell.split("\n"))


def _widest(cell: str) -> int:
    return max(map(columns_of, cell.split("\n")))


def _widths(rows: Rows) -> list[int]:
    return [max(map(_widest, cells)) for cells in zip(*rows, strict=True)]
