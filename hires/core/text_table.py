"""Sets rows of text in columns for files, and marks text that a spreadsheet would compute."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FORMULA = re.compile(r"[=+@\t]|-(?!$|(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?$| / [\d,]+$| / -$)")
"""How a text begins that a spreadsheet computes; a number below 0 is no formula, nor are places,
as ``- / 1,0``."""


def aligned(rows: Sequence[Sequence[str]], sides: str, gap: str = "  ") -> list[str]:
    """Returns one line a row, in columns of equal width; ``sides`` has ``l`` or ``r`` for each.

    >>> aligned([("stage", "layers"), ("0", "12"), ("1", "7")], "lr")
    ['stage  layers', '0          12', '1           7']
    """
    widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
    return [
        gap.join(
            cell.rjust(width) if side == "r" else cell.ljust(width)
            for cell, width, side in zip(row, widths, sides, strict=True)
        ).rstrip()
        for row in rows
    ]


def spreadsheet_text(text: str) -> str:
    """Returns a text for a CSV file; one that a spreadsheet would compute gets an apostrophe."""
    return f"'{text}" if _FORMULA.match(text) else text
