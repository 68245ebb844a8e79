"""Sets rows of text in columns: the one aligner of the screens, the benchmarks and the reports.

rich takes a tenth of a second to import, which ``hires status`` does not have, and folds cells to
the width of a terminal, where a file keeps them whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], align: str | None = None, gap: str = "  ") -> list[str]:
    r"""Returns one line a row, in columns of equal width; a cell with line breaks takes several.

    Args:
        rows: of one length, headings first.
        align: ``l`` or ``r`` for each column; None: columns whose cells all begin with a digit,
            the heading apart, are flush right.
        gap: what stands between two columns.

    >>> aligned([("stage", "layers"), ("0", "12"), ("1", "7")])
    ['stage  layers', '    0      12', '    1       7']
    """
    if not rows:
        return []
    sides = align or "".join(
        "r" if len(cells) > 1 and all(cell[:1].isdigit() for cell in cells[1:]) else "l"
        for cells in zip(*rows, strict=True)
    )
    split = [[cell.split("\n") for cell in row] for row in rows]
    widths = [
        max(len(line) for cell in cells for line in cell) for cells in zip(*split, strict=True)
    ]
    lines = []
    for row in split:
        for parts in itertools.zip_longest(*row, fillvalue=""):
            cells = zip(parts, widths, sides, strict=True)
            texts = (part.rjust(w) if side == "r" else part.ljust(w) for part, w, side in cells)
            lines.append(gap.join(texts).rstrip())
    return lines
