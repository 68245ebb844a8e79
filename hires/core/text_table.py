"""Sets rows of text in columns for files, which keep every cell whole on its line."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence

_FORMULA = re.compile(r"[=+@\t]|-(?!$|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?$| / [\d,]+$| / -$)")
"""How a text begins that a spreadsheet computes; a number below 0 is no formula, nor are places,
as ``- / 1,0``."""

Rows = Sequence[Sequence[str]]
"""Rows of one length, headings first; a cell with line breaks takes several lines."""


def aligned(rows: Rows, align: str | None = None, gap: str = "  ") -> list[str]:
    r"""Returns one line a row, in columns of equal width; a cell with line breaks takes several.

    Args:
        rows: of one length, headings first.
        align: ``l`` or ``r`` for each column; None: as :func:`sides_of` has them.
        gap: what stands between two columns.

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
            for part, width, side in zip(parts, widths, sides, strict=True):
                pad = " " * (width - columns_of(part))
                texts.append(pad + part if side == "r" else part + pad)
            lines.append(gap.join(texts).rstrip())
    return lines


def sides_of(rows: Rows) -> str:
    """Returns ``r`` for columns whose cells begin with a digit, the heading apart, else ``l``."""
    return "".join(
        "r" if len(cells) > 1 and all(cell[:1].isdigit() for cell in cells[1:]) else "l"
        for cells in zip(*rows, strict=True)
    )


def columns_of(text: str) -> int:
    """Returns how many columns of a terminal a line takes: some letters take two, or none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def spreadsheet_text(text: str) -> str:
    """Returns a text for a CSV file; one that a spreadsheet would compute gets an apostrophe."""
    return f"'{text}" if _FORMULA.match(text) else text


def _widest(cell: str) -> int:
    return max(map(columns_of, cell.split("\n")))


def _widths(rows: Rows) -> list[int]:
    return [max(map(_widest, cells)) for cells in zip(*rows, strict=True)]
